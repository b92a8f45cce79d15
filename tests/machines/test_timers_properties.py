"""Timers against the obvious model: a dict of deadlines."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pdbus.connector.timers import Timers

calls = st.one_of(
    st.tuples(st.just("set"), st.sampled_from("abc"), st.integers(0, 20)),
    st.tuples(st.just("clear"), st.sampled_from("abc"), st.just(0)),
    st.tuples(st.just("due"), st.just(""), st.integers(0, 20)),
)


@given(st.lists(calls, max_size=80))
def test_timers_are_a_dict_of_deadlines(calls: list[tuple[str, str, int]]) -> None:
    timers: Timers[str] = Timers()
    model: dict[str, int] = {}
    for what, key, at in calls:
        if what == "set":
            timers.set(key, at)
            model[key] = at
        elif what == "clear":
            timers.clear(key)
            model.pop(key, None)
        else:
            due = timers.pop_due(at)
            assert (due is None) == all(deadline > at for deadline in model.values())
            if due is not None:
                assert model[due] == min(model.values())
                del model[due]
        assert timers.next_deadline() == min(model.values(), default=None)
        assert len(timers) == len(model)
