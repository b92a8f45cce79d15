"""Where a prompt is computed: the estimate, and what is measured for it."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.wire import replace
from pdbus.nodes.placing import Here, There, place
from pdbus.nodes.rates import VALID_NS, Line, Ratio, StepRates
from pdbus.nodes.sources import PREFIXES_MAX, SOURCES_MAX, SourceFacts, Sources

US, MS, S = 1_000, 1_000_000, 1_000_000_000
HERE = Here(
    missing_tokens=1000, queued_tokens=0, running=0, token_ns=100 * US, chunk_ns=0, step_ns=0, chunk_tokens=256
)  # fmt: skip


def there(name: str = "p1", **facts: Any) -> There:
    usual = {"missing_tokens": 1000, "queued_tokens": 0, "token_ns": 100 * US, "chunk_ns": 0, "read_ns": 0}
    return There(node=name, **{**usual, "round_ns": 2 * MS, **facts})


# ---------------------------------------------------------------- the estimate


def test_a_short_prompt_stays_where_no_message_is_needed() -> None:
    assert place(replace(HERE, missing_tokens=20), [there(missing_tokens=20)]).node == ""


def test_what_is_cached_here_need_not_be_computed_there() -> None:
    assert place(replace(HERE, missing_tokens=50), [there(missing_tokens=1000)]).node == ""


def test_a_long_prompt_leaves_answers_that_run_here_alone() -> None:
    """Equal machines: it would take as long here, and hold up four answers."""
    assert place(replace(HERE, running=4), [there()]).node == "p1"
    assert place(replace(HERE, running=0), [there()]).node == ""


def test_prompts_that_wait_here_send_the_next_one_away() -> None:
    assert place(replace(HERE, queued_tokens=500), [there()]).node == "p1"


def test_a_prefill_node_with_a_long_queue_is_not_asked() -> None:
    busy = replace(HERE, running=4)
    assert place(busy, [there(queued_tokens=5000)]).node == ""
    assert place(busy, [there("p1", queued_tokens=5000), there("p2", queued_tokens=300)]).node == "p2"


def test_the_node_that_has_computed_the_prompt_before_is_asked() -> None:
    assert place(replace(HERE, running=4), [there("p1"), there("p2", missing_tokens=200)]).node == "p2"


def test_a_slow_link_keeps_a_prompt_here() -> None:
    """Reads go on beside the computing, so that only the longer of the two counts."""
    busy = replace(HERE, running=4)
    assert place(busy, [there(read_ns=90 * US)]).there_ns == place(busy, [there()]).there_ns
    assert place(busy, [there(read_ns=400 * US)]).node == ""


def test_only_what_is_missing_here_is_read() -> None:
    warm = replace(HERE, missing_tokens=10, running=100)
    assert place(warm, [there(missing_tokens=1, read_ns=100 * US)]).there_ns == (2 * 2 * MS + 10 * 100 * US,)


def test_steps_of_answers_come_between_the_chunks() -> None:
    alone, beside = (place(replace(HERE, running=n, step_ns=10 * MS), [there()]).here_ns for n in (0, 1))
    assert beside == alone + 4 * 10 * MS + alone // 10  # four chunks; a tenth for the answer that waits


def test_while_nothing_is_measured_a_prefill_node_is_asked() -> None:
    unknown = replace(HERE, token_ns=0.0)
    placed = place(unknown, [there("p2", token_ns=0.0), there("p1", token_ns=0.0)])
    assert (placed.node, placed.here_ns, placed.there_ns) == ("p2", 0, (0, 0))


def test_an_unmeasured_node_counts_as_fast_as_the_others() -> None:
    """So that it is tried, on either side."""
    assert place(replace(HERE, token_ns=0.0, missing_tokens=20), [there(missing_tokens=20)]).node == ""
    new = there("p2", token_ns=0.0, round_ns=0.0)
    assert place(replace(HERE, running=4), [there("p1"), new]).node == "p2"


def test_of_equals_the_first_of_the_prefill_nodes() -> None:
    free = there(round_ns=0.0)
    assert place(HERE, [free, replace(free, node="p2")]).node == "p1"


def test_nobody_to_ask() -> None:
    assert place(HERE, []).node == ""


# ---------------------------------------------------------------- rates


def test_the_latest_measurements_weigh_most() -> None:
    ratio = Ratio()
    for i in range(40):
        ratio.add(100, 1, now=i)
    for i in range(40):
        ratio.add(300, 1, now=40 + i)
    assert ratio.per(80) == pytest.approx(300, rel=0.02)


def test_what_a_step_costs_is_told_from_what_its_tokens_cost() -> None:
    """Or short prompts, which pay for a step as well, would be judged by long ones."""
    rates = StepRates()
    for i, tokens in enumerate((256, 20, 100, 256, 7)):
        rates.stepped(tokens, False, 1, 5 * MS + tokens * 100 * US, now=i)
    token_ns, step_ns = rates.prompt_ns(5)
    assert token_ns == pytest.approx(100 * US) and step_ns == pytest.approx(5 * MS)
    assert rates.said(5) == (pytest.approx(10_000, abs=1), pytest.approx(5000, abs=1))


def test_steps_of_one_size_tell_nothing_of_what_is_fixed() -> None:
    line = Line()
    for i, ns in enumerate((90 * MS, 110 * MS, 100 * MS)):
        line.add(ns, 100 + i % 2, now=i)
    each, fixed = line.fit(3)
    assert each == pytest.approx(1 * MS, rel=0.05) and fixed == 0


def test_larger_steps_that_took_less_give_no_negative_rate() -> None:
    line = Line()
    line.add(50 * MS, 10, now=0)
    line.add(10 * MS, 100, now=1)
    each, fixed = line.fit(2)
    assert each > 0 and fixed == 0


def test_old_measurements_count_for_nothing() -> None:
    ratio = Ratio()
    ratio.add(100, 1, now=S)
    assert ratio.per(S + VALID_NS) == 100
    assert ratio.per(S + VALID_NS + 1) == 0
    ratio.add(700, 1, now=S + VALID_NS + 1)
    assert ratio.per(S + VALID_NS + 1) == 700


def test_answers_beside_a_chunk_are_not_counted_as_its_cost() -> None:
    rates = StepRates()
    rates.stepped(0, True, 4, 40 * MS, now=0)
    assert rates.decode_ns(1) == 10 * MS
    rates.stepped(100, True, 1, 30 * MS, now=1)
    assert rates.prompt_ns(2) == (0.2 * MS, 0)
    assert rates.said(2) == (5000, 0)
    assert StepRates().said(2) == (0, 0)


# ---------------------------------------------------------------- what is known of a prefill node


def test_a_prompt_that_was_computed_there_is_known_to_be_cached_there() -> None:
    facts = SourceFacts()
    facts.computed([b"a", b"ab", b"abc"])
    assert facts.match([b"a", b"ab", b"abx"]) == 2
    assert facts.match([b"x", b"ab"]) == 0


def test_what_is_known_is_bounded_and_beginnings_are_kept_longest() -> None:
    facts, sources = SourceFacts(), Sources()
    facts.computed([b"%d" % i for i in range(PREFIXES_MAX + 10)])
    assert facts.match([b"%d" % i for i in range(PREFIXES_MAX + 10)]) == PREFIXES_MAX
    for i in range(SOURCES_MAX + 5):
        sources.of(f"p{i}").round.add(1, 1, now=0)
    assert sources.of("p0").round.per(0) == 0
    assert sources.of(f"p{SOURCES_MAX}").round.per(0) == 1
