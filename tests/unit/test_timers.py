"""Timers: named deadlines."""

from __future__ import annotations

from pdbus.connector.timers import SLACK, Timers


def test_due_in_order_of_time_then_of_setting() -> None:
    timers: Timers[str] = Timers()
    for key, at in (("late", 20), ("b", 10), ("a", 10)):
        timers.set(key, at)
    assert [timers.pop_due(15), timers.pop_due(15), timers.pop_due(15)] == ["b", "a", None]
    assert timers.next_deadline() == 20


def test_setting_again_moves_a_deadline() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 10)
    timers.set("a", 30)
    assert timers.pop_due(20) is None
    assert timers.at("a") == timers.next_deadline() == 30


def test_a_cleared_timer_is_never_due() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 10)
    timers.clear("a")
    timers.clear("unknown")
    assert timers.next_deadline() is None and timers.pop_due(99) is None and "a" not in timers


def test_a_timer_moved_for_ever_costs_no_memory() -> None:
    timers: Timers[str] = Timers()
    timers.set("far", 10**9)
    for n in range(10_000):
        timers.set("a", n)
    assert len(timers._heap) <= 2 * len(timers) + SLACK + 1
    assert timers.pop_due(10**8) == "a"
