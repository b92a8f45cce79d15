"""A core made anew from its recording, hearing at the recorded times what the recorded one heard.

It must decide the same, byte for byte. Where it does not, `Diverged` says what is different; from there on the two are
different nodes, and only what was recorded counts.
"""

from __future__ import annotations

from typing import Any

from pdbus.bus.membership import Membership
from pdbus.bus.recording_part import RawRecord
from pdbus.bus.wire import encode, encode_all, to_plain
from pdbus.connector.readable import unreadable
from pdbus.connector.recording import CoreRaised, Handle, kind_of
from pdbus.connector.vllm.core import PairCore

from .. import events as ev
from ..core import NodeCore
from ..recording import CoreBegan
from .turns import Began, RawTurn, Turn, Unreadable, effect_of, event_of

SHOWN_MAX = 120  # characters of a value


class Diverged(Exception):
    """`sequence` is the first record that differs. `str()` says how, in one line."""

    def __init__(self, sequence: int, problem: str) -> None:
        super().__init__(problem)
        self.sequence = sequence


class Rerun:
    def __init__(self, began: Began) -> None:
        membership = Membership(began.membership, unreadable)
        self.core: NodeCore | PairCore
        self._handle: Handle  # of any event: a core that does not know one raises
        if isinstance(began, CoreBegan):
            self.core = core = NodeCore(began.core, membership)
            self._handle = core.handle
        else:
            self.core = pair = PairCore(began.core, membership)
            self._handle = pair.handle

    def turn(self, raw: RawTurn, *, cut: bool) -> Turn:
        """The turn, run again. `cut`: the recording may have lost the end of it. Raises Diverged, and Unreadable for
        an input that this version does not know."""
        heard = raw.heard
        event = event_of(heard)
        try:
            effects = self._handle(event, heard.now_ns)
        except Exception as e:
            self._raised(raw, e)
            return Turn(heard.sequence, heard.now_ns, event, [])
        if not _same(effects, raw):
            self._differ(raw, effects, cut)
        return Turn(heard.sequence, heard.now_ns, event, effects[: len(raw.decided)])

    def _differ(self, raw: RawTurn, effects: list[ev.NodeEffect], cut: bool) -> None:
        """Raises Diverged for the first difference, unless it is only that the end of a cut recording is missing."""
        now_ns = raw.heard.now_ns
        for effect, record in zip(effects, raw.decided, strict=False):
            if encode(effect) != bytes(record.payload) or record.now_ns != now_ns or record.kind != kind_of(effect):
                raise Diverged(record.sequence, _how(effect, record, now_ns))
        common = min(len(effects), len(raw.decided))
        if common < len(raw.decided):
            extra = raw.decided[common]
            raise Diverged(extra.sequence, f"recorded, but not decided when run again: {_shown(extra)}")
        if not cut:
            sequence = raw.heard.sequence + common + 1
            raise Diverged(sequence, f"decided when run again, but not recorded: {_brief(effects[common])}")

    def _raised(self, raw: RawTurn, error: Exception) -> None:
        """A recorded core that raised the same is no divergence."""
        again = CoreRaised(problem=f"{type(error).__name__}: {error}")
        record = raw.decided[0] if raw.decided else None
        if record is None or record.kind != CoreRaised.__name__ or bytes(record.payload) != encode(again):
            raise Diverged(raw.heard.sequence, f"run again, the core raises {again.problem}") from error


def _same(effects: list[ev.NodeEffect], raw: RawTurn) -> bool:
    """Byte for byte."""
    decided, now_ns = raw.decided, raw.heard.now_ns
    if len(effects) != len(decided) or encode_all(effects) != b"".join([record.payload for record in decided]):
        return False
    for effect, record in zip(effects, decided, strict=True):
        if record.now_ns != now_ns or record.kind != kind_of(effect):
            return False
    return True


def recorded(raw: RawTurn) -> Turn:
    """The turn as it was recorded, not run again. Raises Unreadable."""
    effects = [effect_of(record) for record in raw.decided]
    decided = [effect for effect in effects if isinstance(effect, ev.NodeEffect)]
    return Turn(raw.heard.sequence, raw.heard.now_ns, event_of(raw.heard), decided)


# ---------------------------------------------------------------- in words


def _how(effect: ev.NodeEffect, record: RawRecord, now_ns: int) -> str:
    if record.now_ns != now_ns:
        return f"recorded at {record.now_ns} ns, its input at {now_ns} ns"
    if record.kind != kind_of(effect):
        return f"recorded as {_shown(record)}; run again it is {_brief(effect)}"
    try:
        where = _difference(to_plain(effect_of(record)), to_plain(effect), "")
    except Unreadable as e:
        return f"recorded as what cannot be read ({e}); run again it is {_brief(effect)}"
    return f"{record.kind}: {where or 'the same, encoded differently'}"


def _difference(old: Any, new: Any, path: str) -> str:
    """The first place where two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key):
                return _difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            if a != b:
                return _difference(a, b, f"{path}[{i}]")
    return f"{path} was {_brief(old)}, run again it is {_brief(new)}" if old != new else ""


def _shown(record: RawRecord) -> str:
    try:
        return _brief(effect_of(record))
    except Unreadable as e:
        return f"{record.kind} ({e})"


def _brief(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) and value else str(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
