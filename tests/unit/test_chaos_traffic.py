"""What the fault harness would say of a node that lies, fails or hangs: without this, its zeros would mean nothing."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.errors import Broken

from tests.chaos import traffic as traffic_module
from tests.chaos.outcome import Outcome
from tests.chaos.plan import faults
from tests.chaos.traffic import Traffic
from tests.live.faults import expected


class Answer:
    """A generation made by hand."""

    def __init__(self, tokens: list[int], problem: Exception | None = None, hangs: bool = False) -> None:
        self.tokens: list[int] = []
        self.finished = SimpleNamespace(reason="length")
        self._tokens, self._problem, self._hangs = tokens, problem, hangs

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> int:
        if len(self.tokens) < len(self._tokens):
            self.tokens.append(self._tokens[len(self.tokens)])
            return self.tokens[-1]
        if self._hangs:
            await asyncio.Event().wait()
        if self._problem is not None:
            raise self._problem
        raise StopAsyncIteration


def judged(make: Any, *, hurt: bool = False) -> Outcome:
    """What becomes of one request whose answer `make` gives, for its prompt and length."""
    outcome = Outcome(faults(1, 1)[0])

    async def ask() -> None:
        client: Any = SimpleNamespace(generate=lambda asked, max_tokens, **_: make(asked, max_tokens))
        traffic = Traffic(random.Random(1), {"d": client}, {"d"} if hurt else set())
        traffic.count(outcome)
        traffic.ask_long("d")
        await traffic.ended()

    asyncio.run(ask())
    return outcome


def test_a_right_answer() -> None:
    outcome = judged(lambda asked, count: Answer(expected(asked, count)))
    assert outcome.right == 1 and outcome.good


def test_one_wrong_token_is_seen_wherever_it_stands() -> None:
    def last_changed(asked: list[int], count: int) -> Answer:
        tokens = expected(asked, count)
        return Answer([*tokens[:-1], tokens[-1] ^ 1])

    outcome = judged(last_changed)
    assert outcome.wrong == 1 and not outcome.good


def test_a_wrong_token_before_an_error_is_wrong_even_where_errors_are_allowed() -> None:
    outcome = judged(lambda asked, count: Answer([expected(asked, 1)[0] ^ 1], Broken("gone")), hurt=True)
    assert outcome.wrong == 1 and not outcome.good


def test_a_short_answer_is_wrong() -> None:
    assert judged(lambda asked, count: Answer(expected(asked, count - 1))).wrong == 1


@pytest.mark.parametrize(("hurt", "counted"), [(True, "failed"), (False, "unfair")])
def test_an_error_is_fair_only_at_a_node_that_died(hurt: bool, counted: str) -> None:
    outcome = judged(lambda asked, count: Answer(expected(asked, 3), Broken("gone")), hurt=hurt)
    assert getattr(outcome, counted) == 1 and outcome.good is hurt


def test_a_request_that_does_not_end_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "HUNG_S", 0.05)
    outcome = judged(lambda asked, count: Answer(expected(asked, 3), hangs=True))
    assert outcome.hung == 1 and not outcome.good
