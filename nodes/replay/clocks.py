"""How the clocks of several recordings stand to each other.

Recordings of one boot share a clock. Those of several machines are laid side by side by their wall clocks first, which
may be seconds apart, and then by the messages that they exchanged: no message is heard before it is said, and on the
average both ways take as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdbus.bus.messages import Finished, Generate
from pdbus.bus.recording import Recording

from .. import events as ev
from .check_messages import BETWEEN_NODES, name_of
from .client_run import NotUnderstood, is_client, said
from .files import clock_offsets
from .history import turns

Times = dict[bytes, int]  # on the recording's own clock, by message


class Talk:
    """When one recording says and hears each message; of one that comes up twice nothing is known."""

    def __init__(self, recording: Recording) -> None:
        self.said: Times = {}
        self.heard: Times = {}
        self._twice: dict[bytes, None] = {}
        for into, name, at in _client(recording) if is_client(recording) else _node(recording):
            self._add(self.said if into else self.heard, name, at)
        for name in self._twice:
            self.said.pop(name, None)
            self.heard.pop(name, None)

    def _add(self, times: Times, name: bytes, at: int) -> None:
        if name in times:
            self._twice[name] = None
        times[name] = at


def _node(recording: Recording) -> Iterator[tuple[bool, bytes, int]]:
    for turn in turns(recording):
        event = turn.event
        if isinstance(event, ev.MessageCame) and event.message.KIND.startswith(BETWEEN_NODES):
            yield False, name_of(event.message), turn.now_ns
        elif isinstance(event, ev.GenerateAsked):
            yield False, event.client.encode(), turn.now_ns
        for effect in turn.effects:
            if isinstance(effect, ev.Send) and effect.message.KIND.startswith(BETWEEN_NODES):
                yield True, name_of(effect.message), turn.now_ns
            elif isinstance(effect, ev.EndRequest):
                yield True, effect.request, turn.now_ns


def _client(recording: Recording) -> Iterator[tuple[bool, bytes, int]]:
    """What it asked, as a node calls it, and how it heard of the end."""
    incarnation = recording.header.incarnation.hex()
    try:
        for each in said(recording):
            if isinstance(each.message, Generate) and not each.got:
                yield True, f"{incarnation}:{each.message.client_id}".encode(), each.now_ns
            elif isinstance(each.message, Finished):
                yield False, each.message.request, each.now_ns
    except NotUnderstood:
        return


def aligned(recordings: Sequence[Recording]) -> list[int]:
    """What to add to each recording's clock."""
    offsets = clock_offsets([recording.header for recording in recordings])
    boots = [r.header.boot or f"{r.header.node} {r.header.incarnation.hex()}" for r in recordings]
    if len(set(boots)) < 2:
        return offsets
    shifts = _shifts(boots, offsets, [Talk(recording) for recording in recordings])
    return [offset + shifts[boot] for offset, boot in zip(offsets, boots, strict=True)]


def _shifts(boots: Sequence[str], offsets: Sequence[int], talks: Sequence[Talk]) -> dict[str, int]:
    """How far each boot's clock is to be moved, so that those that have talked agree with the first one of them."""
    least = _least_delays(boots, offsets, talks)
    shifts: dict[str, int] = {}
    for first in dict.fromkeys(boots):
        shifts.setdefault(first, 0)
        todo = [first]
        while todo:
            near = todo.pop(0)
            for far in dict.fromkeys(boots):
                there, back = least.get((near, far)), least.get((far, near))
                if far not in shifts and (there is not None or back is not None):
                    shifts[far] = shifts[near] + _between(there, back)
                    todo.append(far)
    return shifts


def _between(there: int | None, back: int | None) -> int:
    """How far the far clock is to be moved, when messages seem to take at least so long: half the difference, or, when
    only one way is known, as much as it takes that nothing comes too early."""
    if there is not None and back is not None:
        return (back - there) // 2
    return max(0, -there) if there is not None else -max(0, -(back or 0))


def _least_delays(boots: Sequence[str], offsets: Sequence[int], talks: Sequence[Talk]) -> dict[tuple[str, str], int]:
    """The least time that a message took from one boot to another, by their clocks as they are."""
    said_at = {
        name: (boot, at + offset)
        for boot, offset, talk in zip(boots, offsets, talks, strict=True)
        for name, at in talk.said.items()
    }
    least: dict[tuple[str, str], int] = {}
    for boot, offset, talk in zip(boots, offsets, talks, strict=True):
        for name, at in talk.heard.items():
            sender, sent = said_at.get(name, (boot, 0))
            if sender != boot:
                took = at + offset - sent
                least[sender, boot] = min(took, least.get((sender, boot), took))
    return least
