"""What a vLLM server's KV is, from vLLM's own configuration: geometry, fingerprint. Refuses what cannot be handed over.

vLLM's objects are looked at, never imported. A block's bytes are taken as they lie (`pages.py`): how K and V lie inside
depends on vLLM's version, its attention backend and the CPU, so these belong to the fingerprint. Only heads are told
apart, for ranks of another number: each is one run of a page.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Geometry, KVLayout
from pdbus.bus.wire import Declared, replace

from ..layout import DTYPE_BYTES, geometry_for, heads_of, layout_of
from ..readable import impossible, layouts_of

VERSIONS = ((0, 32), (0, 33))  # from, and below: the connector's interface is experimental, and changes
HEADS_FIRST = "LBHNC"  # layer, block, head, token, channel: the one layout in which a head is one run of a page
EDGE_BYTES = 1 << 20  # of a weights file that go into the fingerprint, at each end
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")  # what CPU kernels choose layouts by


ONE_ONLY = (
    "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    "nnodes",
)  # fmt: skip


class KvShape(Declared):
    """`page_bytes`: what one block takes of one layer, on one rank."""

    geometry: Geometry
    page_bytes: int
    layers: tuple[str, ...]  # vLLM's names, in order
    fingerprint: str
    model: str
    max_model_len: int

    def layouts(self, blocks: int) -> tuple[KVLayout, ...]:
        """Of every rank's slab of so many blocks: native, but for the heads, which are outside of K and V. What is
        inside of a head is nobody's concern, for it moves whole: a pair has blocks of one size."""
        return tuple(_heads_first(layout) for layout in layouts_of(self.geometry, blocks))

    @property
    def head_runs(self) -> int:
        """How many runs a rank's page must consist of. Without other ranks it moves whole."""
        return len(heads_of(self.geometry.kv_heads, self.geometry.tp, 0)) if self.geometry.tp > 1 else 1


def _heads_first(layout: KVLayout) -> KVLayout:
    part_stride = layout.block_size * layout.slot_stride
    return replace(layout, part_stride=part_stride, head_stride=len(layout.parts) * part_stride)


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM whose interface is not known."""
    least, below = (".".join(map(str, v)) for v in VERSIONS)
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2] if n.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise ConfigError("vllm", f"version {version} is not supported: needs {least} or newer, below {below}")


def shape_of(vllm_config: Any, kv_cache_config: Any, *, version: str, fingerprint: str = "") -> KvShape:
    """Raises ConfigError for a server whose KV cannot be handed over in this version."""
    parallel = vllm_config.parallel_config
    for name in ONE_ONLY:
        if (given := getattr(parallel, name, 1)) != 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{given}, but only 1 is supported in this version")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError("--speculative-config", "is not supported in this version")
    spec, layers = _spec(kv_cache_config.kv_cache_groups)
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError("--kv-cache-dtype", f"{dtype} is none of {', '.join(DTYPE_BYTES)}")
    geometry = _geometry(vllm_config, kv_cache_config.kv_cache_layout, spec, len(layers), dtype)
    page_bytes = layout_of(geometry, 1).region_bytes // len(layers)
    if page_bytes != spec.page_size_bytes:
        raise ConfigError(
            "--kv-cache-dtype",
            f"a block takes {spec.page_size_bytes} bytes of a layer, not {page_bytes}: "
            "quantized and packed caches are not supported in this version",
        )
    model = vllm_config.model_config
    made = fingerprint or _fingerprint(str(model.model), str(getattr(model, "revision", None) or ""), str(model.dtype))
    layout = f"vllm-{'.'.join(version.split('.')[:2])}/{kv_cache_config.kv_cache_layout}/{spec.block_size}/{_machine()}"
    return KvShape(
        geometry=geometry,
        page_bytes=page_bytes,
        layers=layers,
        fingerprint=f"{made}/{layout}",
        model=_served(model),
        max_model_len=int(model.max_model_len),
    )


def _geometry(vllm_config: Any, layout: str, spec: Any, layers: int, dtype: str) -> Geometry:
    """Of the whole model, as its ranks share it."""
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    kv_heads = int(vllm_config.model_config.get_total_num_kv_heads()) if tp > 1 else spec.num_kv_heads
    geometry = replace(geometry_for(layers, kv_heads, spec.head_size, spec.block_size, dtype), tp=tp)
    if faults := impossible(geometry):
        raise ConfigError("--tensor-parallel-size", f"{tp}: {faults[0][1]}")
    if (held := len(heads_of(kv_heads, tp, 0))) != spec.num_kv_heads:
        raise ConfigError(
            "--tensor-parallel-size", f"vLLM keeps {spec.num_kv_heads} of {kv_heads} KV heads on each of {tp} ranks, "
            f"not {held}"
        )  # fmt: skip
    if tp > 1 and layout != HEADS_FIRST:
        raise ConfigError(
            "--tensor-parallel-size", f"{tp} ranks need KV that lies by heads ({HEADS_FIRST}), but it lies {layout}"
        )
    return geometry


def _spec(groups: Sequence[Any]) -> tuple[Any, tuple[str, ...]]:
    if len(groups) != 1:
        raise ConfigError("--model", f"its KV cache has {len(groups)} groups: try --disable-hybrid-kv-cache-manager")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        raise ConfigError("--model", f"{type(spec).__name__}: only full attention is supported in this version")
    return spec, tuple(groups[0].layer_names)


def _served(model: Any) -> str:
    name = getattr(model, "served_model_name", None)
    return str(name[0] if isinstance(name, list | tuple) and name else name or Path(str(model.model)).name)


def _machine() -> str:
    """What vLLM's CPU kernels choose their cache layout by, as text."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    line = next((row for row in text.splitlines() if row.startswith(("flags", "Features"))), "")
    return "+".join((platform.machine(), *(flag for flag in CPU_FLAGS if flag in line.split())))


def _fingerprint(model: str, revision: str, dtype: str) -> str:
    """Of a folder: names, sizes and both ends of its weights files, and its config.json. Of a model of a hub: its name
    and revision."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'main'}/{dtype}"
    digest = xxhash.xxh3_128()
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("config.json"))):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as f:
            digest.update(f.read(EDGE_BYTES))
            f.seek(max(0, size - EDGE_BYTES))
            digest.update(f.read(EDGE_BYTES))
    return f"{digest.hexdigest()}/{dtype}"
