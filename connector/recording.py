"""What a core hears and decides, recorded so that it can be run again: every input before the core hears it, and what
the core decided after it, so that even the input that broke a core is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdbus.bus.recorder import Recorder
from pdbus.bus.wire import Declared

from . import events as ev

CARRIERS = (ev.MessageCame, ev.Send)  # of a message, whose kind its own encoding does not tell

Handle = Callable[[Any, int], list[ev.NodeEffect]]


class CoreRaised(Declared, tag_field="t", tag=True):
    """In the place of effects: a mistake of ours ended the node."""

    problem: str


def kind_of(value: Any) -> str:
    """What a record of this is called: its type, and the kind of the message in it."""
    type_ = type(value)
    return f"{type_.__name__} {value.message.KIND}" if type_ in CARRIERS else str(type_.__name__)


class TurnRecorder:
    """One core's recording. Used by one thread at a time."""

    def __init__(self, file: Recorder) -> None:
        self._file = file
        self.path: Path = file.path

    def record(self, handle: Handle, event: Declared, now: int) -> list[ev.NodeEffect]:
        """Let the core hear an event; both are recorded, in that order."""
        heard = self._append(event, now, 0)
        try:
            effects = handle(event, now)
        except Exception as e:
            self._append(CoreRaised(problem=f"{type(e).__name__}: {e}"), now, heard)
            raise
        for effect in effects:
            self._append(effect, now, heard)
        return effects

    def close(self) -> None:
        self._file.close()

    def _append(self, value: Declared, now: int, cause: int) -> int:
        return self._file.append(kind_of(value), value, now, cause)
