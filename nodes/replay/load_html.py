"""A load as one page that needs nothing else: figures, distributions, what happened when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .charts import POINTS_MAX, STYLE, Axis, Line, Point, cdf, line_chart, steps
from .load_figures import MS, NS
from .load_request import BIN_NS, Played
from .load_run import LoadRun
from .load_view import headlines, latency_rows

BINS = 100  # over the whole time
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; margin: 0.5em 0 1.5em; }}
th, td {{ padding: 0.15em 1.2em 0.15em 0; text-align: left; vertical-align: top; }}
th {{ font-weight: normal; opacity: 0.65; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1em 2em; }}
figure {{ margin: 0; }} figcaption {{ font-weight: 600; }}
.failed {{ color: #d55e00; }}
{style}</style></head><body>
{body}
</body></html>
"""


def page(run: LoadRun, result: Mapping[str, Any]) -> str:
    """`result`: its figures."""
    name = str(result["workload"])
    parts = [f"<h1>{escape(name)}</h1>", _table([{"": k, " ": v} for k, v in headlines(result).items()], head=False)]
    parts += [f"<p>{escape(note)}</p>" for note in result.get("notes", [])]
    parts.append(_table(latency_rows(result)))
    if result["failures"]:
        parts += ['<h2 class="failed">Failures</h2>', _table(result["failures"])]
    parts += ["<h2>Distributions</h2>", _charts(distributions(run))]
    parts += ["<h2>Over time</h2>", _charts(over_time(run))]
    parts += ["<h2>Nodes</h2>", _table(result["nodes"])]
    return PAGE.format(title=f"pd-replay load: {escape(name)}", style=STYLE, body="\n".join(parts))


def _table(rows: Sequence[Mapping[str, Any]], *, head: bool = True) -> str:
    names = list(rows[0])
    lines = ["".join(f"<th{_class(rows[0][name])}>{escape(name)}</th>" for name in names)] if head else []
    for row in rows:
        lines.append("".join(f"<td{_class(row[name])}>{escape(_text(row[name]))}</td>" for name in names))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _class(value: Any) -> str:
    return ' class="number"' if isinstance(value, int | float) else ""


def _text(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _charts(charts: Mapping[str, str]) -> str:
    figures = (f"<figure><figcaption>{escape(name)}</figcaption>{svg}</figure>" for name, svg in charts.items())
    return f'<div class="charts">{"".join(figures)}</div>'


# ---------------------------------------------------------------- what is drawn


def distributions(run: LoadRun) -> dict[str, str]:
    """Cumulative distributions, times in ms."""
    done = [p for p in run.played if p.completed and p.first_ns]
    share = Axis("share of requests", 0, 1)

    def chart(lines: Mapping[str, Sequence[float]], y: Axis = share) -> str:
        return line_chart([Line(name, cdf(values)) for name, values in lines.items()], Axis("ms", log=True), y)

    return {
        "Time to first token": chart(
            {
                "from sent": [(p.first_ns - p.sent_ns) / MS for p in done],
                "from scheduled": [(p.first_ns - p.scheduled_ns) / MS for p in done],
            }
        ),
        "Whole answer": chart(
            {
                "from sent": [(p.ended_ns - p.sent_ns) / MS for p in done],
                "from scheduled": [(p.ended_ns - p.scheduled_ns) / MS for p in done],
            }
        ),
        "Between tokens": chart({"all answers": run.meter.gaps_ms}, Axis("share of gaps", 0, 1)),
        "Lateness of sending": chart(
            {"all requests": [(p.sent_ns - p.scheduled_ns) / MS for p in run.played if p.sent_ns]}
        ),
    }


def over_time(run: LoadRun) -> dict[str, str]:
    """Against seconds after the load began."""
    time = _Time(run.wall_ns)
    done = [p for p in run.played if p.completed]
    failed: dict[str, list[int]] = {}
    for p in run.played:
        if p.cause:
            failed.setdefault(p.cause, []).append(p.ended_ns)
    tokens: Counter[int] = Counter()
    for at, count in run.meter.tokens_by_bin.items():
        tokens[time.bin(at * BIN_NS)] += count
    requests = [
        time.rate("scheduled", [p.scheduled_ns for p in run.played]),
        time.rate("completed", [p.ended_ns for p in done]),
    ]
    charts = {
        "Requests": time.chart(requests, Axis("a second", 0)),
        "Tokens of answers": time.chart([time.line("tokens", tokens, NS / time.width_ns)], Axis("a second", 0)),
        "In flight": time.chart([Line("requests", steps(in_flight(run.played)))], Axis("requests", 0)),
        "Prefix hits": time.chart([Line("of prompt tokens", hits(done, time))], Axis("share", 0, 1)),
        "Lateness": time.chart([time.line("greatest", lateness(run.played, time))], Axis("ms", 0)),
    }
    if failed:
        causes = [time.rate(cause, times) for cause, times in failed.items()]
        charts["Failures by cause"] = time.chart(causes, Axis("a second", 0))
    return charts


class _Time:
    """The time axis, cut into about BINS equal parts."""

    def __init__(self, wall_ns: int) -> None:
        self.width_ns = max(BIN_NS, wall_ns // BINS)
        self._count = wall_ns // self.width_ns + 1
        self._seconds = Axis("s", 0, wall_ns / NS)

    def bin(self, at_ns: int) -> int:
        return at_ns // self.width_ns

    def start_s(self, number: int) -> float:
        return number * self.width_ns / NS

    def line(self, name: str, values: Mapping[int, float], factor: float = 1.0) -> Line:
        """Values by bin, 0 where there is none."""
        return Line(name, steps([(self.start_s(i), factor * values.get(i, 0)) for i in range(self._count + 1)]))

    def rate(self, name: str, times_ns: Sequence[int]) -> Line:
        return self.line(name, Counter(map(self.bin, times_ns)), NS / self.width_ns)

    def chart(self, lines: Sequence[Line], y: Axis) -> str:
        return line_chart(lines, self._seconds, y)


def in_flight(played: Sequence[Played]) -> list[Point]:
    """How many requests had been sent and not ended, whenever that changed."""
    changes = sorted([(p.sent_ns, 1) for p in played if p.sent_ns] + [(p.ended_ns, -1) for p in played if p.sent_ns])
    points, count = [(0.0, 0.0)], 0
    for at, change in changes:
        count += change
        points.append((at / NS, float(count)))
    step = max(1, len(points) // (4 * POINTS_MAX))
    return points[::step]


def hits(done: Sequence[Played], time: _Time) -> list[Point]:
    """The share of the prompts' tokens that was cached, by when they were sent."""
    prompts: Counter[int] = Counter()
    cached: Counter[int] = Counter()
    for p in done:
        prompts[time.bin(p.sent_ns)] += p.prompt_tokens
        cached[time.bin(p.sent_ns)] += p.cached_tokens
    return [(time.start_s(i), cached[i] / prompts[i]) for i in sorted(prompts)]


def lateness(played: Sequence[Played], time: _Time) -> dict[int, float]:
    """The greatest, in ms, by when it was sent."""
    greatest: dict[int, float] = {}
    for p in played:
        if p.sent_ns:
            at = time.bin(p.sent_ns)
            greatest[at] = max(greatest.get(at, 0.0), (p.sent_ns - p.scheduled_ns) / MS)
    return greatest
