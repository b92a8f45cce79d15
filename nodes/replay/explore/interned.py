"""Small numbers for things, and sorted tuples of them: what the states of a model are made of."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Interned(Generic[T]):
    """Values by number."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._ids: dict[Any, int] = {}

    def id(self, key: Any, value: T) -> int:
        number = self._ids.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


def without(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    """One of them less."""
    index = items.index(item)
    return items[:index] + items[index + 1 :]


def with_one(items: tuple[int, ...], item: int) -> tuple[int, ...]:
    """One more, in its place."""
    return tuple(sorted((*items, item)))
