"""From settings to what a node is made of: the model, its KV geometry, how many blocks. Loads no weights, no torch."""

from __future__ import annotations

import subprocess
import sys

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Geometry, KVLayout
from pdbus.bus.wire import Declared, replace
from pdbus.connector.ipc import WorkerArgs
from pdbus.connector.layout import geometry_for, layout_of, node_block_bytes
from pdbus.connector.readable import layouts_of
from pdbus.connector.scratch import scratch_bytes

from .config import NodeConfig
from .engines.ipex import check_ipex
from .extras import need_node

BLOCKS_MAX = (1 << 32) - 1  # block ids travel as u32
DRAFT_NAME_DIGITS = 8  # of a fingerprint, in the names of a draft model's layers
DEVICE_WAIT_S = 120  # a driver that has not been used since the machine's start takes its time
CODED_MODEL_LEN = 32_768  # tokens; its own limit is that of memory and patience


class Setup(Declared):
    model: str  # the name that clients use
    folder: str
    geometry: Geometry
    fingerprint: str
    max_model_len: int
    vocab_size: int
    blocks: int
    slab_bytes: tuple[int, ...]  # by rank: its KV and, if it reads any, scratch where another order is permuted
    draft_folder: str = ""  # "": no draft model
    device_bytes: int = 0  # of all ranks: their KV once more, where slabs are but mirrors of it

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """How KV lies on each rank."""
        return layouts_of(self.geometry, self.blocks)


def set_up(config: NodeConfig) -> Setup:
    """Resolve the model (fetching or converting it into the cache if need be) and size its KV. Raises ConfigError.

    First whether a node can compute here at all: it must not be after a download that the user learns that not.
    """
    need_node("--engine", config.engine)
    if config.engine == "torch":
        check_ipex()
    if config.device not in ("cpu", "fake"):
        _check_there(device_of_rank(config, config.tp * config.pp - 1))
    return _coded(config) if config.engine == "coded" else _torch(config)


def _check_there(device: str) -> None:
    """Raises ConfigError as torch_device.py, asked in a process of its own, does."""
    asked = [sys.executable, "-P", "-m", "pdbus.nodes.engines.torch_device", device]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=DEVICE_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError("--device", f"{device} has not answered for {DEVICE_WAIT_S} s: is its driver well?") from None
    if done.returncode:
        said = [line for line in (*done.stderr.splitlines(), *done.stdout.splitlines()) if line.strip()]
        setting, _, problem = (said or [""])[-1].partition(": ")
        if done.returncode == 2 and problem:
            raise ConfigError(setting, problem)
        raise ConfigError("--device", f"asking for {device} ended with status {done.returncode}: {' '.join(said[-1:])}")


def device_of_rank(config: NodeConfig, rank: int) -> str:
    """Each rank has a device of its own; on a CPU, cores of one."""
    alone = config.tp * config.pp == 1 or config.device in ("cpu", "fake")
    return config.device if alone else f"{config.device}:{rank}"


def _coded(config: NodeConfig) -> Setup:
    geometry = _geometry(config, config.coded_layers, config.coded_kv_heads, config.coded_head_dim)
    blocks = _blocks(config, geometry)
    return Setup(
        model=config.model,
        folder="",
        geometry=geometry,
        fingerprint=config.model_id or f"coded-{config.coded_vocab}",
        max_model_len=_model_len(config, CODED_MODEL_LEN, blocks),
        vocab_size=config.coded_vocab,
        blocks=blocks,
        slab_bytes=_slab_bytes(config, geometry, blocks),
        device_bytes=_device_bytes(config, geometry, blocks),
    )


