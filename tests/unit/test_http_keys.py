"""Bearer keys: who sends none is told so in OpenAI's form, and nobody is told anything else."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.http import keys as keys_module
from pdbus.nodes.http.app import create_app
from pdbus.nodes.http.keys import HttpKeys, Owner

from tests.fake_client import FakeClient

KEY = "sk-0123456789abcdef"


def file_of(path: Path, text: str = f"# ours\nalice {KEY}\n") -> Path:
    file = path / "http.keys"
    file.touch(0o600)
    file.write_text(text)
    return file


def ask(keys: HttpKeys, method: str, path: str, headers: dict[str, str], **options: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        app = create_app(FakeClient(), keys=keys)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as web:
            return await web.request(method, path, headers=headers, **options)

    return asyncio.run(once())


def test_who_sends_a_key_is_served(tmp_path: Path) -> None:
    response = ask(HttpKeys(str(file_of(tmp_path))), "GET", "/v1/models", {"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/add_remote_prefill_eps", "/nowhere"])
@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "no API key was sent: give it as Authorization: Bearer KEY"),
        ("Bearer sk-wrong-wrong-wrong-wrong", "the API key is not known"),
        (f"Basic {KEY}", "the API key is not known"),
        (KEY, "no API key was sent: give it as Authorization: Bearer KEY"),
        ("Bearer ", "no API key was sent: give it as Authorization: Bearer KEY"),
    ],
)
def test_who_sends_none_that_is_known_gets_401(tmp_path: Path, path: str, header: str, message: str) -> None:
    headers = {"Authorization": header} if header else {}
    response = ask(HttpKeys(str(file_of(tmp_path))), "POST", path, headers, json={"prompt": "hi"})
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    assert response.headers["connection"] == "close"  # its body was not read
    assert response.json() == {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    }


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/pd/info"])
def test_probes_need_no_key(tmp_path: Path, path: str) -> None:
    assert ask(HttpKeys(str(file_of(tmp_path))), "GET", path, {}).status_code == 200


def test_a_changed_file_is_read_again_and_a_bad_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    file = file_of(tmp_path)
    keys = HttpKeys(str(file))
    other = "sk-fedcba9876543210"
    file.unlink()
    file_of(tmp_path, f"bob {other}\n")
    assert (keys.owner_of(KEY), keys.owner_of(other)) == (None, Owner("bob"))
    file.unlink()
    file_of(tmp_path, f"bob {KEY} {other}\n")
    with caplog.at_level(logging.ERROR):
        assert keys.owner_of(other) == Owner("bob")
    assert "the keys stay as they were" in caplog.text and KEY not in caplog.text and other not in caplog.text


def test_a_file_is_tried_again_after_what_kept_it_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a key that was taken off it would work for ever: chmod does not change a file's time."""
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    file = file_of(tmp_path)
    keys, other = HttpKeys(str(file)), "sk-fedcba9876543210"
    file.write_text(f"bob {other}\n")
    file.chmod(0o644)
    assert keys.owner_of(KEY) and keys.owner_of(KEY)
    assert caplog.text.count("others have access") == 1
    file.chmod(0o600)
    assert (keys.owner_of(KEY), keys.owner_of(other)) == (None, Owner("bob"))


@pytest.mark.parametrize("path", ["/add_remote_prefill_eps", "/remove_remote_prefill_eps"])
def test_which_nodes_compute_prompts_is_for_operators_to_say(tmp_path: Path, path: str) -> None:
    """Whoever does reads everybody's prompts."""
    operator = "sk-fedcba9876543210"
    keys = HttpKeys(str(file_of(tmp_path, f"alice {KEY}\nops {operator} per-minute=9 operator\n")))
    body = {"endpoints": ["http://127.0.0.1:1"]}
    refused = ask(keys, "POST", path, {"Authorization": f"Bearer {KEY}"}, json=body)
    assert refused.status_code == 403 and refused.headers["connection"] == "close"
    assert refused.json()["error"]["code"] == "forbidden" and "alice" in refused.json()["error"]["message"]
    assert ask(keys, "POST", path, {"Authorization": f"Bearer {operator}"}, json=body).status_code == 200


def test_everyone_with_a_key_may_see_which_nodes_compute_prompts(tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert ask(HttpKeys(str(file_of(tmp_path))), "GET", "/add_remote_prefill_eps", headers).status_code == 200


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice", "line 1: must be NAME KEY"),
        (f"alice {KEY} {KEY}", "line 1: must be operator, at-once=N, per-minute=N after the key"),
        (f"alice {KEY} at-once=0", "line 1: at-once must be a number from 1 to 1000000"),
        (f"alice {KEY} at-once=-1", "line 1: at-once must be"),
        (f"alice {KEY} per-minute=", "line 1: per-minute must be"),
        (f"alice {KEY} per-minute=²", "line 1: per-minute must be"),
        (f"alice {KEY} per-minute={9 * 10**30}", "line 1: per-minute must be"),
        (f"alice {KEY} per-minute=1 per-minute=2", "line 1: per-minute stands there twice"),
        ("alice short", "line 1: the key of alice must have 16 to 256 characters"),
        (f"alice {'é' * 16}", "line 1: the key of alice must be plain ASCII"),
        (f"alice {KEY} per-minute=1\nbob {KEY}", "line 2: alice and bob have one key"),
    ],
)
def test_a_file_that_will_not_do_is_named_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^--http-keys: ") as caught:
        HttpKeys(str(file_of(tmp_path, text)))
    assert problem in str(caught.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others have access"):
        HttpKeys(str(file))


def test_a_gateway_before_guarded_nodes_is_guarded_too(tmp_path: Path) -> None:
    cluster = Cluster(1, 1, options={"engine": "coded", "http_keys": "http.keys"}, gateway_port=8000)
    words = cluster.gateway[0].command
    assert words[words.index("--http-keys") + 1] == "http.keys"
