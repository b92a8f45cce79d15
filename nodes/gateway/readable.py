"""Whether a node's status can be used here: it may be of another version, or of no node at all. Pure.

One node that says something odd must not be what ends the gateway of all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _size(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_text, value))


FIELDS: dict[str, Callable[[Any], bool]] = {
    "role": _text, "model": _text, "prefill_policy": _text, "not_ready": _texts, "block_size": _size,
    "max_model_len": _number, "vocab_size": _number, "block_bytes": _number,
}  # fmt: skip
PEER: dict[str, Callable[[Any], bool]] = {
    "name": _text, "address": _text, "role": _text, "state": _text, "detail": _text, "circuit": _text,
    "prefill_tokens_per_s": _number, "read_bytes_per_s": _number,
}  # fmt: skip


def unreadable(status: Mapping[str, Any]) -> str:
    """The first field that is not what it should be; '' when all are. One that is not there has a default."""
    metrics, peers = status.get("metrics", {}), status.get("peers", ())
    if not isinstance(metrics, dict):
        return "metrics"
    if not isinstance(peers, list | tuple) or not all(isinstance(peer, dict) for peer in peers):
        return "peers"
    wrong = _wrong(status, FIELDS) or _wrong(metrics, dict.fromkeys(metrics, _number), "metrics.")
    return wrong or next((found for peer in peers if (found := _wrong(peer, PEER, "peers.*."))), "")


def _wrong(values: Mapping[str, Any], fields: Mapping[str, Callable[[Any], bool]], where: str = "") -> str:
    return next((f"{where}{name}" for name, fits in fields.items() if name in values and not fits(values[name])), "")
