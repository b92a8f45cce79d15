"""The timeline of all recordings as one page that needs nothing else."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from pdbus.bus.errors import ConfigError
from pdbus.bus.recording import Recording
from pdbus.bus.wire import to_json

from ..client_run import is_client
from ..clocks import aligned
from .spans import GROUPS, Bar, NodeSpans, spans_of_client, spans_of_node

BARS_MAX = 200_000  # more make a page that no browser likes: the first ones are kept, and that is said
US = 1000  # ns


def write_page(file: Path, recordings: Sequence[Recording], notes: Sequence[str], request: str = "") -> None:
    """`request`: the one that is chosen when the page opens. Raises ConfigError (`--html`)."""
    try:
        file.write_text(page(recordings, notes, request), encoding="utf-8")
    except OSError as e:
        raise ConfigError("--html", f"cannot write {file}: {e.strerror}") from None


def page(recordings: Sequence[Recording], notes: Sequence[str], request: str = "") -> str:
    """As HTML. No request of a browser goes anywhere from it, for the page itself forbids that."""
    template = resources.files(__package__).joinpath("timeline.html").read_text(encoding="utf-8")
    data = to_json({**timeline(recordings, notes), "chosen": request}).decode().replace("<", "\\u003c")
    names = ", ".join(dict.fromkeys(recording.header.node for recording in recordings))
    return template.replace("{{title}}", escape(names)).replace("{{data}}", data)


def timeline(recordings: Sequence[Recording], notes: Sequence[str] = ()) -> dict[str, Any]:
    """What the page shows, as plain values; times in microseconds after the first one."""
    lives = [_life(r, offset) for r, offset in zip(recordings, aligned(recordings), strict=True)]
    lives.sort(key=lambda life: (not life.is_client, life.is_prefill, life.spans.name, life.begin_ns))
    start = min(life.begin_ns for life in lives)
    requests: dict[bytes, int] = {}
    left = BARS_MAX
    nodes = []
    for life in lives:
        kept = sorted(life.spans.bars, key=lambda bar: bar.begin_ns)[:left]
        left -= len(kept)
        nodes.append(_node(life, kept, start, requests))
    total = sum(len(life.spans.bars) for life in lives)
    told = [*notes, *([f"only {BARS_MAX:,} of {total:,} bars are shown"] if total > BARS_MAX else [])]
    messages = list(_messages(lives, start, requests))
    return {"nodes": nodes, "requests": [r.hex() for r in requests], "messages": messages, "notes": told}


class _Life:
    """One recording's spans, and what to add to their times."""

    def __init__(self, spans: NodeSpans, offset_ns: int, is_client: bool) -> None:
        self.spans, self.offset_ns, self.is_client = spans, offset_ns, is_client
        self.is_prefill = any(bar.group == "leases" for bar in spans.bars)

    @property
    def begin_ns(self) -> int:
        return self.spans.begin_ns + self.offset_ns


def _life(recording: Recording, offset_ns: int) -> _Life:
    client = is_client(recording)
    return _Life((spans_of_client if client else spans_of_node)(recording), offset_ns, client)


def _node(life: _Life, bars: Sequence[Bar], start: int, requests: dict[bytes, int]) -> dict[str, Any]:
    spans = life.spans

    def at(ns: int) -> int:
        return (ns + life.offset_ns - start) // US

    groups = []
    for name in GROUPS:
        of_group = [bar for bar in bars if bar.group == name]
        if of_group:
            rows = _rows(of_group, spans.end_ns)
            shown = [_bar(bar, row, spans, at, requests) for bar, row in zip(of_group, rows, strict=True)]
            groups.append({"name": name, "rows": max(rows) + 1, "bars": shown})
    return {
        "name": spans.name, "life": spans.life, "cut": spans.cut, "begin": at(spans.begin_ns), "end": at(spans.end_ns),
        "groups": groups, "marks": [[at(mark.at_ns), mark.kind, mark.label] for mark in spans.marks],
    }  # fmt: skip


def _bar(bar: Bar, row: int, spans: NodeSpans, at: Any, requests: dict[bytes, int]) -> list[Any]:
    end = spans.end_ns if bar.end_ns is None else bar.end_ns
    ended = bar.ended if bar.end_ns is not None else "not ended"
    parts = [[at(part.begin_ns), part.kind] for part in bar.parts]
    return [row, at(bar.begin_ns), at(end), _number(bar.request, requests), bar.label, bar.details, ended,
            int(bar.failed), parts]  # fmt: skip


def _number(request: bytes, requests: dict[bytes, int]) -> int:
    return requests.setdefault(request, len(requests)) if request else -1


def _rows(bars: Iterable[Bar], end_ns: int) -> list[int]:
    """Bars that overlap lie in rows of their own; as few rows as that takes. `bars` are in the order of their begin."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end, row
    rows: list[int] = []
    for bar in bars:
        while busy and busy[0][0] <= bar.begin_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end_ns if bar.end_ns is None else max(bar.end_ns, bar.begin_ns + 1), row))
        rows.append(row)
    return rows


def _messages(lives: Sequence[_Life], start: int, requests: dict[bytes, int]) -> Iterable[list[Any]]:
    """From which node when to which node when; of one that was said several times, the last before it was heard. What
    nobody's recording has heard comes with -1 for the node, and its name."""
    said: dict[bytes, list[tuple[int, int]]] = {}
    heard: dict[bytes, None] = {}
    for number, life in enumerate(lives):
        for spoken in life.spans.said:
            said.setdefault(spoken.name, []).append((spoken.at_ns + life.offset_ns, number))
    for number, life in enumerate(lives):
        for spoken in life.spans.heard:
            at = spoken.at_ns + life.offset_ns
            candidates = [s for s in said.get(spoken.name, ()) if s[1] != number]
            if candidates:
                heard[spoken.name] = None
                sent, sender = max((s for s in candidates if s[0] <= at), default=candidates[0])
                yield [sender, (sent - start) // US, number, (at - start) // US, spoken.kind,
                       _number(spoken.request, requests), ""]  # fmt: skip
    for number, life in enumerate(lives):
        for spoken in life.spans.said:
            if spoken.name not in heard:
                at = (spoken.at_ns + life.offset_ns - start) // US
                yield [number, at, -1, at, spoken.kind, _number(spoken.request, requests), spoken.other]
