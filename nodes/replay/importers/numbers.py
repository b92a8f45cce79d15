"""Numbers as traces write them: lengths in tokens, times in some unit since some beginning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .source import BadLine

TOKENS_MAX = 1 << 24  # of one prompt or answer: no node takes more (--max-model-len); beyond it something else was read
NS = {"seconds": 10**9, "milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}
SPAN_NS_MAX = 366 * 86_400 * 10**9  # a year; beyond it units are mixed
EPOCH_S_MIN = 10**9  # September 2001: a first time from here on counts since 1970, not since a trace's beginning


def tokens(value: Any, name: str, least: int = 0) -> int:
    """A count of tokens. Raises BadLine naming the field."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < TOKENS_MAX:
        raise BadLine(f"{name} is {shown(value)}; give a whole number of tokens from {least} to {TOKENS_MAX - 1}")
    return value


def number(value: Any, name: str, wanted: str) -> int | float:
    """A finite number. Raises BadLine naming the field."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if good and math.isfinite(value):
            return value  # type: ignore[no-any-return]
    except OverflowError:  # an int of hundreds of digits
        pass
    raise BadLine(f"{name} is {shown(value)}; give {wanted}")


def shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def unit_of(times: Sequence[int | float], unit: str) -> str:
    """The unit that these times are in: `unit`, unless they plainly count since 1970 in another one."""
    first = min(times, default=0)
    if first < EPOCH_S_MIN:
        return unit
    for name, ns in NS.items():
        if first < EPOCH_S_MIN * 100 * (NS["seconds"] // ns):  # until the year 5138
            return name
    return "nanoseconds"


def to_ns(time: int | float, unit: str) -> int:
    whole = int(time)  # apart, for a float since 1970 has no digits left for nanoseconds
    return whole * NS[unit] + round((time - whole) * NS[unit])