def _torch(config: NodeConfig) -> Setup:
    from .models.config import check_drafting, check_ranks, resolve_model
    from .models.draft_model import resolve_draft
    from .models.fingerprint import weights_fingerprint

    resolved = resolve_model(config.model)
    model = resolved.config
    check_ranks(model, config.tp)
    if config.max_model_len > model.max_positions:
        raise ConfigError(
            "--max-model-len", f"{config.max_model_len} is more than the model's own limit, {model.max_positions}"
        )
    if drafting := config.speculate_method == "mtp":
        check_drafting(resolved)
    geometry = _geometry(config, model.layers + drafting, model.kv_heads, model.head_dim, model.kv_parts)
    draft_folder = ""
    if config.draft_model:
        draft, fit = resolve_draft(config.draft_model, resolved)
        draft_folder = draft.folder
        of = weights_fingerprint(draft.folder, config.dtype)[:DRAFT_NAME_DIGITS]
        names = (*map(str, range(model.layers)), *(f"draft-{of}.{i}" for i in range(fit.layers)))
        geometry = _geometry(config, len(names), model.kv_heads, model.head_dim, model.kv_parts, names)
    blocks = _blocks(config, geometry)
    return Setup(
        model=resolved.name,
        folder=resolved.folder,
        geometry=geometry,
        fingerprint=config.model_id
        or weights_fingerprint(resolved.folder, config.dtype, config.weights, bitwise=config.deterministic),
        max_model_len=_model_len(config, model.max_positions, blocks),
        vocab_size=model.vocab,
        blocks=blocks,
        draft_folder=draft_folder,
        slab_bytes=_slab_bytes(config, geometry, blocks),
        device_bytes=_device_bytes(config, geometry, blocks),
    )


def _geometry(
    config: NodeConfig, layers: int, kv_heads: int, head_dim: int, kv_parts: int = 2, names: tuple[str, ...] = ()
) -> Geometry:
    made = geometry_for(layers, kv_heads, head_dim, config.block_size, config.dtype, kv_parts)
    geometry = replace(made, layout=config.kv_layout, tp=config.tp, pp=config.pp, layer_names=names)
    layout_of(geometry, 1)
    return geometry


def _slab_bytes(config: NodeConfig, geometry: Geometry, blocks: int) -> tuple[int, ...]:
    reads = config.role != "prefill"
    layouts = [layout_of(geometry, blocks, rank) for rank in range(geometry.ranks)]
    return tuple(layout.region_bytes + (scratch_bytes(layout) if reads else 0) for layout in layouts)


def _model_len(config: NodeConfig, own_limit: int, blocks: int) -> int:
    """Tokens of the longest request: one alone must fit into the KV blocks, or it would wait for ever."""
    held = blocks * config.block_size
    if config.max_model_len > held:
        raise ConfigError(
            "--max-model-len",
            f"{config.max_model_len} tokens do not fit into {blocks} KV blocks of {config.block_size}: give at most "
            f"{held}, or a larger --kv-memory or --kv-blocks",
        )
    return config.max_model_len or min(own_limit, held)


def _blocks(config: NodeConfig, geometry: Geometry) -> int:
    """Ranks share the memory: each holds its part of every block."""
    block_bytes = node_block_bytes(geometry)
    blocks = config.kv_blocks or min(config.kv_memory_bytes // block_bytes, BLOCKS_MAX)
    if blocks < 2:
        raise ConfigError(
            "--kv-memory", f"{config.kv_memory_bytes} bytes hold {blocks} blocks of {block_bytes}; at least 2"
        )
    return blocks


def _device_bytes(config: NodeConfig, geometry: Geometry, blocks: int) -> int:
    return blocks * node_block_bytes(geometry) if config.kv_buffer_device == "cpu" else 0


def worker_args(config: NodeConfig, setup: Setup, slab_path: str, slab_bytes: int, rank: int) -> WorkerArgs:
    return WorkerArgs(
        endpoint="",
        slab_path=slab_path,
        slab_bytes=slab_bytes,
        blocks=setup.blocks,
        geometry=setup.geometry,
        engine=config.engine,
        model=setup.folder,
        rank=rank,
        threads=config.threads,
        cpus=config.cpus,
        device=device_of_rank(config, rank),
        staged=config.kv_buffer_device == "cpu",
        dtype=config.dtype,
        weights=config.weights,
        deterministic=config.deterministic,
        skip_sampling=config.skip_sampling and config.role == "prefill",
        speculate=config.speculate,
        speculate_method=config.speculate_method,
        draft_model=setup.draft_folder,
        max_model_len=setup.max_model_len,
        max_batch_tokens=config.max_batch_tokens,
        coded_step_us=int(config.coded_step_ms * 1000),
        coded_token_us=int(config.coded_token_us),
        coded_vocab=config.coded_vocab,
    )
