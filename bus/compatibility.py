"""Can KV of one node be used by another? Compared field by field at hello, so that a pair fails there or never."""

from __future__ import annotations

from .messages import Hello

PREFILL_ROLES = ("prefill", "both")
DECODE_ROLES = ("decode", "both")

Difference = tuple[str, str, str]  # field, yours, mine


def hands_over(a: Hello, b: Hello) -> bool:
    """Whether one of them could prefill for the other."""
    return _serves(a, b) or _serves(b, a)


def differences(yours: Hello, mine: Hello) -> tuple[Difference, ...]:
    """Every field that keeps the pair from working, with both values as text. max_model_len may differ."""
    if yours.geometry is None or mine.geometry is None or not hands_over(yours, mine):
        return ()
    fields = [("version", _minor(yours.version), _minor(mine.version))]
    for field in ("layout", "layers", "kv_heads", "head_dim", "kv_parts", "block_size", "dtype", "block_bytes"):
        fields.append((field, str(getattr(yours.geometry, field)), str(getattr(mine.geometry, field))))
    fields.append(("fingerprint", yours.fingerprint, mine.fingerprint))
    fields.append(("deterministic", str(yours.deterministic).lower(), str(mine.deterministic).lower()))
    return tuple(f for f in fields if f[1] != f[2])


def describe(fields: tuple[Difference, ...]) -> str:
    return "cannot share KV: " + ", ".join(f"{name} {one} against {other}" for name, one, other in fields)


def _serves(prefill: Hello, decode: Hello) -> bool:
    return prefill.role in PREFILL_ROLES and decode.role in DECODE_ROLES


def _minor(version: str) -> str:
    """Major and minor: patch releases work together."""
    return ".".join(version.split(".")[:2])
