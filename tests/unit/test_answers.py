"""A fault keeps its type and its facts across the bus."""

from __future__ import annotations

import pytest

from pdbus.bus.answers import error_of, exception_of
from pdbus.bus.errors import (
    Broken,
    Closed,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    PdError,
    RemoteProtocolError,
    RequestError,
)
from pdbus.bus.messages import Error


@pytest.mark.parametrize(
    "problem",
    [
        RequestError("bad", param="prompt", code="empty_prompt"),
        Overloaded("full", retry_after_ms=40),
        DeadlineExceeded("late"),
        Broken("a worker died"),
        Closed("closed"),
        RemoteProtocolError("odd", kind="token", field="index"),
    ],
)
def test_there_and_back_it_is_the_same(problem: PdError) -> None:
    back = exception_of(error_of(problem))
    assert type(back) is type(problem)
    assert (str(back), vars(back)) == (str(problem), vars(problem))


def test_the_answer_names_the_kind_the_field_and_the_request() -> None:
    error = error_of(RemoteProtocolError("odd", field="index"), kind="token", client_id="c")
    assert (error.kind, error.field, error.client_id, error.code) == ("token", "index", "c", "protocol")


def test_a_setting_at_fault_is_named_as_the_field() -> None:
    assert error_of(ConfigError("--join", "no address")).field == "--join"


@pytest.mark.parametrize(("code", "kind"), [("shutdown", Closed), ("draining", Closed), ("engine", Broken)])
def test_codes_of_nodes_that_cannot_serve_are_not_the_requests_fault(code: str, kind: type[PdError]) -> None:
    assert type(exception_of(Error(message="m", code=code))) is kind
