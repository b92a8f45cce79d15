"""`pd eval`'s figures, of a node that scores as it is told to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.errors import Broken, ConfigError
from pdbus.bus.messages import TokenLogprob
from pdbus.nodes.evaluation.scoring import Scorer, evaluate, windows
from pdbus.nodes.evaluation.tasks import Tasks, load_tasks
from pdbus.nodes.tokenizer import ByteTokenizer


class Scoring:
    """A client of a node that finds each byte as likely as 1 in its own number, and `z` the likeliest of all."""

    def __init__(self, lost: int = 0) -> None:
        self.asked: list[tuple[int, int]] = []
        self._lost = lost

    def generate(self, prompt: Sequence[int], **sampling: Any) -> Any:
        first = sampling["prompt_logprobs_from"]
        self.asked.append((first, len(prompt)))
        scores = [TokenLogprob(logprob=-math.log(one), top=((ord("z"), 0.0),)) for one in prompt[first:]]
        return _Generation(scores[self._lost :])


class _Generation:
    finished = SimpleNamespace(timeline=SimpleNamespace(remote=True))

    def __init__(self, scores: list[TokenLogprob]) -> None:
        self._scores = scores

    async def __aiter__(self) -> AsyncIterator[Any]:
        yield SimpleNamespace(prompt_logprobs=tuple(self._scores))
        yield SimpleNamespace(prompt_logprobs=())


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 18, 128, 129, 130, 256, 257, 1000, 1024])
def test_windows_cover_each_token_but_the_first_once_from_the_last_on(tokens: int) -> None:
    found = list(windows(tokens))
    assert [n for first, end in reversed(found) for n in range(first, end)] == list(range(1, tokens))
    assert all((first - 1) % 16 == 0 for first, _ in found), "what comes before is whole blocks"


def test_perplexity_is_over_all_tokens_of_all_texts_of_a_name() -> None:
    client = Scoring()
    texts = {"one": ("ab", "c" * 300), "other": ("xyz",)}
    tasks = Tasks((("is it z? ", "z"), ("or a? ", "a")), texts)
    done: list[int] = []
    found = asyncio.run(evaluate(client, ByteTokenizer(), tasks, lambda: done.append(1)))  # type: ignore[arg-type]
    assert found.capitals == 1 and len(done) == 5
    one = [ord("b"), *[ord("c")] * 299]
    assert found.perplexity["one"] == pytest.approx(math.exp(sum(map(math.log, one)) / 300))
    assert found.perplexity["other"] == pytest.approx(math.sqrt(ord("y") * ord("z")))
    assert found.prompts == found.remote == len(client.asked) == 8


def test_a_node_that_scores_too_few_tokens_is_not_believed() -> None:
    """One of another version would not know what it was asked for."""
    scorer = Scorer(Scoring(lost=1), ByteTokenizer())  # type: ignore[arg-type]
    with pytest.raises(Broken, match="2 tokens were to be scored, 1 were"):
        asyncio.run(scorer.losses("abc"))


# ---------------------------------------------------------------- questions out of the cache


LINE = '{"question": "How many?", "answer": "4"}\n'


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PD_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    file = tmp_path / "eval/gsm8k/test.jsonl"
    file.parent.mkdir(parents=True)
    return file


def test_questions_that_are_there_are_not_fetched(kept: Path) -> None:
    kept.write_text(LINE * 30)
    tasks, expected = load_tasks()
    assert tasks.texts["gsm8k"] == ("How many?",) * 24
    assert list(tasks.texts) == list(expected.perplexity) and len(tasks.capitals) == 35


@pytest.mark.parametrize("text", [b"", LINE.encode() * 23, LINE.encode() * 5 + b"{}\n" * 20, b"\xff\xfe", b"[]\n" * 30])
def test_damaged_questions_are_to_be_deleted(kept: Path, text: bytes) -> None:
    """Fewer would make another figure."""
    kept.write_bytes(text)
    with pytest.raises(ConfigError, match=f"^GSM8K: {kept} is damaged; delete {kept.parent}, and it is fetched anew"):
        load_tasks()


def test_an_index_without_them_is_named_in_one_line(kept: Path) -> None:
    kept.parent.rmdir()
    with pytest.raises(ConfigError, match=r"^GSM8K: cannot fetch the questions of GSM8K \(") as caught:
        load_tasks()
    assert "\n" not in str(caught.value)
