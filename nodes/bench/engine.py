"""`pd bench engine`: whole forward passes, beside bare `torch.nn.functional.linear` over weights of the same shapes.

Only ratios within one run mean anything: all kinds take turns, one step each, and what is taken is the CPU time of
this thread, which other processes lengthen least. No scheduler, bus or text: engine steps, greedy sampling included.

Result: `model`, `rounds`, `chunk`, and three lists of rows. `prefill` has `tokens`, `weights` (float32, fp16), `ms` and
`tokens_per_s` of one prompt in chunks of `chunk`; `decode` has `batch`, `context` (tokens before the step), `weights`,
`ms` of a step and `tokens_per_s` of the batch. Both have `linear_ms`, the bare linears over all layers and the head
(in prefill for one row), and `ratio_to_linear` = linear_ms / ms: above 1 is quicker than the bare linears.
`long_context` has for each `batch` and `weights` how many times as long a step takes at the longest context as at the
shortest, `growth`.
`startup` is one fresh process for each of `weights`: `ready_cpu_ms` from its start to the end of the warm-up, of which
`import_cpu_ms` are imports; `import_bytes`, `peak_bytes`: resident after the imports, and at most; `weight_bytes` of
all matrices as held, `slab_bytes` of KV; `peak_ratio` = peak_bytes / (import_bytes + weight_bytes + slab_bytes).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import StepRow, WorkerArgs
from pdbus.connector.layout import geometry_for
from pdbus.connector.slab import Slab
from pdbus.nodes.engines.torch_engine import TorchEngine
from pdbus.nodes.models.checkpoint import expected_tensors
from pdbus.nodes.models.config import ModelConfig, ResolvedModel, resolve_model
from pdbus.nodes.worker import keep_freed_memory

from .serve import random_model

PROMPTS = (128, 512, 1024)  # tokens
BATCHES = (1, 4, 8)
CONTEXTS = (100, 1000)  # tokens
KINDS = ("float32", "fp16")
FP16_WIDTH = 512  # FBGEMM holds matrices of a multiple of so many inputs
STARTUP_SLAB_BYTES = 64 << 20
BLOCK_SIZE = 16
SEED = 0

Pass = Callable[[], object]


def run(rounds: int = 9, chunk: int = 256, model: str = "") -> dict[str, Any]:
    """Medians over `rounds` of each kind. Without `model` the 58M random Llama that it writes itself."""
    torch.set_num_threads(1)
    keep_freed_memory()
    resolved = resolve_model(model or str(random_model()))
    if resolved.config.latent:
        raise ConfigError("--model", f"{resolved.config.architecture}: the bare products are a Llama's; give one")
    startup = [_start(resolved.folder, kind) for kind in KINDS]
    with torch.inference_mode():
        linears = Linears(resolved.config)
        subjects = {kind: Subject(resolved, kind) for kind in KINDS}
        prefill = [row for tokens in PROMPTS for row in _prefill(linears, subjects, tokens, chunk, rounds)]
        decode = [
            row
            for context in CONTEXTS
            for batch in BATCHES
            for row in _decode(linears, subjects, batch, context, rounds)
        ]
        return {
            "model": resolved.name,
            "rounds": rounds,
            "chunk": chunk,
            "prefill": prefill,
            "decode": decode,
            "long_context": _growth(decode),
            "startup": startup,
        }


def _growth(decode: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    ms = {(row["batch"], row["weights"], row["context"]): row["ms"] for row in decode}
    return [
        {"batch": batch, "weights": kind, "growth": ms[batch, kind, CONTEXTS[-1]] / ms[batch, kind, CONTEXTS[0]]}
        for batch in BATCHES
        for kind in KINDS
    ]


def _prefill(
    linears: Linears, subjects: Mapping[str, Subject], tokens: int, chunk: int, rounds: int
) -> list[dict[str, Any]]:
    passes = {kind: partial(subject.prefill, tokens, chunk) for kind, subject in subjects.items()}
    took = _in_turns({"linear": partial(linears, tokens, 1), **passes}, rounds)
    return [{"tokens": tokens, "weights": kind, **_beside(took, kind, tokens)} for kind in subjects]


def _decode(
    linears: Linears, subjects: Mapping[str, Subject], batch: int, context: int, rounds: int
) -> list[dict[str, Any]]:
    for subject in subjects.values():
        subject.fill(batch, context)
    passes = {kind: subject.decode for kind, subject in subjects.items()}
    took = _in_turns({"linear": partial(linears, batch, batch), **passes}, rounds)
    for subject in subjects.values():
        subject.clear()
    return [{"batch": batch, "context": context, "weights": kind, **_beside(took, kind, batch)} for kind in subjects]


def _beside(took: Mapping[str, float], kind: str, tokens: int) -> dict[str, float]:
    ms, linear_ms = took[kind], took["linear"]
    return {"ms": ms, "tokens_per_s": tokens / ms * 1e3, "linear_ms": linear_ms, "ratio_to_linear": linear_ms / ms}


def _in_turns(passes: Mapping[str, Pass], rounds: int) -> dict[str, float]:
    """The median CPU time of each, in ms. The first turn only warms up."""
    took: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(-1, rounds):
        for name, run_once in passes.items():
            began = time.thread_time_ns()
            run_once()
            if turn >= 0:
                took[name].append((time.thread_time_ns() - began) / 1e6)
    return {name: median(times) for name, times in took.items()}


class Linears:
    """The yardstick: every matrix of the model once, fused as an engine would, and nothing else."""

    def __init__(self, config: ModelConfig) -> None:
        c, queries, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
        layer = [(queries + 2 * kv, c.hidden), (c.hidden, queries), (2 * c.ffn, c.hidden), (c.hidden, c.ffn)]
        self._layers = [torch.randn(shape) * c.hidden**-0.5 for shape in layer * c.layers]
        self._head = torch.randn(c.vocab, c.hidden) * c.hidden**-0.5

    def __call__(self, rows: int, head_rows: int) -> None:
        inputs = {width: torch.ones(rows, width) for width in {w.shape[1] for w in self._layers}}
        for weight in self._layers:
            functional.linear(inputs[weight.shape[1]], weight)
        functional.linear(inputs[self._head.shape[1]][:head_rows], self._head)


class Subject:
    """An engine over a slab of random numbers, whose blocks are dealt in random order."""

    def __init__(self, model: ResolvedModel, weights: str) -> None:
        self._each = -(-max(*PROMPTS, *CONTEXTS) // BLOCK_SIZE) + 4  # blocks of a sequence, with room to decode
        blocks = self._each * max(BATCHES)
        args = _engine_args(model, weights, blocks)
        self.engine = TorchEngine(args, torch.randn(blocks * args.geometry.block_bytes // 4))
        self._free: list[int] = torch.randperm(blocks, generator=torch.Generator().manual_seed(SEED)).tolist()
        self._known: list[int] = []  # tokens of each open sequence

    def prefill(self, tokens: int, chunk: int) -> None:
        """One prompt, to its first token."""
        self.engine.open(0, _prompt(tokens), Sampling())
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            new = self._table(0) if start == 0 else b""
            self.engine.step([StepRow(seq=0, start=start, count=count, new_blocks=new, sample=start + count == tokens)])
        self.engine.close(0)

    def fill(self, batch: int, context: int) -> None:
        """Sequences 0 to `batch`, all but their last token taken as computed."""
        for seq in range(batch):
            self.engine.open(seq, _prompt(context + 1), Sampling())
        self._known = [context + 1] * batch
        self._step([self._table(seq) for seq in range(batch)])

    def decode(self) -> None:
        """One token for each open sequence."""
        self._step([b""] * len(self._known))

    def clear(self) -> None:
        for seq in range(len(self._known)):
            self.engine.close(seq)

    def _step(self, new_blocks: Sequence[bytes]) -> None:
        rows = [
            StepRow(seq=seq, start=self._known[seq] - 1, count=1, new_blocks=new, sample=True)
            for seq, new in enumerate(new_blocks)
        ]
        self.engine.step(rows)
        self._known = [known + 1 for known in self._known]

    def _table(self, seq: int) -> bytes:
        return pack_u32(self._free[seq * self._each : (seq + 1) * self._each])


def _prompt(tokens: int) -> list[int]:
    return torch.randint(4, 384, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def _engine_args(model: ResolvedModel, weights: str, blocks: int) -> WorkerArgs:
    c = model.config
    return WorkerArgs(
        endpoint="", slab_path="", slab_bytes=0, blocks=blocks, engine="torch", model=model.folder, weights=weights,
        geometry=geometry_for(c.layers, c.kv_heads, c.head_dim, BLOCK_SIZE, "float32"),
    )  # fmt: skip


# ---------------------------------------------------------------- a fresh process


def _start(folder: str, weights: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", __name__, folder, weights]
    row: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return row


def _started(folder: str, weights: str) -> dict[str, Any]:
    """What a worker does until it is ready, in this process."""
    imported_ns, imported_bytes = time.process_time_ns(), _peak_bytes()
    model = resolve_model(folder)
    slab = Slab.create(STARTUP_SLAB_BYTES)
    slab.populate(slab.size_bytes)
    args = _engine_args(model, weights, blocks=2)
    args = replace(args, blocks=STARTUP_SLAB_BYTES // args.geometry.block_bytes)
    engine = TorchEngine(args, slab.memory)
    keep_freed_memory()
    engine.warm_up()
    weight_bytes = _weight_bytes(model.config, weights)
    expected = imported_bytes + weight_bytes + STARTUP_SLAB_BYTES
    return {
        "weights": weights,
        "import_cpu_ms": imported_ns / 1e6,
        "ready_cpu_ms": time.process_time_ns() / 1e6,
        "import_bytes": imported_bytes,
        "weight_bytes": weight_bytes,
        "slab_bytes": STARTUP_SLAB_BYTES,
        "peak_bytes": _peak_bytes(),
        "peak_ratio": _peak_bytes() / expected,
    }


def _weight_bytes(config: ModelConfig, weights: str) -> int:
    """Of the matrices that are multiplied with: an embedding of its own is mapped."""
    shapes = [shape for shape in expected_tensors(config).values() if len(shape) == 2]
    if not config.tie_embeddings:
        del shapes[0]
    if weights == "fp16":
        return sum(2 * outputs * -(-inputs // FP16_WIDTH) * FP16_WIDTH for outputs, inputs in shapes)
    return sum(4 * outputs * inputs for outputs, inputs in shapes)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    print(json.dumps(_started(*sys.argv[1:])))
