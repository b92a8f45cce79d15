"""Answers that follow a JSON schema: the first token from P, the others from D, all as on one node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import Live, live_cluster
from tests.torch_models import write_spelling_llama

pytestmark = pytest.mark.live

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ok", "n"],
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
TOOL = {"type": "function", "function": {"name": "decide", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "decide"}}


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model: Path = write_spelling_llama(tmp_path_factory.mktemp("models"), eos=1)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with live_cluster(options={"model": str(model), "deterministic": True, "kv_blocks": 256}) as live:
        yield live
        live.check_clean()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_node(spelling: Live, sampling: dict[str, Any]) -> None:
    prompt = list(range(10 + len(sampling), 60))
    here, there = spelling.both_answer(prompt, max_tokens=200, json_schema=json.dumps(SCHEMA), **sampling)
    assert (here.tokens, here.finished.reason) == (there.tokens, "stop")
    assert here.finished.timeline.remote
    assert set(json.loads(here.text)) == {"ok", "n"}


def test_http_takes_openai_s_form(spelling: Live) -> None:
    body = {"prompt": "Say", "max_tokens": 200, "response_format": FORMAT}
    answer = httpx.post(f"{spelling.decode.http}/v1/completions", json=body, timeout=60).json()
    assert set(json.loads(answer["choices"][0]["text"])) == {"ok", "n"}
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"type": "objec"}], ids=str)
def test_a_schema_at_fault_is_the_request_s(spelling: Live, schema: dict[str, Any]) -> None:
    """What shows only when it is compiled with the model's tokenizer, too: no other node would do better."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"prompt": "Say", "max_tokens": 20, "response_format": wanted}
    answer = httpx.post(f"{spelling.decode.http}/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"] or "response_format") == (400, "response_format")
    assert "JSON schema" in error["message"] or "schema cannot be followed" in error["message"]


def test_echo_tells_how_likely_every_token_of_the_prompt_was(spelling: Live) -> None:
    """What evaluation tools ask: the same as of tokens that were sampled, computed where it is asked."""
    with openai.OpenAI(base_url=f"{spelling.decode.http}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": client.models.list().data[0].id, "logprobs": 2, "temperature": 0}
        prompt = "The quick brown fox jumps over the lazy dog, twice. " * 8
        said = client.completions.create(
            prompt=prompt, max_tokens=12, extra_body={"ignore_eos": True, "return_token_ids": True}, **asked
        )
        sampled: Any = said.choices[0].logprobs
        ids = httpx.post(f"{spelling.decode.http}/tokenize", json={"prompt": prompt}, timeout=30).json()["tokens"]
        whole = [*ids, *said.choices[0].token_ids]  # type: ignore[attr-defined]
        echoed = client.completions.create(prompt=whole, max_tokens=0, echo=True, **asked)
        scores: Any = echoed.choices[0].logprobs
        assert len(scores.token_logprobs) == len(scores.tokens) == len(scores.text_offset) == len(whole)
        assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
        assert scores.tokens[-12:] == sampled.tokens and scores.top_logprobs[-12:] == sampled.top_logprobs
        assert scores.token_logprobs[-12:] == pytest.approx(sampled.token_logprobs, abs=1e-5)
        assert (echoed.usage and echoed.usage.completion_tokens, echoed.choices[0].finish_reason) == (0, "length")
        assert echoed.model_extra and echoed.model_extra["pd_timeline"]["remote"] is False

        stream = client.completions.create(prompt=prompt, max_tokens=2, echo=True, stream=True, **asked)
        chunks = [chunk for chunk in stream if chunk.choices]
        assert "".join(chunk.choices[0].text for chunk in chunks).startswith(prompt)
        first: Any = chunks[0].choices[0].logprobs
        assert [prompt[at] for at in first.text_offset[1:5]] == [token[0] for token in first.tokens[1:5]]
        plain = client.completions.create(prompt="fox", max_tokens=1, echo=True, model=asked["model"])
        assert plain.choices[0].text.startswith("fox")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_openais_client_gets_the_call_that_it_asks_for(spelling: Live, choice: Any) -> None:
    """Whole and streamed, and sent back with the tool's answer."""
    with openai.OpenAI(base_url=f"{spelling.decode.http}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Decide."}]
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id, "tools": [TOOL], "tool_choice": choice, "temperature": 0,
            "max_tokens": 400, "parallel_tool_calls": False,
        }  # fmt: skip
        whole = client.chat.completions.create(messages=messages, **asked).choices[0]
        (call,) = whole.message.tool_calls or []
        assert (whole.finish_reason, whole.message.content, call.function.name) == ("tool_calls", None, "decide")
        assert set(json.loads(call.function.arguments)) == {"ok", "n"}
        with client.chat.completions.stream(messages=messages, **asked) as stream:
            final = stream.get_final_completion().choices[0]
        (streamed,) = final.message.tool_calls or []
        assert (streamed.function.name, streamed.function.arguments) == ("decide", call.function.arguments)
        messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
        after = client.chat.completions.create(messages=messages, **{**asked, "tool_choice": "auto", "max_tokens": 4})
        assert after.choices[0].message.tool_calls is None


def test_a_node_that_cannot_says_so(coded: Live) -> None:
    answer = httpx.post(f"{coded.decode.http}/v1/completions", json={"prompt": "hi", "response_format": FORMAT})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_value")
    assert "cannot follow a JSON schema" in error["message"]
