"""What a vLLM server's KV is, from vLLM's own configuration: geometry, fingerprint. Refuses what cannot be handed over.

vLLM's objects are looked at, never imported. A block's bytes are taken as they lie (`pages.py`): how K and V lie inside
depends on vLLM's version, its attention backend and the CPU, so these belong to the fingerprint.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Geometry
from pdbus.bus.wire import Declared

from ..layout import DTYPE_BYTES, geometry_for, node_block_bytes

VERSIONS = ((0, 32), (0, 33))  # from, and below: the connector's interface is experimental, and changes
EDGE_BYTES = 1 << 20  # of a weights file that go into the fingerprint, at each end
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")  # what CPU kernels choose layouts by


class KvShape(Declared):
    """`page_bytes`: what one block takes of one layer."""

    geometry: Geometry
    page_bytes: int
    layers: tuple[str, ...]  # vLLM's names, in order
    fingerprint: str
    model: str
    max_model_len: int


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM whose interface is not known."""
    least, below = (".".join(map(str, v)) for v in VERSIONS)
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2] if n.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise ConfigError("vllm", f"version {version} is not supported: needs {least} or newer, below {below}")


def shape_of(vllm_config: Any, kv_cache_config: Any, *, version: str, fingerprint: str = "") -> KvShape:
    """Raises ConfigError for a server whose KV cannot be handed over in this version."""
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigError(f"--{name.replace('_', '-')}", "more than 1 is not supported in this version")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError("--speculative-config", "is not supported in this version")
    spec, layers = _spec(kv_cache_config.kv_cache_groups)
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError("--kv-cache-dtype", f"{dtype} is none of {', '.join(DTYPE_BYTES)}")
    geometry = geometry_for(len(layers), spec.num_kv_heads, spec.head_size, spec.block_size, dtype)
    if node_block_bytes(geometry) != len(layers) * spec.page_size_bytes:
        raise ConfigError(
            "--kv-cache-dtype",
            f"a block takes {spec.page_size_bytes} bytes of a layer, not {node_block_bytes(geometry) // len(layers)}: "
            "quantized and packed caches are not supported in this version",
        )
    model = vllm_config.model_config
    made = fingerprint or _fingerprint(str(model.model), str(getattr(model, "revision", None) or ""), str(model.dtype))
    layout = f"vllm-{'.'.join(version.split('.')[:2])}/{kv_cache_config.kv_cache_layout}/{spec.block_size}/{_machine()}"
    return KvShape(
        geometry=geometry,
        page_bytes=spec.page_size_bytes,
        layers=layers,
        fingerprint=f"{made}/{layout}",
        model=_served(model),
        max_model_len=int(model.max_model_len),
    )


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
