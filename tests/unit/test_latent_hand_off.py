"""A prompt prefilled by some ranks and decoded by others, of a model with latents: the tokens are those of one node.

Everything between the two engines is real but the network: the mover reads over loopback what the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import RowResult, StepRow, WorkerArgs
from pdbus.connector.layout import rank_bytes_per_token
from pdbus.connector.readable import layouts_of, unreadable
from pdbus.nodes.engines import torch_engine
from pdbus.nodes.engines.torch_engine import TorchEngine

from tests.deepseek_models import V2, V3, write_deepseek
from tests.rank_threads import Meeting
from tests.torch_models import Walk, load, prompt_of, run
from tests.unit.test_layout_grid import BLOCKS, HandOff, through_loopback

T = TypeVar("T")
VOCAB, LENGTH, TOKENS = 384, 37, 12
THERE, HERE = [5, 2, 3], [6, 1, 7, 4]  # block tables of the two nodes
HELD = (6, 1, 7)  # the decode node's blocks that are read into


class Node:
    """The engines and slabs of a node's ranks, its memory full of NaN."""

    def __init__(self, args: WorkerArgs, tp: int, monkeypatch: pytest.MonkeyPatch, pp: int = 1) -> None:
        self.geometry = replace(args.geometry, tp=tp, pp=pp)
        self.layouts = layouts_of(self.geometry, BLOCKS)
        self.memory = [torch.full((layout.region_bytes // 4,), torch.nan) for layout in self.layouts]
        self._ranks = Meeting(tp, pp)
        monkeypatch.setattr(torch_engine, "meet", self._ranks.meet)
        args = replace(args, geometry=self.geometry, blocks=BLOCKS)
        self.engines = self._ranks.run(lambda rank: TorchEngine(replace(args, rank=rank), self.memory[rank]))

    def open(
        self, prompt: Sequence[int], forced: Sequence[int] = (), draft: int = -1, sampling: Sampling | None = None
    ) -> None:
        for engine in self.engines:
            engine.open(1, prompt, sampling or Sampling())
            engine.force(1, forced, draft)

    def step(self, start: int, count: int, blocks: Sequence[int], *, sample: bool = True) -> RowResult:
        """What all ranks of the last stage sample alike."""
        row = StepRow(seq=1, start=start, count=count, new_blocks=pack_u32(blocks), sample=sample)
        results = [some[0] for some in self.run(lambda engine: engine.step([row]))]
        first, *others = results[-self.geometry.tp :]
        for other in others:
            assert (other.token, other.draft, len(other.more)) == (first.token, first.draft, len(first.more))
        return first

    def close(self) -> None:
        for engine in self.engines:
            engine.close(1)

    def run(self, work: Callable[[TorchEngine], T]) -> list[T]:
        """What all ranks' engines make of it, at once."""
        return self._ranks.run(lambda rank: work(self.engines[rank]))

    def bytes(self, rank: int) -> memoryview:
        return memoryview(self.memory[rank].numpy()).cast("B")


def read(prefill: Node, decode: Node) -> None:
    """All KV of a prompt of LENGTH tokens, by every rank."""
    owned = [np.frombuffer(prefill.bytes(rank), np.uint8) for rank in range(prefill.geometry.ranks)]
    for rank, layout in enumerate(decode.layouts):
        ended = through_loopback(
            HandOff(prefill.geometry, owned, layout, rank, decode.bytes(rank), 0, LENGTH, tuple(THERE), HELD)
        )
        assert (ended.problem, ended.bytes) == ("", len(HELD) * layout.block_size * rank_bytes_per_token(layout))


@pytest.fixture(scope="module", params=["V2", "V3"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    config = {"V2": V2, "V3": V3 | {"attention_bias": True}}[request.param]
    return write_deepseek(tmp_path_factory.mktemp("models") / "made", config)


@pytest.mark.parametrize(("there", "here"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
def test_tokens_are_those_of_one_node(folder: Path, monkeypatch: pytest.MonkeyPatch, there: int, here: int) -> None:
    """Every rank holds all latents, and a reading rank reads them once, from one rank."""
    alone, prompt = load(folder, blocks=BLOCKS), prompt_of(LENGTH, VOCAB)
    walk = Walk(alone, 1, prompt, range(4), [LENGTH])
    run(alone, [walk], TOKENS)

    prefill = Node(alone.args, there, monkeypatch)
    prefill.open(prompt)
    first = prefill.step(0, LENGTH, THERE).token

    decode = Node(alone.args, here, monkeypatch)
    read(prefill, decode)
    decode.open(prompt, [first])
    tokens = [first, decode.step(LENGTH, 1, HERE).token]
    while len(tokens) < TOKENS:
        tokens.append(decode.step(LENGTH + len(tokens) - 1, 1, []).token)
    assert tokens == walk.tokens


def test_latents_and_keys_with_values_are_refused_by_both_names(folder: Path) -> None:
    latent = load(folder, blocks=2).args.geometry
    other = replace(latent, kv_parts=2, kv_heads=2, head_dim=16)
    found = {name: values for name, *values in unreadable(other, latent)}
    assert found["parts"] == ["k/v", "latent"] and found["kv_heads"] == ["2", "1"]
