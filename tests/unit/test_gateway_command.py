"""What `pd gateway` is told: bad values are named before anything is opened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError, RequestError
from pdbus.nodes.cli import main
from pdbus.nodes.gateway.command import http_address
from pdbus.nodes.gateway.endpoints import Endpoint, need_role, paired
from pdbus.nodes.http.peers import Info

HOST, PORT = "--decoder-host", "--decoder-port"


def pair(hosts: list[str], ports: list[str]) -> list[str]:
    return [str(endpoint) for endpoint in paired(hosts, ports, HOST, PORT)]


def test_hosts_and_ports_go_in_pairs_however_they_are_listed() -> None:
    assert pair(["a", "b"], ["1", "2"]) == pair(["a,b"], ["1,2"]) == ["a:1", "b:2"]


def test_one_host_goes_with_all_ports_and_one_port_with_all_hosts() -> None:
    assert pair(["a"], ["1", "2"]) == ["a:1", "a:2"]
    assert pair(["a", "b"], ["1"]) == ["a:1", "b:1"]
    assert pair([], ["1"]) == ["localhost:1"]


def test_ipv6_hosts_have_brackets_or_not() -> None:
    assert paired(["::1"], ["1"], HOST, PORT) == paired(["[::1]"], ["1"], HOST, PORT) == (Endpoint("::1", 1),)
    assert pair(["::1"], ["1"]) == ["[::1]:1"]


@pytest.mark.parametrize(
    ("hosts", "ports", "problem"),
    [
        (["a"], [], "--decoder-port: is needed"),
        (["a", "b"], ["1", "2", "3"], "3 ports for 2 hosts"),
        (["a"], ["http"], "--decoder-port: must be a port from 1 to 65535, got 'http'"),
        (["a"], ["0"], "--decoder-port: must be"),
        (["a"], ["70000"], "--decoder-port: must be"),
        (["http://a"], ["1"], "--decoder-host: must be a host name or address, got 'http://a'"),
        (["a b/c"], ["1"], "--decoder-host: must be"),
    ],
)
def test_bad_hosts_and_ports_are_named(hosts: list[str], ports: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        paired(hosts, ports, HOST, PORT)


@pytest.mark.parametrize("text", ["", "8000", ":8000", "localhost", "http://localhost:8000", "[::1", "a:99999"])
def test_a_bad_http_address_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--http: must be like 127.0.0.1:8000"):
        http_address(text)


def said_of(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of bad input."""
    monkeypatch.setattr(sys, "argv", ["pd", "gateway", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return "".join(capsys.readouterr())


NODE = "tcp://127.0.0.1:7400"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "pd: --join: is needed: the bus address of a node, or give --decoder-host and --decoder-port"),
        (("--join", "http://localhost:1"), "pd: --join: must be like tcp://host:port"),
        (("--join", NODE, "--policy", "best"), "pd: --policy: there is no 'best'; give round-robin, least-loaded"),
        (("--join", NODE, "--http", "0.0.0.0:8000"), "pd: --http: 0.0.0.0:8000 can be reached from other machines"),
        (("--join", NODE, "--record-tokens"), "pd: --record-tokens: needs --record DIR"),
        (("--join", NODE, "--name", "a/b"), "pd: --name: 'a/b' will not do"),
        (("--vllm", "--policy", "prefix"), "pd: --policy: is for nodes of pdbus"),
        (("--vllm", "--queue", "256"), "pd: --queue: is for nodes of pdbus"),
        (("--join", NODE, "--log-format", "xml"), "pd: --log-format: must be text or json, got 'xml'"),
        (("--join", NODE, "--request-deadline", "300"), "pd: --request-deadline: "),
        (("--join", NODE, "--request-deadline", "2d"), "pd: --request-deadline: "),
        (("--vllm", "--request-deadline", "1h"), "pd: --request-deadline: is for nodes of pdbus"),
        (("--join", NODE, "--queue", "-1"), "pd: Invalid value for '--queue'"),
    ],
)
def test_bad_options_are_one_line(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = said_of(options, monkeypatch, capsys)
    assert output.startswith(said) and output.count("\n") == 1, output


def test_a_folder_that_cannot_be_recorded_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    output = said_of(("--join", NODE, "--record", str(tmp_path / "file")), monkeypatch, capsys)
    assert "is a file; give a folder" in output


@pytest.mark.parametrize(("role", "decodes"), [("prefill", True), ("decode", False)])
def test_a_node_of_the_other_role_is_named_with_its_option(role: str, decodes: bool) -> None:
    option = "--decoder-port" if decodes else "--prefiller-port"
    with pytest.raises(RequestError, match=f"is a {role} node, n1: {option}"):
        need_role(Info(name="n1", address="tcp://127.0.0.1:7400", role=role), decodes=decodes)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("role", ["both", ""])
def test_a_node_that_does_both_or_does_not_say_will_do(role: str, decodes: bool) -> None:
    need_role(Info(name="n1", address="tcp://127.0.0.1:7400", role=role), decodes=decodes)
