"""What a node's core hears and decides, recorded so that it can be run again.

At the head stands all that the core was made of. Tokens are in no event but as opaque payloads; without `tokens` these
are replaced by digests under a key that is thrown away with the process, another for each request but the same in
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
from pdbus.bus.messages import LeaseRenewed, Message, PrefillAccepted, PrefillDone, RenewedEntry, TryId
from pdbus.bus.recorder import TOTAL_BYTES_MAX, Recorder
from pdbus.bus.wire import Declared, replace
from pdbus.connector.recording import TurnRecorder

from . import events as ev
from .core import CoreConfig, NodeCore

DIGEST_BYTES = 16


class CoreBegan(Declared, tag_field="t", tag=True):
    """At the head of a node's recording: what its core was made of, by which version. `tokens`: payloads are kept."""

    core: CoreConfig
    membership: MembershipConfig
    version: str
    tokens: bool = False


# With a payload, or telling whose the next ones are.
OF_PAYLOADS = (ev.MessageCame, ev.Send, ev.TakeFirstToken, ev.StepEnded, ev.OpenSequence, ev.CloseSequence)
WITH_FIRST_TOKEN = (PrefillAccepted, PrefillDone)


class NodeRecorder(TurnRecorder):
    """One node's recording."""

    def __init__(
        self,
        directory: Path,
        core: CoreConfig,
        membership: MembershipConfig,
        *,
        tokens: bool = False,
        total_bytes_max: int = TOTAL_BYTES_MAX,
    ) -> None:
        """Raises ConfigError (`--record`) when the file cannot be made."""
        began = CoreBegan(core=core, membership=membership, version=__version__, tokens=tokens)
        super().__init__(Recorder(directory, core.name, core.incarnation, began, total_bytes_max=total_bytes_max))
        self._tokens = tokens
        self._key = secrets.token_bytes(DIGEST_BYTES)
        self._requests: dict[int, bytes] = {}  # by sequence: those of prompts computed for others

    def turn(self, core: NodeCore, event: ev.NodeEvent, now: int) -> list[ev.NodeEffect]:
        """Let the core hear an event; both are recorded, in that order."""
        return self.record(core.handle, event, now)

    def _append(self, value: Declared, now: int, cause: int) -> int:
        shown = self._hidden(value) if not self._tokens and type(value) in OF_PAYLOADS else value
        return super()._append(shown, now, cause)

    def _hidden(self, value: Any) -> Declared:
        """The value with every payload in it replaced."""
        match value:
            case ev.MessageCame(message=message) | ev.Send(message=message):
                changed = with_payloads(message, self._digest)
                return value if changed is message else replace(value, message=changed)
            case ev.TakeFirstToken(request=request, payload=payload):
                return replace(value, payload=self._digest(request, payload))
            case ev.StepEnded(rows=rows) if any(row.payload is not None for row in rows):
                return replace(value, rows=tuple(self._hidden_row(row) for row in rows))
            case ev.OpenSequence(seq=seq, try_=TryId() as try_):
                self._requests[seq] = try_.request
            case ev.CloseSequence(seq=seq):
                self._requests.pop(seq, None)
        return value  # type: ignore[no-any-return]

    def _hidden_row(self, row: ev.StepRowEnded) -> ev.StepRowEnded:
        if row.payload is None:
            return row
        return replace(row, payload=self._digest(self._requests.get(row.seq, b""), row.payload))

    def _digest(self, request: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(request + payload, digest_size=DIGEST_BYTES, key=self._key).digest()


def with_payloads(message: Message, change: Callable[[bytes, bytes], bytes]) -> Message:
    """The message with every first token in it changed: `change` is given its request and itself."""
    if isinstance(message, WITH_FIRST_TOKEN) and message.first_token is not None:
        return replace(message, first_token=change(message.try_.request, message.first_token))
    if isinstance(message, LeaseRenewed):
        return replace(message, entries=tuple(_changed(entry, change) for entry in message.entries))
    return message


def _changed(entry: RenewedEntry, change: Callable[[bytes, bytes], bytes]) -> RenewedEntry:
    if entry.first_token is None:
        return entry
    return replace(entry, first_token=change(entry.try_.request, entry.first_token))
