"""Logprobs over HTTP carry each token's own bytes, for tokens that are bytes and for those of a model's tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdbus.nodes.node_process import NodeProcess

from .lone_nodes import Lone, lone_nodes

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def lone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    model = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_llama, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with lone_nodes() as lone:
        coded = lone.start("both", "bytes")
        words = lone.start("both", "words", engine="torch", model=str(model))
        lone.ready(coded, words)
        yield lone
        lone.check_clean()


@pytest.fixture(params=["bytes", "words"])
def node(lone: Lone, request: pytest.FixtureRequest) -> NodeProcess:
    return next(node for node in lone.nodes if node.name == request.param)


def only(response: dict[str, Any]) -> dict[str, Any]:
    [choice] = response["choices"]
    return choice  # type: ignore[no-any-return]


def between(node: NodeProcess) -> str:
    """The tiny model's tokens are words, said with a space between them."""
    return "" if node.name == "bytes" else " "


def test_completion_logprobs_name_every_token_by_its_text(lone: Lone, node: NodeProcess) -> None:
    body = {"prompt": [7, 8, 9], "max_tokens": 6, "logprobs": 2, "temperature": 0, "ignore_eos": True}
    choice = only(lone.post(node, "/v1/completions", body))
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == 6
    assert between(node).join(logprobs["tokens"]) == choice["text"]
    assert all(-math.inf < value <= 0 for value in logprobs["token_logprobs"])
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert max(top, key=top.__getitem__) == token
        assert not any(name.startswith("token_id:") for name in top)


def test_chat_logprobs_have_bytes_and_alternatives(lone: Lone, node: NodeProcess) -> None:
    body = {"messages": [{"role": "user", "content": "w9 w8"}], "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    choice = only(lone.post(node, "/v1/chat/completions", {**body, "temperature": 0, "ignore_eos": True}))
    entries = choice["logprobs"]["content"]
    said = [bytes(entry["bytes"]).decode() for entry in entries]
    assert between(node).join(said) == choice["message"]["content"]
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"] == entry["top_logprobs"][0]["token"]
        assert len(entry["top_logprobs"]) <= 2


def test_nothing_is_said_of_tokens_when_nobody_asks(lone: Lone, node: NodeProcess) -> None:
    assert only(lone.post(node, "/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 3}))["logprobs"] is None
