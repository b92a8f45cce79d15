"""How often a mover polls: often enough for its peers to live and its reads to flow, seldom enough to be idle."""

from __future__ import annotations

from pdbus.connector.pace import ALERT_NS, COURTSHIP_NS, IDLE_NS, MS, READ_MAX_NS, READ_MIN_NS, Pace, S

LATER = 100 * S


def wait(
    pace: Pace, now_ns: int = LATER, *, reads: bool = False, peers: bool = True, leases: bool = False, pump_ns: int = 0
) -> int | None:
    return pace.wait_ns(now_ns, reads=reads, peers=peers, leases=leases, pump_ns=pump_ns)


def test_without_peers_it_sleeps_until_spoken_to() -> None:
    assert wait(Pace(), peers=False) is None


def test_idle_peers_are_polled_seldom() -> None:
    assert wait(Pace()) == IDLE_NS


def test_advertised_leases_are_polled_every_millisecond() -> None:
    """An owner that polls every 50 ms is likely to die with a reader that dies in mid-read."""
    assert wait(Pace(), leases=True, peers=False) == ALERT_NS == MS


def test_reads_under_way_are_polled_fast_and_ever_slower() -> None:
    pace = Pace()
    pace.progressed(LATER)
    waits = [wait(pace, LATER + ns, reads=True) for ns in (0, 400_000, 1_000_000, 900 * MS)]
    assert waits == [READ_MIN_NS, 50_000, 125_000, READ_MAX_NS]


def test_stalled_reads_do_not_cost_a_core() -> None:
    """A frozen owner's read stays in progress for ever."""
    pace = Pace()
    pace.progressed(LATER)
    assert wait(pace, LATER + 2 * S, reads=True) == ALERT_NS


def test_new_peer_is_polled_fast_for_a_while() -> None:
    """Connecting takes several rounds of both sides."""
    pace = Pace()
    pace.courted(LATER)
    assert wait(pace, LATER + COURTSHIP_NS - 1) == ALERT_NS
    assert wait(pace, LATER + COURTSHIP_NS) == IDLE_NS


def test_pump_that_moved_bytes_is_pumped_again_at_once() -> None:
    """Over TCP the owner sends, and only while it is polled."""
    assert wait(Pace(), pump_ns=200_000) == 0
