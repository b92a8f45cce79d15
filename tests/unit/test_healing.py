"""How long after its return a node is asked again, at most; and that not all come back to it at the same moment."""

from __future__ import annotations

from pdbus.bus.dials import Dials
from pdbus.bus.endpoint import RECONNECT_MS_MAX
from pdbus.bus.members import MembershipConfig
from pdbus.bus.messages import Hello
from pdbus.nodes import circuits

S = 1_000_000_000
HEALED_MAX_NS = 8 * S  # what tests/chaos holds real processes to
NODES, ADDRESS = 400, "tcp://p:7400"


def config(name: str) -> MembershipConfig:
    return MembershipConfig(name=name, incarnation=name.encode(), hello=Hello(role="decode"))


def test_every_wait_after_a_return_fits_into_eight_seconds() -> None:
    """It is called, then asked: by a node that gave it up long ago, and where its last trial has just failed."""
    m = config("d")
    called_ns = m.backoff_max_ns + RECONNECT_MS_MAX * 1_000_000
    assert called_ns + max(circuits.OPEN_MAX_NS, circuits.LAST_NS) <= HEALED_MAX_NS


def calls(name: str, until_ns: int) -> list[int]:
    """When a node calls an address where each call fails at once."""
    dials, now, made = Dials(config(name)), 0, []
    dials.add(ADDRESS, "p", 0)
    while now <= until_ns:
        assert dials.start_due(now) == [ADDRESS]
        made.append(now)
        dials.opened(ADDRESS, f"out:{len(made)}", now)
        dial = dials.at(ADDRESS)
        assert dial is not None
        dials.fail(dial, "refused", now)
        due = dials.next_due_ns()
        assert due is not None
        now = due
    return made


def test_no_thundering_return() -> None:
    """Hundreds of nodes lose one at the same moment. Long after, no tenth of a second sees more than its share of their
    calls, and within two seconds each has called once."""
    all_calls = [calls(f"decode-{i}", 30 * S) for i in range(NODES)]
    in_window = [[at for at in made if 20 * S <= at < 22 * S] for made in all_calls]
    assert all(in_window)
    tenths = [0] * 20
    for at in (at for made in in_window for at in made):
        tenths[(at - 20 * S) * 10 // S] += 1
    assert max(tenths) <= 2 * sum(tenths) / len(tenths)
    assert min(tenths) > 0
