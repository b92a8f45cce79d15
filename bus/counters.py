"""What one endpoint has seen since it was made."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """In messages, where nothing else is said."""

    received: int = 0
    sent: int = 0
    unsent: int = 0  # the peer has vanished, or its queue is full
    errors_answered: int = 0
    other_major: int = 0
    unknown_kind: int = 0
    bad_header: int = 0
    bad_body: int = 0
    too_many_frames: int = 0
    oversize: int = 0
    disconnects: int = 0  # of links that we opened
    forbidden: int = 0  # messages that their sender's key may not send, or that came under another's identity
    keys_refused: int = 0  # handshakes with a key that is not allowed
    handshakes_failed: int = 0  # with keys: no key or a wrong one of ours, or bytes that were replayed or changed

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
