"""Engines over small real models, and a way to run one sequence through them as control would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdbus.bus.messages import Sampling, TokenLogprob
from pdbus.bus.wire import pack_u32
from pdbus.connector.ipc import RowResult, StepRow, WorkerArgs
from pdbus.connector.layout import geometry_for
from pdbus.nodes.engines.torch_engine import TorchEngine
from pdbus.nodes.models.config import resolve_model
from pdbus.nodes.models.draft_model import resolve_draft
from pdbus.nodes.models.random_llama import write_random_llama

from tests.tokenizers_made import byte_level

BLOCK_SIZE = 16


@dataclass
class Loaded:
    """An engine and the slab under it, filled with NaN so that a row read before it was written shows."""

    engine: TorchEngine
    memory: torch.Tensor
    args: WorkerArgs

    def kv(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """What the slab holds of the first `tokens` positions in these blocks: [tokens, layer, part, head, channel]."""
        g = self.args.geometry
        slab = self.memory.view(self.args.blocks, g.layers, g.kv_parts, g.kv_heads, g.block_size, g.head_dim)
        return slab[torch.tensor(list(blocks))].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:tokens].clone()


def load(model: str | Path, *, blocks: int = 64, dtype: str = "float32", **options: Any) -> Loaded:
    """A TorchEngine with its own slab of `blocks` blocks."""
    resolved = resolve_model(str(model))
    c = resolved.config
    drafting = options.get("speculate_method") == "mtp"
    layers = c.layers + drafting
    if draft := options.get("draft_model"):
        layers += resolve_draft(str(draft), resolved)[1].layers
    geometry = geometry_for(layers, c.kv_heads, c.head_dim, BLOCK_SIZE, dtype, c.kv_parts)
    device = options.get("device", "cpu")
    memory = torch.full((blocks * geometry.block_bytes // 4,), float("nan"), device=device)
    args = WorkerArgs(
        endpoint="", slab_path="", slab_bytes=blocks * geometry.block_bytes, blocks=blocks, geometry=geometry,
        engine="torch", model=resolved.folder, dtype=dtype, **options,
    )  # fmt: skip
    return Loaded(TorchEngine(args, memory), memory, args)


class Walk:
    """One sequence on its way through an engine: prompt in chunks, then token by token."""

    def __init__(
        self, loaded: Loaded, seq: int, prompt: Sequence[int], blocks: Sequence[int], chunks: Sequence[int],
        sampling: Sampling | None = None,
    ) -> None:  # fmt: skip
        assert sum(chunks) == len(prompt)
        self.seq, self.blocks, self.tokens, self.results = seq, list(blocks), list[int](), list[RowResult]()
        self.scores: list[TokenLogprob] = []  # of the prompt's tokens but the first, if it asks for them
        self._prompt, self._chunks, self._at = len(prompt), list(chunks), 0
        self._scored = max(1, sampling.prompt_logprobs_from if sampling else 0)
        loaded.engine.open(seq, prompt, sampling or Sampling())

    def next_row(self) -> StepRow:
        new = pack_u32(self.blocks) if self._at == 0 else b""
        count = self._chunks.pop(0) if self._chunks else 1
        start, self._at = self._at, self._at + count
        return StepRow(seq=self.seq, start=start, count=count, new_blocks=new, sample=self._at >= self._prompt)

    def take(self, result: RowResult) -> None:
        assert result.seq == self.seq
        assert result.prompt_from == (len(self.scores) + self._scored if result.prompt_logprobs else 0)
        self.scores += result.prompt_logprobs
        if result.token >= 0:
            self.tokens.append(result.token)
            self.results.append(result)


def run(loaded: Loaded, walks: Sequence[Walk], tokens: int) -> None:
    """Step all walks together until each has sampled `tokens`, then close them."""
    while running := [walk for walk in walks if len(walk.tokens) < tokens]:
        for walk, result in zip(running, loaded.engine.step([w.next_row() for w in running]), strict=True):
            walk.take(result)
    for walk in walks:
        loaded.engine.close(walk.seq)


def write_spelling_llama(folder: Path, eos: int) -> Path:
    """A random model whose tokens spell bytes, token `eos` being its end of sequence."""
    made = write_random_llama(folder / "tiny", "tiny")
    copy = Path(shutil.copytree(made, folder / "spelling"))
    byte_level().save(str(copy / "tokenizer.json"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    return copy


def prompt_of(length: int, vocab: int, seed: int = 0) -> list[int]:
    """`length` random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab, (length,), generator=generator).tolist()


def cut(length: int, size: int) -> list[int]:
    """Chunks of `size`, the last one shorter."""
    return [min(size, length - at) for at in range(0, length, size)]
