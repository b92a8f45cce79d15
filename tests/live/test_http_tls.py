"""HTTPS of a real node and of a gateway before it: streams through OpenAI's client, limits of a key, bad neighbours."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from pdbus.bus.ports import free_port
from pdbus.nodes.cluster import PORTS_FROM, Cluster

from tests.certificates import certificate

pytestmark = [pytest.mark.live, pytest.mark.long]

KEY, SLOW_KEY = "sk-0123456789abcdef", "sk-slow-0123456789a"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1P + 1D and a gateway, all with one certificate."""
    folder = tmp_path_factory.mktemp("tls")
    files, keys = certificate(folder), folder / "http.keys"
    keys.touch(0o600)
    keys.write_text(f"alice {KEY}\nslow {SLOW_KEY} per-minute=1\n")
    options = {
        "engine": "coded", "kv_blocks": 256, "http_keys": str(keys),
        "http_tls_cert": str(files.cert), "http_tls_key": str(files.key),
    }  # fmt: skip
    with asyncio.Runner() as runner:
        made = Cluster(1, 1, options=options, gateway_port=free_port("127.0.0.1", PORTS_FROM + 7000))
        runner.run(made.start())
        try:
            yield made
        finally:
            runner.run(made.stop(timeout_s=20))


def trusting(cluster: Cluster) -> ssl.SSLContext:
    command = cluster.decode[0].command
    return ssl.create_default_context(cafile=command[command.index("--http-tls-cert") + 1])


def urls(cluster: Cluster) -> list[str]:
    return [cluster.decode[0].http, cluster.gateway[0].http]


def test_openais_client_streams_over_tls(cluster: Cluster) -> None:
    for url in urls(cluster):
        assert url.startswith("https://")
        web = httpx.Client(verify=trusting(cluster))
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, http_client=web, max_retries=0) as client:
            model = client.models.list().data[0].id
            body = {"model": model, "prompt": [7] * 150, "max_tokens": 20, "temperature": 0}
            streamed = client.completions.create(**body, stream=True)  # type: ignore[call-overload]
            text = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
            whole = client.completions.create(**body)  # type: ignore[call-overload]
        assert text == whole.choices[0].text and whole.usage.completion_tokens == 20


def test_who_does_not_trust_the_certificate_is_not_served(cluster: Cluster) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{urls(cluster)[0]}/health/live")


def test_plain_http_is_not_spoken_there(cluster: Cluster) -> None:
    """A client that talks in clear, and one that says nothing, do not keep others from being served."""
    address = ("127.0.0.1", int(urls(cluster)[0].rpartition(":")[2]))
    with socket.create_connection(address), socket.create_connection(address) as plain:
        plain.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        plain.settimeout(30)
        assert b"HTTP/1.1 200" not in plain.recv(4096)
        assert httpx.get(f"{urls(cluster)[0]}/health/live", verify=trusting(cluster)).status_code == 200


def test_a_keys_limit_holds_at_a_node_and_at_a_gateway(cluster: Cluster) -> None:
    for url in urls(cluster):
        with httpx.Client(verify=trusting(cluster), headers={"Authorization": f"Bearer {SLOW_KEY}"}) as web:
            body = {"prompt": [7] * 20, "max_tokens": 2}
            served, refused = [web.post(f"{url}/v1/completions", json=body) for _ in range(2)]
        assert (served.status_code, refused.status_code) == (200, 429)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded" and int(refused.headers["retry-after"]) > 50


def test_the_key_is_in_no_command_line_and_no_log(cluster: Cluster) -> None:
    command = cluster.decode[0].command
    secret = "".join(Path(command[command.index("--http-tls-key") + 1]).read_text().splitlines()[1:-1])
    pids = [cluster.decode[0].pid, cluster.gateway[0].pid]
    said = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    said += ["\n".join(node.tail) for node in cluster.nodes]
    assert not any(secret in text or KEY in text for text in said)
