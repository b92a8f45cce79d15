"""How much the owner of a bearer key may ask for: requests under way, and requests a minute. Pure.

A minute's requests are a bucket that fills evenly: whoever has rested may ask for all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from pdbus.bus.errors import Overloaded

AT_ONCE_RETRY_MS = 1000  # nobody knows when an answer ends
MINUTE_S = 60.0
LIMIT_MAX = 1_000_000


class RateLimited(Overloaded):
    """There may be room, but not for this key."""


class Limits(NamedTuple):
    """0: none."""

    at_once: int = 0
    per_minute: int = 0


WORDS: Mapping[str, str] = {"at-once": "at_once", "per-minute": "per_minute"}


def limits_of(words: list[str]) -> Limits:
    """`at-once=N per-minute=N`. Raises ValueError saying what is wrong."""
    found: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in WORDS:
            raise ValueError(f"must be operator, {', '.join(f'{known}=N' for known in WORDS)} after the key")
        if not (number.isascii() and number.isdigit() and 1 <= int(number[:10]) <= LIMIT_MAX):
            raise ValueError(f"{name} must be a number from 1 to {LIMIT_MAX}")
        if WORDS[name] in found:
            raise ValueError(f"{name} stands there twice")
        found[WORDS[name]] = int(number)
    return Limits(**found)


class Quota:
    """What one owner has under way and has asked for lately."""

    def __init__(self) -> None:
        self.at_once = 0
        self._used = 0.0  # of the bucket
        self._seen_s = 0.0

    def begin(self, limits: Limits, now_s: float) -> None:
        """One request more; `end` must follow. Raises RateLimited, which changes nothing."""
        if limits.at_once and self.at_once >= limits.at_once:
            problem = f"this key may have {_requests(limits.at_once)} under way"
            raise RateLimited(problem, retry_after_ms=AT_ONCE_RETRY_MS)
        each_s = MINUTE_S / limits.per_minute if limits.per_minute else 0.0
        used = max(0.0, self._used - (now_s - self._seen_s) / each_s) if each_s else 0.0
        if each_s and used + 1 > limits.per_minute:
            wait_s = (used + 1 - limits.per_minute) * each_s
            problem = f"this key may ask for {_requests(limits.per_minute)} a minute"
            raise RateLimited(problem, retry_after_ms=math.ceil(wait_s * 1000))
        self.at_once += 1
        self._used, self._seen_s = used + 1 if each_s else 0.0, now_s

    def end(self) -> None:
        self.at_once -= 1


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"
