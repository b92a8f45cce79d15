"""A seed's faults are the same ones whenever they are drawn, and leave nothing out."""

from __future__ import annotations

from collections import Counter

from tests.chaos.outcome import Outcome, Report
from tests.chaos.plan import PAIRS, STEPS, faults


def test_a_seed_draws_the_same_faults() -> None:
    assert faults(3, 60) == faults(3, 60) != faults(4, 60)
    assert faults(3, 60)[:20] == faults(3, 20)
    assert faults(3, 60)[7].draw().random() == faults(3, 8)[7].draw().random()


def test_every_kind_comes_once_before_any_comes_again() -> None:
    assert {(f.kind, f.role) for f in faults(5, len(PAIRS))} == set(PAIRS)


def test_every_kind_comes_at_every_step_of_both_roles() -> None:
    everywhere = Counter((f.kind, f.role, f.step) for f in faults(5, len(PAIRS) * len(STEPS)))
    assert len(everywhere) == len(PAIRS) * len(STEPS) and set(everywhere.values()) == {1}


def test_a_report_is_good_only_if_all_of_it_is() -> None:
    fault = faults(1, 1)[0]
    assert Report(1, [Outcome(fault)]).good
    assert Report(1, [Outcome(fault, failed=3)]).good, "its client's own node was hurt"
    for bad in ("unfair", "hung", "wrong", "leaked", "lost"):
        assert not Report(1, [Outcome(fault), Outcome(fault, **{bad: 1})]).good  # type: ignore[arg-type]
    assert Report(1, [Outcome(fault, healed_s=8.0, started_s=20.0, reclaimed_s=9.0, reclaimed_late_s=-0.1)]).good
    assert not Report(1, [Outcome(fault, healed_s=8.1)]).good
    assert not Report(1, [Outcome(fault, reclaimed_s=2.9, reclaimed_late_s=0.1)]).good
    assert not Report(1, [Outcome(fault)], unverified=["cluster 0: violation"]).good
