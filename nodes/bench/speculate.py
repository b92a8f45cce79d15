"""`pd bench speculate`: what drafts are worth where an answer repeats its prompt, on one engine, one thread, batch 1.

The model goes on with a text that it has seen twice. The answer is computed with drafts and without, in turns; what
is taken is the CPU time of this thread over all decode steps. Without bus, scheduler or text, as in `pd bench engine`.

Result: `model`, `method` (ngram, draft), `drafts` (of a step, at most), `tokens` of an answer, `steps` that it took
with drafts, `acceptance` = accepted / drafted, `plain_tokens_per_s`, `tokens_per_s`, `ratio` of the two, and `equal`:
whether both said the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import StepRow
from pdbus.nodes.engines.torch_engine import TorchEngine
from pdbus.nodes.models.config import ResolvedModel, resolve_model
from pdbus.nodes.models.draft_model import resolve_draft
from pdbus.nodes.worker import keep_freed_memory

from .engine import BLOCK_SIZE, _engine_args

ANSWER_TOKENS = 128
BLOCKS = 64
TEXT = (
    "def total(prices, discounts):\n    result = 0\n    for price, discount in zip(prices, discounts):\n"
    "        result += price * (1 - discount)\n    return result\n\n\ndef average(prices, discounts):\n"
    "    return total(prices, discounts) / len(prices)\n\n\n"
)


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    steps: int
    drafted: int
    decode_ns: int


def run(rounds: int = 3, drafts: int = 8, model: str = "", draft_model: str = "") -> dict[str, Any]:
    """Medians over `rounds` of each kind."""
    torch.set_num_threads(1)
    keep_freed_memory()
    resolved = resolve_model(model)
    prompt = _prompt(resolved)
    plain, drafting = _engine(resolved, 0, ""), _engine(resolved, drafts, draft_model)
    pairs = [(_answer(plain, prompt), _answer(drafting, prompt)) for _ in range(rounds + 1)][1:]  # the first warms up
    without, with_ = zip(*pairs, strict=True)
    one = with_[0]
    speeds = [ANSWER_TOKENS / median(answer.decode_ns for answer in some) * 1e9 for some in (without, with_)]
    return {
        "model": resolved.name,
        "method": "draft" if draft_model else "ngram",
        "drafts": drafts,
        "tokens": ANSWER_TOKENS,
        "steps": one.steps,
        "acceptance": (ANSWER_TOKENS - one.steps) / max(1, one.drafted),
        "plain_tokens_per_s": speeds[0],
        "tokens_per_s": speeds[1],
        "ratio": speeds[1] / speeds[0],
        "equal": len({answer.tokens for pair in pairs for answer in pair}) == 1,
    }


def _prompt(model: ResolvedModel) -> list[int]:
    """A text twice, and its beginning."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(Path(model.folder) / "tokenizer.json")).encode(TEXT * 2).ids
    return ids


def _engine(model: ResolvedModel, drafts: int, draft_model: str) -> TorchEngine:
    args = _engine_args(model, "auto", BLOCKS)
    if drafts:
        args = replace(args, speculate=drafts)
    if drafts and draft_model:
        draft, fit = resolve_draft(draft_model, model)
        geometry = args.geometry
        added = geometry.block_bytes // geometry.layers * fit.layers
        geometry = replace(geometry, layers=geometry.layers + fit.layers, block_bytes=geometry.block_bytes + added)
        args = replace(args, geometry=geometry, speculate_method="draft", draft_model=draft.folder)
    engine = TorchEngine(args, torch.zeros(BLOCKS * args.geometry.block_bytes // 4))
    engine.warm_up()
    return engine


def _answer(engine: TorchEngine, prompt: Sequence[int]) -> Answer:
    """`steps` and the time are those after the first token."""
    engine.open(0, prompt, Sampling(max_tokens=ANSWER_TOKENS + 1, ignore_eos=True))
    blocks = -(-(len(prompt) + ANSWER_TOKENS + 1) // BLOCK_SIZE)
    start = StepRow(seq=0, start=0, count=len(prompt), new_blocks=pack_u32(range(blocks)), sample=True)
    tokens, steps, drafted = [engine.step([start])[0].token], 0, 0
    began = time.thread_time_ns()
    while len(tokens) <= ANSWER_TOKENS:
        [row] = engine.step([StepRow(seq=0, start=len(prompt) + len(tokens) - 1, count=1, sample=True)])
        tokens += [row.token, *(more.token for more in row.more)]
        steps, drafted = steps + 1, drafted + row.drafted
    took = time.thread_time_ns() - began
    engine.close(0)
    return Answer(tuple(tokens), steps, drafted, took)
