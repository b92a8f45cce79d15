"""Charts that stand by themselves: every value has its place, whatever the values are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from pdbus.nodes.replay.charts import HEIGHT, WIDTH, Axis, Line, cdf, line_chart, number, steps


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line, in pixels, y upwards."""
    root = ET.fromstring(svg)
    lines = [element.get("points", "") for element in root.iter("polyline")]
    return [[(float(x), HEIGHT - float(y)) for x, y in (p.split(",") for p in line.split())] for line in lines]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("text")]


def test_lines_go_where_their_values_are() -> None:
    svg = line_chart([Line("a", [(0, 0), (5, 10), (10, 5)])], Axis("s"), Axis("n"))
    ((x0, y0), (x1, y1), (x2, y2)) = drawn(svg)[0]
    assert x0 < x1 < x2 and y0 < y2 < y1
    assert abs((x1 - x0) - (x2 - x1)) < 0.2 and abs((y1 - y2) - (y2 - y0)) < 0.2


def test_a_log_axis_gives_every_decade_the_same_room() -> None:
    svg = line_chart([Line("a", [(1, 0), (10, 1), (100, 2)])], Axis("ms", log=True), Axis("n"))
    ((a, _), (b, _), (c, _)) = drawn(svg)[0]
    assert abs((b - a) - (c - b)) < 0.2


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[], [0.0], [3.0], [7.0, 7.0], [0.0, 0.0], [1e-9, 1e12], [-5.0, 5.0], [float("nan"), float("inf"), 2.0]],
)
def test_all_values_stay_in_the_picture(values: list[float], log: bool) -> None:
    svg = line_chart([Line("a", [(v, v) for v in values])], Axis("x", log=log), Axis("y"))
    for x, y in [point for line in drawn(svg) for point in line]:
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    assert not re.search("nan|inf", svg)


def test_names_are_text_and_no_markup() -> None:
    svg = line_chart([Line("<a>&", [(1, 1)]), Line("b", [(2, 2)])], Axis("x"), Axis("y"))
    assert {"<a>&", "b", "x", "y"} <= set(texts(svg))
    assert "<a>&" not in texts(line_chart([Line("<a>&", [(1, 1)])], Axis("x"), Axis("y")))  # one line needs no legend


def test_a_distribution_has_few_points_and_its_ends() -> None:
    points = cdf([float(i) for i in range(100_000)])
    assert len(points) < 1_000
    assert points[0] == (0.0, 1e-5) and points[-1] == (99_999.0, 1.0)
    assert cdf([]) == [] and cdf([4.0]) == [(4.0, 1.0)]


def test_steps_stay_until_the_next_value() -> None:
    assert steps([(0, 1), (2, 5)]) == [(0, 1), (2, 1), (2, 5)]
    assert steps([]) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.05, "0.05"), (1500, "1500"), (12_500, "12.5k"), (2e6, "2M"), (3e9, "3G"), (-20_000, "-20k")],
)
def test_numbers_of_ticks(value: float, shown: str) -> None:
    assert number(value) == shown
