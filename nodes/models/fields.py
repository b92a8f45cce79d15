"""One JSON file's values by key, each checked for its type and range. An error names the file and the key."""

from __future__ import annotations

import math
from typing import Any

from pdbus.bus.errors import ConfigError

WHOLE_MAX = (1 << 31) - 1  # no size of a model is larger; torch itself counts in signed 64 bits


class Fields:
    """The values of one table. A key that is absent or null takes the default that is given.

    Every method raises ConfigError naming `--model`, the file and the key.
    """

    def __init__(self, file: str, values: dict[str, Any], table: str = "") -> None:
        self._file = file
        self._values = values
        self._table = table  # within the file, as in `rope_scaling.factor`

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str) -> Any:
        """As it stands, unchecked; None where there is none."""
        return self._values.get(key)

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = WHOLE_MAX) -> int:
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            kind = "a positive integer" if least == 1 else f"an integer, at least {least}"
            raise self.wrong(key, f"must be {kind}, at most {most}", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not (0 < value <= WHOLE_MAX) or not math.isfinite(value):
            raise self.wrong(key, "must be a positive number", value)
        return float(value)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, f"must be a list of {count} numbers")
        numbers = Fields(self._file, {f"{key}[{i}]": number for i, number in enumerate(value)}, self._table)
        return tuple(numbers.real(f"{key}[{i}]") for i in range(count))

    def switch(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be text")
        return value

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """One id or a list of them; () for none."""
        value = self._value(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(one) is int and 0 <= one < vocab for one in ids):
            raise self.wrong(key, f"must be a token id, 0 to {vocab - 1}, or a list of them")
        return tuple(ids)

    def table(self, key: str) -> Fields:
        """An object within this one; an empty one where there is none."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object")
        return Fields(self._file, value, f"{self._table}{key}.")

    def wrong(self, key: str, wanted: str, value: Any = ...) -> ConfigError:
        """That `key` is what it is, `value` where a default was taken, and what it must be instead."""
        shown = repr(self._values.get(key) if value is ... else value)
        return self.error(key, f"is {shown if len(shown) <= 80 else shown[:77] + '...'}, but {wanted}")

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError("--model", f"{self._file}: {self._table}{key} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        return default if value is None else value
