"""Line charts as SVG text that stands in a page by itself: no script, no font, no file from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 38  # around the plot: tick labels and a legend
POINTS_MAX = 400  # of a line; more are not to be seen
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind eyes, too
STYLE = """
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: currentColor; }
svg .grid { stroke: currentColor; stroke-opacity: 0.15; }
svg .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
"""

Point = tuple[float, float]


class Line(NamedTuple):
    name: str
    points: Sequence[Point]


class Axis(NamedTuple):
    """`low` and `high` are what it must at least show; `log`: only values above 0 have a place."""

    label: str
    low: float = math.inf
    high: float = -math.inf
    log: bool = False


def line_chart(lines: Sequence[Line], x: Axis, y: Axis) -> str:
    """One chart with a legend. Values that an axis has no place for are left out."""
    kept = [Line(line.name, [p for p in line.points if _shown(p[0], x) and _shown(p[1], y)]) for line in lines]
    across = _Scale(x, [p[0] for line in kept for p in line.points], LEFT, WIDTH - RIGHT)
    up = _Scale(y, [p[1] for line in kept for p in line.points], HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up), *_labels(x, y), *(_legend(kept) if len(kept) > 1 else ())]
    parts += [_polyline(line, COLOURS[i % len(COLOURS)], across, up) for i, line in enumerate(kept) if line.points]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def cdf(values: Sequence[float]) -> list[Point]:
    """(value, share of values that lie at or below it)."""
    ordered = sorted(values)
    count = len(ordered)
    step = max(1, count // POINTS_MAX)
    picked = sorted({*range(0, count, step), *range(max(0, count - step), count)})
    return [(ordered[i], (i + 1) / count) for i in picked]


def _shown(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


class _Scale:
    """From values to pixels, and the values that get a tick."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        self._to: Callable[[float], float] = math.log10 if axis.log else float
        low, high = min([axis.low, *values]), max([axis.high, *values])
        if not low <= high:  # neither values nor wishes
            low, high = (1.0, 10.0) if axis.log else (0.0, 1.0)
        if low == high:
            low, high = (low / 2, high * 2) if axis.log else (min(low, 0.0), high or 1.0)
        self.ticks = _log_ticks(low, high) if axis.log else _ticks(low, high)
        low, high = min(low, self.ticks[0]), max(high, self.ticks[-1])
        self._low = self._to(low)
        self._per_unit = (end - start) / (self._to(high) - self._low)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (self._to(value) - self._low) * self._per_unit


def _ticks(low: float, high: float) -> list[float]:
    """About five round values from at or below `low` to at or above `high`."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and their halves and fifths where few powers are."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    below = max((i for i, tick in enumerate(ticks) if tick <= low), default=0)
    above = min((i for i, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    return ticks[below : above + 1]


def number(value: float) -> str:
    """As a tick shows it."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit_size = 1e3 if unit == "k" else size
            return f"{value / unit_size:g}{unit}"
    return f"{value:.4g}"


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    for value in across.ticks:
        at = across(value)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{up.start}" y2="{up.end}"/>'
        yield f'<text x="{at:.1f}" y="{up.start + 14}" text-anchor="middle">{number(value)}</text>'
    for value in up.ticks:
        at = up(value)
        yield f'<line class="grid" x1="{across.start}" x2="{across.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{across.start - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>'


def _labels(x: Axis, y: Axis) -> Iterator[str]:
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x.label)}</text>'
    yield f'<text x="6" y="12">{escape(y.label)}</text>'


def _legend(lines: Sequence[Line]) -> Iterator[str]:
    at = WIDTH - RIGHT
    for i, line in reversed(list(enumerate(lines))):
        at -= 7 * len(line.name) + 22
        colour = COLOURS[i % len(COLOURS)]
        yield f'<rect x="{at}" y="5" width="12" height="4" fill="{colour}"/>'
        yield f'<text x="{at + 16}" y="12">{escape(line.name)}</text>'


def _polyline(line: Line, colour: str, across: _Scale, up: _Scale) -> str:
    points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
    return f'<polyline class="line" stroke="{colour}" points="{points}"><title>{escape(line.name)}</title></polyline>'


def steps(points: Sequence[Point]) -> list[Point]:
    """A line that stays at each value until the next one."""
    return [p for (a, y), (b, _) in pairwise(points) for p in ((a, y), (b, y))] + list(points[-1:])
