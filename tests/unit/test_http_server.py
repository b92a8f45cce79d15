"""The listening socket that the parent makes for the HTTP process."""

from __future__ import annotations

import socket

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import free_port, is_free
from pdbus.nodes.children import HttpServer
from pdbus.nodes.config import load
from pdbus.nodes.http.listening import listen


def test_any_free_port() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert sock.getsockname()[1] > 0


def test_a_taken_port_that_was_asked_for_is_an_error_that_names_it() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--http-port: 127.0.0.1:{port} is taken"):
            listen("127.0.0.1", port)


def test_a_default_port_that_is_taken_gives_way_to_a_free_one() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with listen("127.0.0.1", port, search=True) as other:
            assert other.getsockname()[1] > port


def test_a_port_is_free_again_as_soon_as_its_server_has_gone() -> None:
    """A connection in TIME_WAIT would otherwise keep a restarted node from its port for a minute."""
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            sock.accept()[0].close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_what_is_no_port_is_an_error(port: int) -> None:
    with pytest.raises(ConfigError, match="--http-port: must be between 0 and 65535"):
        listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_an_error_that_names_it(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--http-host: cannot listen on {host}"):
        listen(host, 0)


@pytest.mark.parametrize(
    ("host", "told"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("[::1]", "[::1]"), ("::1", "[::1]"),
     ("0.0.0.0", "10.1.2.3")],
)  # fmt: skip
def test_others_are_told_an_address_that_they_can_call(host: str, told: str) -> None:
    """A wildcard is none: they find us where they find our bus."""
    if not is_free(host.strip("[]"), 0):
        pytest.skip(f"no {host} on this machine")
    port = free_port(host.strip("[]"), 28_080)
    server = HttpServer(
        load({"engine": "coded", "http_host": host, "http_port": str(port), "insecure": "true"}), "tcp://10.1.2.3:7400"
    )
    assert server.url == f"http://{told}:{port}"
    server._socket.close()


def test_without_its_packages_http_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process without them would be started again and again."""
    monkeypatch.setattr("pdbus.nodes.children.HTTP_PACKAGES", ("starlette", "no_such_package"))
    with pytest.raises(ConfigError, match="--http-port: HTTP needs the package no_such_package"):
        HttpServer(load({"engine": "coded"}), "tcp://127.0.0.1:7400")
