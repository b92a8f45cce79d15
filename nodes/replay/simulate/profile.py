"""What a node's steps, reads and messages cost: a small file, measured (`pd bench profile`) or estimated.

Times of steps stand as lines: for so many tokens (or rows), ms without context and ms more per 1,000 tokens of
context. Between two lines they are interpolated, beyond the last one continued.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from importlib import resources
from itertools import pairwise
from pathlib import Path

from pdbus.bus.errors import ConfigError, RemoteProtocolError
from pdbus.bus.wire import Declared, from_json, to_json

DEFAULT = "estimate-8b-80gb"
FOLDER = "profiles"
FILE_BYTES_MAX = 1 << 20  # a profile has some dozens of lines
NS_PER_MS = 1_000_000

Line = tuple[float, float, float]  # tokens or rows, ms, ms per 1,000 tokens of context


class Profile(Declared, forbid_unknown_fields=True):
    """`source` says where the numbers come from. Defaults of a simulated node's settings stand here, too."""

    name: str
    source: str
    prefill: tuple[Line, ...]  # a step over so many prompt tokens, after so much context
    decode: tuple[Line, ...]  # a step over so many rows, each with so much context
    kv_bytes_per_token: int
    prefill_kv_tokens: int
    decode_kv_tokens: int
    link_gb_per_s: float  # of a node, to or from all others together
    read_ms: float  # of a read, beside its bytes
    message_ms: float  # from one node to another
    request_ms: float = 0.0  # from a client's sending to admission
    answer_ms: float = 0.0  # from a sampled token to its client
    max_model_len: int = 131_072
    prefill_chunk: int = 2048
    max_batch_tokens: int = 2048
    max_running: int = 256
    skip_sampling: bool = False


class StepTimes:
    """A profile's lines, ready to be asked often."""

    def __init__(self, profile: Profile) -> None:
        fixed_ms = _fixed_ms(profile.prefill)
        self._prefill = _Lines(((0.0, fixed_ms, 0.0), *profile.prefill))
        self._decode = _Lines(profile.decode)
        self._fixed_ms = min(fixed_ms, profile.decode[0][1])

    def ns(self, tokens: int, context: float, rows: int, row_context: float) -> int:
        """A step over `tokens` of prompts after `context` on the average, and `rows` decoding rows. What every step
        costs is paid once."""
        if not tokens:
            return max(1, int(self._decode.ms(rows, row_context) * NS_PER_MS))
        if not rows:
            return max(1, int(self._prefill.ms(tokens, context) * NS_PER_MS))
        both_ms = self._prefill.ms(tokens, context) + self._decode.ms(rows, row_context) - self._fixed_ms
        return max(1, int(both_ms * NS_PER_MS))


def _fixed_ms(lines: tuple[Line, ...]) -> float:
    """What a step costs before its first token: where the first two lines lead to."""
    (s0, a0, _), (s1, a1, _) = lines[0], lines[min(1, len(lines) - 1)]
    rise = (a1 - a0) / (s1 - s0) if s1 > s0 else 0.0
    return min(a0, max(0.0, a0 - rise * s0))


class _Lines:
    def __init__(self, lines: tuple[Line, ...]) -> None:
        self._sizes = [line[0] for line in lines]
        self._lines = lines

    def ms(self, size: float, context: float) -> float:
        lines = self._lines
        if len(lines) == 1 or size <= self._sizes[0]:
            return lines[0][1] + lines[0][2] * context / 1000
        i = min(bisect_left(self._sizes, size), len(lines) - 1)
        (s0, a0, c0), (s1, a1, c1) = lines[i - 1], lines[i]
        part = (size - s0) / (s1 - s0)
        return a0 + (a1 - a0) * part + (c0 + (c1 - c0) * part) * context / 1000


# ---------------------------------------------------------------- files


def load_profile(name: str) -> Profile:
    """A file, or one that ships, by name. Raises ConfigError (`--profile`)."""
    if name in shipped():
        return _checked(name, (resources.files(__package__) / FOLDER / f"{name}.json").read_bytes())
    path = Path(name)
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError("--profile", f"{path} has more than {FILE_BYTES_MAX >> 20} MiB: no profile")
        return _checked(str(path), path.read_bytes())
    except OSError as e:
        ships = ", ".join(shipped())
        raise ConfigError("--profile", f"cannot read {path}: {e.strerror}; these ship: {ships}") from None


def shipped() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files(__package__) / FOLDER
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def save_profile(profile: Profile, path: Path) -> None:
    """Raises ConfigError (`--out`)."""
    try:
        path.write_bytes(to_json(profile) + b"\n")
    except OSError as e:
        raise ConfigError("--out", f"cannot write {path}: {e.strerror}") from None


def _checked(name: str, data: bytes) -> Profile:
    try:
        profile = from_json(data, Profile)
    except RemoteProtocolError as e:
        raise ConfigError("--profile", f"{name} is no profile: {e}") from None
    if problem := _problem(profile):
        raise ConfigError("--profile", f"{name}: {problem}")
    return profile


def _problem(p: Profile) -> str:
    for field in ("prefill", "decode"):
        lines: tuple[Line, ...] = getattr(p, field)
        if not lines:
            return f"{field} has no line"
        if any(not math.isfinite(number) or number < 0 for line in lines for number in line):
            return f"{field}: only finite numbers from 0 on"
        if any(b[0] <= a[0] for a, b in pairwise(lines)) or lines[0][0] < 1:
            return f"{field}: sizes must rise, from 1 or more"
    sizes = ("kv_bytes_per_token", "prefill_kv_tokens", "decode_kv_tokens", "max_model_len",
             "prefill_chunk", "max_batch_tokens", "max_running", "link_gb_per_s")  # fmt: skip
    times = ("read_ms", "message_ms", "request_ms", "answer_ms")
    for field in (*sizes, *times):
        value = getattr(p, field)
        least = 0 if field in times else 1e-9
        if not math.isfinite(value) or value < least:
            return f"{field} is {value}: " + ("at least 0" if field in times else "more than 0")
    return ""
