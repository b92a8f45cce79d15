"""Can KV of one node be used by another? Compared field by field at hello, so that a pair fails there or never."""

from __future__ import annotations

from collections.abc import Callable

from .messages import Geometry, Hello

PREFILL_ROLES = ("prefill", "both")
DECODE_ROLES = ("decode", "both")

Difference = tuple[str, str, str]  # field, yours, mine

# Of a prefill node's geometry and a decode node's: every field that keeps the second from reading the first's KV, with
# both values as text. The bus knows no memory layouts, so that it is told how to compare them.
Unreadable = Callable[[Geometry, Geometry], tuple[Difference, ...]]


def hands_over(a: Hello, b: Hello) -> bool:
    """Whether one of them could prefill for the other."""
    return _serves(a, b) or _serves(b, a)


def differences(yours: Hello, mine: Hello, unreadable: Unreadable) -> tuple[Difference, ...]:
    """Every field that keeps the pair from working, with both values as text. max_model_len may differ."""
    if yours.geometry is None or mine.geometry is None or not hands_over(yours, mine):
        return ()
    fields = [] if _adjoin(yours.version, mine.version) else [("version", yours.version, mine.version)]
    if _serves(yours, mine):
        fields += unreadable(yours.geometry, mine.geometry)
    if _serves(mine, yours):
        fields += [(name, theirs, ours) for name, ours, theirs in unreadable(mine.geometry, yours.geometry)]
    fields.append(("fingerprint", yours.fingerprint, mine.fingerprint))
    fields.append(("deterministic", str(yours.deterministic).lower(), str(mine.deterministic).lower()))
    return tuple(f for f in dict.fromkeys(fields) if f[1] != f[2])


def describe(fields: tuple[Difference, ...]) -> str:
    return "cannot share KV: " + ", ".join(map(_said, fields))


def _said(field: Difference) -> str:
    name, one, other = field
    what = f"{name} {one} against {other}"
    return f"the weights differ ({what})" if name == "fingerprint" else what


def _serves(prefill: Hello, decode: Hello) -> bool:
    return prefill.role in PREFILL_ROLES and decode.role in DECODE_ROLES


def _adjoin(one: str, other: str) -> bool:
    """Of one major version, and of minor ones next to each other at most: a cluster is upgraded node by node. What is
    no version works with its like."""
    try:
        (major, minor), (other_major, other_minor) = [map(int, v.split(".")[:2]) for v in (one, other)]
    except ValueError:
        return one == other
    return major == other_major and abs(minor - other_minor) <= 1
