"""One thing looked at: what was found, whether that is well, and what to change when it is not."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but something may surprise you
    PROBLEM = "problem"  # a node cannot work so


class Finding(NamedTuple):
    what: str
    state: State
    found: str
    setting: str = ""  # that changes it


def ok(what: str, found: str) -> Finding:
    return Finding(what, State.OK, found)


def warning(what: str, found: str, setting: str) -> Finding:
    return Finding(what, State.WARNING, found, setting)


def problem(what: str, found: str, setting: str) -> Finding:
    return Finding(what, State.PROBLEM, found, setting)
