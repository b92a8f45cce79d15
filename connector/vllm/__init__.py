"""vLLM as an engine: its prompts' KV handed over by the same bus, leases and checked reads (docs/vllm.md).

Only the modules that vLLM itself loads import it: `PdBusConnector` is found when it is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PdBusConnector"]


def __getattr__(name: str) -> Any:
    if name != "PdBusConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import PdBusConnector

    return PdBusConnector
