"""Text of a setting to its value. Every parser takes what the user wrote and returns the value, or raises
ValueError saying what would be right; who wrote it, and where, is the caller's to add."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import Address, parse_address

Parser = Callable[[str], Any]

DEMO_MODEL = "smollm2-135m-instruct"  # what --model may say beside paths
SIZE_UNITS = {"": 1, "B": 1, "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3, "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6}
SIZE_UNITS |= {"G": 1 << 30, "GIB": 1 << 30, "GB": 10**9, "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12}
DURATION_UNITS_NS = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
CORES_MAX = 4096  # a range such as 0-999999999 is a slip of the finger, not a machine

_NUMBER_UNIT = re.compile(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*")


def whole(low: int, high: int) -> Parser:
    """An int from `low` to `high`."""

    def parse(text: str) -> int:
        wanted = f"give a whole number from {low} to {high}"
        try:
            value = int(text.strip().replace("_", ""))
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number; {wanted}") from None
        if not low <= value <= high:
            raise ValueError(f"{value} is out of range; {wanted}")
        return value

    return parse


def power_of_two(high: int) -> Parser:
    """A power of two from 1 to `high`."""
    number = whole(1, high)

    def parse(text: str) -> int:
        value: int = number(text)
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two; give 1, 2, 4, ... up to {high}")
        return value

    return parse


def real(low: float, high: float, unit: str) -> Parser:
    """A float from `low` to `high`, in `unit`. NaN and infinities are refused."""

    def parse(text: str) -> float:
        wanted = f"give a number of {unit} from {low:g} to {high:g}"
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number; {wanted}") from None
        if not low <= value <= high:
            raise ValueError(f"{text} is out of range; {wanted}")
        return value

    return parse


def choice(*names: str) -> Parser:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not known; give {', '.join(names[:-1])} or {names[-1]}")
        return text

    return parse


def switch(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither on nor off; give true or false")


def text(pattern: str, wanted: str) -> Parser:
    """Text that matches `pattern` as a whole; `wanted` says in words what that is."""

    def parse(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} will not do; give {wanted}")
        return value

    return parse


def size(low_bytes: int) -> Parser:
    """Bytes, written with or without a unit (`2GiB`, `512MB`, `1048576`)."""

    def parse(value: str) -> int:
        amount = _amount(value, {unit.lower(): n for unit, n in SIZE_UNITS.items()}, "a size such as 2GiB or 512MiB")
        if amount < low_bytes:
            raise ValueError(f"{value} is too small; give at least {low_bytes} bytes")
        return amount

    return parse


def duration(low_ns: int, high_ns: int) -> Parser:
    """Nanoseconds, written with a unit (`30s`, `400ms`, `2m`)."""

    def parse(value: str) -> int:
        amount = _amount(value, DURATION_UNITS_NS, "a duration such as 30s or 400ms")
        if not low_ns <= amount <= high_ns:
            raise ValueError(f"{value} is out of range; give {show_duration(low_ns)} to {show_duration(high_ns)}")
        return amount

    return parse


def show_duration(ns: int) -> str:
    """The shortest way to write a duration. Above a second what is finer than a millisecond is rounded up."""
    second, millisecond = DURATION_UNITS_NS["s"], DURATION_UNITS_NS["ms"]
    if ns > second:
        ns = -(-ns // millisecond) * millisecond
    for unit in ("h", "m", "s") if ns > second else ("s", "ms"):
        if ns >= DURATION_UNITS_NS[unit] and ns % DURATION_UNITS_NS[unit] == 0:
            return f"{ns // DURATION_UNITS_NS[unit]}{unit}"
    return f"{ns / second:g}s" if ns > second else f"{ns / 1000:g}us"


def address(*, free_port: bool = False) -> Parser:
    """`tcp://host:port` as text. Port 0, any free one, only where a socket binds."""

    def parse(value: str) -> str:
        try:
            return str(parse_address(value.strip(), "", port_zero=free_port))
        except ConfigError as e:
            raise ValueError(e.problem) from None

    return parse


def split_address(value: str) -> Address:
    """Host and port of what `address` has accepted."""
    return parse_address(value, "", port_zero=True)


def addresses(value: str) -> tuple[str, ...]:
    """Addresses separated by commas."""
    parse = address()
    return tuple(parse(part) for part in value.split(",") if part.strip())


def cores(value: str) -> tuple[int, ...]:
    """Core numbers and ranges: `0,2-3` is 0, 2 and 3. Sorted, each once."""
    numbers: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None:
            raise ValueError(f"{value!r} is no list of cores; give numbers and ranges such as 0,2-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= CORES_MAX:
            raise ValueError(f"{part.strip()!r} is no range of cores; give numbers and ranges such as 0,2-3")
        numbers += range(first, last + 1)
    return tuple(sorted(dict.fromkeys(numbers)))


def _amount(value: str, units: dict[str, int], wanted: str) -> int:
    match = _NUMBER_UNIT.fullmatch(value)
    unit = match and units.get(match[2].lower())
    if not match or not unit:
        raise ValueError(f"{value!r} will not do; give {wanted}")
    try:
        return int(Decimal(match[1]) * unit)
    except InvalidOperation:
        raise ValueError(f"{value!r} will not do; give {wanted}") from None
