"""Records in words: what it was, and its details as far as they fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.markup import escape

DETAIL_CHARS_MAX = 160
KNOWN_ANYWAY = ("t", "request", "link", "header", "to_inc", "client", "client_id", "sampling", "block_hashes")


def colours_of(nodes: Iterable[str]) -> dict[str, str]:
    """A colour for each node."""
    palette = ("cyan", "magenta", "green", "yellow", "blue", "red")
    return {node: palette[i % len(palette)] for i, node in enumerate(dict.fromkeys(nodes))}


def describe(kind: str, value: Any) -> tuple[str, str]:
    """A record of this kind with this plain payload in two cells: what it is, and its details as far as they fit."""
    payload = value if isinstance(value, dict) else {"": value}
    tag = payload.get("t", "")
    what = kind if tag in ("", kind.partition(" ")[0]) else f"{kind} {tag}"
    message = payload.get("message")
    inner = message if isinstance(message, dict) else {}
    details = _fields({**{k: v for k, v in payload.items() if k != "message" or not inner}, **inner})
    if len(details) > DETAIL_CHARS_MAX:
        details = details[: DETAIL_CHARS_MAX - 1] + "…"
    return what, escape(details)


def _fields(values: dict[str, Any]) -> str:
    shown = ((k, v) for k, v in values.items() if k not in KNOWN_ANYWAY and v not in (None, b"", [], ""))
    return " ".join(f"{k.rstrip('_')}={_brief(v)}" for k, v in shown)


def _brief(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 4 else f"{value[:4].hex()}…({len(value)} B)"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_brief, value[:3]))}{f', … {len(value)}' if len(value) > 3 else ''})"
    if not isinstance(value, dict):
        return str(value)
    if "attempt" in value and "incarnation" in value:
        return f"{value.get('node')}/{value['attempt']}"
    if "generation" in value and "incarnation" in value:
        return f"{value.get('node')}/{value.get('epoch')}/{value['generation']}"
    return "{" + _fields(value) + "}"
