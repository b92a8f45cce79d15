"""Addresses that users write, ports that are free, and what may be told to others."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import (
    Address,
    Triple,
    advertised,
    bind_first_free,
    free_port,
    free_triples,
    is_loopback,
    need_free,
    parse_address,
)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that someone listens on."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port: int = server.getsockname()[1]
        yield port


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:7400", Address("127.0.0.1", 7400)),
        ("tcp://node-3.cluster:1", Address("node-3.cluster", 1)),
        ("tcp://[::1]:7400", Address("::1", 7400)),
        ("tcp://*:7400", Address("*", 7400)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text, "--listen") == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "7400", "127.0.0.1:7400", "http://127.0.0.1:7400", "tcp://127.0.0.1", "tcp://::1:7400", "tcp://[::g]:1",
     "tcp://h:65536", "tcp://h:0", "tcp://h:7400/", "tcp://a b:1", "tcp://h:-1", "tcp://a..b:1", "tcp://.:1",
     f"tcp://{'x' * 64}:1"],
)  # fmt: skip
def test_a_bad_address_is_refused_by_the_settings_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--join: "):
        parse_address(text, "--join")


def test_port_zero_is_only_for_listening() -> None:
    assert parse_address("tcp://h:0", "--listen", port_zero=True).port == 0


@pytest.mark.parametrize(
    ("host", "answer"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("10.0.0.1", False), ("0.0.0.0", False), ("::", False), ("node-3", False)],
)  # fmt: skip
def test_loopback_is_known_in_every_spelling(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


def test_a_wildcard_is_never_advertised() -> None:
    """Peers that are told to call 0.0.0.0 would call themselves."""
    for bound in ("tcp://*:7400", "tcp://0.0.0.0:7400", "tcp://[::]:7400"):
        assert parse_address(advertised(bound), "x").host not in ("*", "0.0.0.0", "::")
    with pytest.raises(ConfigError, match=re.escape("--advertise: tcp://0.0.0.0:7400 is a wildcard")):
        advertised("tcp://127.0.0.1:7400", "tcp://0.0.0.0:7400")


def test_what_was_asked_for_is_advertised_else_where_we_are_bound() -> None:
    assert advertised("tcp://10.0.0.1:7400", "tcp://public:9") == "tcp://public:9"
    assert advertised("tcp://10.0.0.1:7400") == "tcp://10.0.0.1:7400"


def test_a_triple_with_a_taken_port_is_skipped(taken: int) -> None:
    start = taken - 1  # the middle one is taken
    assert next(free_triples("127.0.0.1", start)).bus > start


def test_a_port_that_was_asked_for_and_is_taken_is_named(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"^--http-port: port {taken} on 127.0.0.1 is taken"):
        need_free("127.0.0.1", taken, "--http-port")


@pytest.mark.parametrize(("host", "problem"), [("192.0.2.1", "Cannot assign"), ("no-such-host.invalid", "")])
def test_a_host_that_is_not_ours_is_not_called_taken(host: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--listen: cannot listen on {host}, port 7400: {problem}"):
        need_free(host, 7400, "--listen")


def test_a_taken_default_gives_the_next_free_port(taken: int) -> None:
    assert free_port("127.0.0.1", taken) > taken


def test_a_race_for_a_triple_goes_on_to_the_next() -> None:
    tried: list[Triple] = []

    def bind(triple: Triple) -> Triple:
        tried.append(triple)
        if len(tried) < 3:
            raise ConfigError("--listen", "taken in between")
        return triple

    assert bind_first_free(bind, "127.0.0.1", 20_000) == tried[2]
    assert tried[0].bus < tried[1].bus < tried[2].bus
