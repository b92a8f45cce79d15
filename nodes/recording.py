"""What a node's core hears and decides, recorded so that it can be run again.

The first record holds all that the core was made of. Then every input is appended before the core hears it, and what
the core decided after it, so that even the input that broke a core is there. Tokens are in no event but as opaque
payloads; without `tokens` these are replaced by digests under a key that is thrown away with the process, the same in
inputs and effects: a core that runs again needs no more.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdbus import __version__
from pdbus.bus.members import MembershipConfig
from pdbus.bus.messages import LeaseRenewed, Message, PrefillAccepted, PrefillDone
from pdbus.bus.recorder import Recorder
from pdbus.bus.wire import Declared, replace

from . import events as ev
from .core import CoreConfig, NodeCore

DIGEST_BYTES = 16


class CoreBegan(Declared, tag_field="t", tag=True):
    """The first record of a node: what its core was made of, by which version. `tokens`: payloads are kept."""

    core: CoreConfig
    membership: MembershipConfig
    version: str
    tokens: bool = False


class CoreRaised(Declared, tag_field="t", tag=True):
    """In the place of effects: a mistake of ours ended the node."""

    problem: str


CARRIERS = (ev.MessageCame, ev.Send)  # of a message, whose kind its own encoding does not tell


def kind_of(value: Any) -> str:
    """What a record of this is called: its type, and the kind of the message in it."""
    type_ = type(value)
    return f"{type_.__name__} {value.message.KIND}" if type_ in CARRIERS else str(type_.__name__)


class NodeRecorder:
    """One node's recording."""

    def __init__(
        self, directory: Path, core: CoreConfig, membership: MembershipConfig, *, tokens: bool = False
    ) -> None:
        """Raises ConfigError (`--record`) when the file cannot be made."""
        self._file = Recorder(directory, core.name, core.incarnation)
        self.path = self._file.path
        self._tokens = tokens
        self._key = secrets.token_bytes(DIGEST_BYTES)
        began = CoreBegan(core=core, membership=membership, version=__version__, tokens=tokens)
        self._file.append("CoreBegan", began, 0)

    def turn(self, core: NodeCore, event: ev.NodeEvent, now: int) -> list[ev.NodeEffect]:
        """Let the core hear an event; both are recorded, in that order."""
        heard = self._append(event, now, 0)
        try:
            effects = core.handle(event, now)
        except Exception as e:
            self._append(CoreRaised(problem=f"{type(e).__name__}: {e}"), now, heard)
            raise
        for effect in effects:
            self._append(effect, now, heard)
        return effects

    def close(self) -> None:
        self._file.close()

    def _append(self, value: Declared, now: int, cause: int) -> int:
        hide = None if self._tokens else PAYLOADS.get(type(value))
        return self._file.append(kind_of(value), hide(value, self._digest) if hide else value, now, cause)

    def _digest(self, payload: bytes | None) -> bytes | None:
        if payload is None:
            return None
        return hashlib.blake2b(payload, digest_size=DIGEST_BYTES, key=self._key).digest()


# ---------------------------------------------------------------- where payloads are

Map = Callable[[bytes | None], bytes | None]


def with_payloads(message: Message, change: Map) -> Message:
    """The message with every first token in it changed."""
    if isinstance(message, PrefillAccepted | PrefillDone) and message.first_token is not None:
        return replace(message, first_token=change(message.first_token))
    if isinstance(message, LeaseRenewed):
        entries = tuple(replace(entry, first_token=change(entry.first_token)) for entry in message.entries)
        return replace(message, entries=entries)
    return message


def _message(value: ev.MessageCame[Message] | ev.Send[Message], change: Map) -> Declared:
    changed = with_payloads(value.message, change)
    return value if changed is value.message else replace(value, message=changed)


def _first_token(value: ev.TakeFirstToken, change: Map) -> Declared:
    return replace(value, payload=change(value.payload))


def _step(value: ev.StepEnded, change: Map) -> Declared:
    if all(row.payload is None for row in value.rows):
        return value
    return replace(value, rows=tuple(replace(row, payload=change(row.payload)) for row in value.rows))


PAYLOADS: dict[type[Declared], Callable[[Any, Map], Declared]] = {
    ev.MessageCame: _message,
    ev.Send: _message,
    ev.StepEnded: _step,
    ev.TakeFirstToken: _first_token,
}
