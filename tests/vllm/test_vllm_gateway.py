"""`pd gateway --vllm` in front of a pair of vLLM servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.servers import BLOCK, Pair, free_port
from tests.vllm.test_vllm_pair import prompt_of

pytestmark = pytest.mark.timeout(900)

ANSWER = 12
ANSWER_S = 120


@pytest.fixture(scope="module")
def gateway(pair: Pair) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "pd"), "gateway", "--vllm", "--http", f"127.0.0.1:{port}",
        "--prefiller-host", "127.0.0.1", "--prefiller-port", str(pair.p.port),
        "--decoder-host", "127.0.0.1", "--decoder-port", str(pair.d.port),
    ]  # fmt: skip
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 30
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def ask(gateway: str, prompt: Sequence[int], **more: Any) -> httpx.Response:
    body = {
        "model": "m", "prompt": list(prompt), "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    return httpx.post(f"{gateway}/v1/completions", json=body, timeout=ANSWER_S)


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK + 1, 300])
def test_its_answers_are_those_of_one_server_and_kv_is_handed_over(gateway: str, pair: Pair, length: int) -> None:
    prompt = prompt_of(length, 20_000 + length)
    before = pair.d.handed_over()
    answer = ask(gateway, prompt).json()
    assert pair.d.handed_over() > before
    assert answer["choices"][0]["token_ids"] == pair.p.tokens(prompt, ANSWER)


def test_a_stream_comes_whole_from_kv_that_was_handed_over(gateway: str, pair: Pair) -> None:
    prompt = prompt_of(4 * BLOCK, 30_000)
    before = pair.d.handed_over()
    lines = [line for line in ask(gateway, prompt, stream=True).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and pair.d.handed_over() > before
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    tokens = [token for part in parts for choice in part["choices"] for token in choice["token_ids"]]
    assert tokens == pair.p.tokens(prompt, ANSWER)


def test_a_client_chooses_no_pair(gateway: str, pair: Pair) -> None:
    """The one it names is dropped: it would make the request wait for a P that never hears of it."""
    prompt = prompt_of(2 * BLOCK, 40_000)
    before = pair.d.handed_over()
    assert ask(gateway, prompt, kv_transfer_params={"pdbus_pair": "0" * 32}).status_code == 200
    assert pair.d.handed_over() > before


def test_what_is_wrong_with_a_request_is_said_by_vllm(gateway: str) -> None:
    answer = ask(gateway, [5, 6], max_tokens=-1)
    assert answer.status_code == 400 and "max_tokens" in answer.text
