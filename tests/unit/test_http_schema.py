"""What the HTTP side makes of a body: one request, or one message that names the field at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdbus.bus.errors import RequestError
from pdbus.bus.messages import Sampling
from pdbus.nodes.http.schema import SEED_OF_ZERO, UNTIL_FULL, Asked, parse_chat, parse_completion
from pdbus.nodes.limits import ROLES

USER = [{"role": "user", "content": "hi"}]


OPENAI_CHAT = (
    "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
    "max_tokens", "metadata", "modalities", "model", "n", "parallel_tool_calls", "prediction", "presence_penalty",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "seed",
    "service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs",
    "top_p", "user", "verbosity", "web_search_options",
)  # fmt: skip


def completion(**fields: Any) -> Asked:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> Asked:
    return parse_chat(json.dumps({"messages": USER, **fields}).encode())


def test_completion_defaults_are_openai_s() -> None:
    asked = completion()
    assert asked.prompts == ["hi"]
    assert asked.sampling == Sampling(max_tokens=16, temperature=1.0)
    assert not asked.stream and not asked.include_usage and not asked.return_token_ids


def test_chat_without_a_limit_goes_on_until_the_context_is_full() -> None:
    asked = chat()
    assert asked.prompts == [USER]
    assert asked.sampling == Sampling(max_tokens=UNTIL_FULL, temperature=1.0)


def test_every_sampling_field_arrives() -> None:
    asked = completion(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, seed=7, stop=["a", "b"], stop_token_ids=[3],
        ignore_eos=True, logprobs=2, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2,
        logit_bias={"7": -100, "9": 1.5},
    )  # fmt: skip
    assert asked.sampling == Sampling(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, seed=7, stop=("a", "b"), stop_token_ids=(3,),
        ignore_eos=True, logprobs=2, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2,
        logit_bias=((7, -100.0), (9, 1.5)),
    )  # fmt: skip


def test_a_schema_arrives_as_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert json.loads(chat(response_format=wanted).sampling.json_schema) == schema
    assert chat(response_format={"type": "json_object"}).sampling.json_schema == '{"type":"object"}'


def test_seed_zero_is_a_seed() -> None:
    """In Sampling, 0 lets the node draw one; a client that sends 0 wants the same answer each time."""
    assert completion(seed=0).sampling.seed == SEED_OF_ZERO
    assert completion().sampling.seed == 0


PROMPTS = [
    ("a", ["a"]), (["a"], ["a"]), ([1, 2], [[1, 2]]), ([[1, 2]], [[1, 2]]), (["a", "b"], ["a", "b"]),
    ([[1], [2, 3]], [[1], [2, 3]]), (["a", [1]], ["a", [1]]),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "taken"), PROMPTS, ids=str)
def test_prompt_takes_text_or_token_ids_or_lists_of_them(prompt: Any, taken: Any) -> None:
    assert completion(prompt=prompt).prompts == taken


@pytest.mark.parametrize("fields", [{"max_tokens": 5}, {"max_completion_tokens": 5}])
def test_the_limit_of_chat_has_two_names(fields: dict[str, int]) -> None:
    assert chat(**fields).sampling.max_tokens == 5
    both = chat(max_tokens=5, max_completion_tokens=5)
    assert both.sampling == chat(**fields).sampling


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
    ids=str,
)
def test_chat_logprobs(fields: dict[str, Any], wanted: int | None) -> None:
    assert chat(**fields).sampling.logprobs == wanted


@pytest.mark.parametrize("role", ROLES)
def test_every_role_that_a_node_knows_is_taken(role: str) -> None:
    assert chat(messages=[{"role": role, "content": "x"}]).prompts == [[{"role": role, "content": "x"}]]


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts == [[{"role": "user", "content": "a\nb"}]]


def test_an_earlier_answer_comes_back_with_openai_s_empty_fields() -> None:
    earlier = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
    }
    assert chat(messages=[earlier]).prompts == [[{"role": "assistant", "content": "x"}]]


def test_fields_that_change_nothing_are_accepted() -> None:
    completion(
        n=1, best_of=1, echo=False, suffix=None, user="u", metadata={"a": "b"}, store=False,
        service_tier="auto", safety_identifier="s", prompt_cache_key="k",
        prompt_cache_retention="24h",
    )  # fmt: skip
    chat(
        tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=True, functions=[],
        function_call="auto", modalities=["text"], reasoning_effort="none", verbosity="medium",
    )  # fmt: skip
    chat(**dict.fromkeys(OPENAI_CHAT))
    chat(stream=True, stream_options={"include_obfuscation": False})
    chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})


def test_null_is_the_same_as_absent() -> None:
    fields = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "n")
    assert completion(**dict.fromkeys(fields)) == completion()


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def with_defs(name: str, kind: str) -> dict[str, Any]:
    return tool(name, parameters={"type": "object", "$defs": {"x": {"type": kind}}})


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


BAD_FIELDS = [
    ({"max_tokens": 0}, "max_tokens", "must be between 1 and"),
    ({"max_tokens": -1}, "max_tokens", "must be between 1 and"),
    ({"max_tokens": "9"}, "max_tokens", "expected an integer, got a string"),
    ({"max_tokens": 1.5}, "max_tokens", "expected an integer, got a number"),
    ({"max_tokens": True}, "max_tokens", "expected an integer, got"),
    ({"max_tokens": 10**30}, "max_tokens", "must be between 1 and"),
    ({"min_tokens": 8, "max_tokens": 4}, "min_tokens", "more than max_tokens"),
    ({"temperature": -0.1}, "temperature", "must be between 0 and 2"),
    ({"temperature": float("nan")}, "temperature", "NaN and infinity"),
    ({"temperature": float("inf")}, "temperature", "NaN and infinity"),
    ({"temperature": [1]}, "temperature", "expected a number, got a list"),
    ({"top_p": 0}, "top_p", "must be over 0"),
    ({"top_p": 1.1}, "top_p", "must be between 0 and 1"),
    ({"top_k": -1}, "top_k", "must be between 0 and"),
    ({"deadline_ms": 0}, "deadline_ms", "must be between 1 and 86400000"),
    ({"deadline_ms": 86_400_001}, "deadline_ms", "must be between 1 and 86400000"),
    ({"deadline_ms": "9"}, "deadline_ms", "expected an integer, got a string"),
    ({"seed": -1}, "seed", "must be between 0 and"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "1 to 1024 characters"),
    ({"stop": 3}, "stop", "expected a string or a list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "must be a token id"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ({"beam_width": 3}, "beam_width", "unknown field"),
    ({"n": 0}, "n", "must be between 1 and 128"),
    ({"n": 129}, "n", "must be between 1 and 128"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be between -2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "must be between -2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "must be over 0"),
    ({"min_p": 1.5}, "min_p", "must be between 0 and 1"),
    ({"logit_bias": {"x": 2}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "keys must be token ids"),
    ({"logit_bias": {"1": 10**400}}, "logit_bias", "bias from -100 to 100"),
    ({"logit_bias": {"1": "2"}}, "logit_bias", "must have a number"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "bias from -100 to 100"),
    ({"logit_bias": {str(2**32): 1}}, "logit_bias", "is no token id"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"model": ""}, "model", "must not be empty"),
]
BAD_COMPLETION = [
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": None}, "prompt", "expected a string or a list, got null"),
    ({"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
    ({"prompt": ["a", 1]}, "prompt[1]", "must be text or token ids like the others"),
    ({"prompt": ["a", "b"], "n": 65}, "n", "more than 128"),
    ({"prompt": [1, -2]}, "prompt[1]", "must be a token id"),
    ({"prompt": [1, "a"]}, "prompt[1]", "must be a token id"),
    ({"prompt": [2**32]}, "prompt[0]", "must be a token id"),
    ({"prompt": [1.5]}, "prompt[0]", "got a number"),
    ({"logprobs": 21}, "logprobs", "must be between 0 and 20"),
    ({"best_of": 2}, "best_of", "only 1 is supported"),
    ({"max_tokens": 0}, "max_tokens", "must be between 1 and"),
    ({"suffix": "x"}, "suffix", 'only "" is supported'),
]
BAD_CHAT = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "expected a list, got a string"),
    ({"messages": [1]}, "messages[0]", "expected an object, got an integer"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required field is missing"),
    (
        {"messages": [*USER, {"role": "robot", "content": "x"}]},
        "messages[1].role",
        "must be one of system, developer, user",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required field is missing"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "expected a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "only"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "unknown field"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "must be between 1 and"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one of the two"),
    ({"audio": {"voice": "x"}}, "audio", "only null is supported"),
    ({"modalities": ["audio"]}, "modalities", 'only ["text"] is supported'),
    ({"reasoning_effort": "high"}, "reasoning_effort", 'only "none" is supported'),
    ({"logprobs": 3}, "logprobs", "expected true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "only allowed with logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be between 0 and 20"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", 'only "function" is supported'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
    ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters", "must be a JSON schema"),
    ({"tools": [tool("a", description=1)]}, "tools[0].function.description", "expected a string"),
    ({"tools": [tool("a"), tool("a")]}, "tools", "two are named a"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools", "at most 128"),
    ({"tool_choice": "required"}, "tool_choice", "tools offers none"),
    ({"tools": [tool("a")], "tool_choice": "always"}, "tool_choice", "none, auto, required or a function"),
    ({"tools": [tool("a")], "tool_choice": {"type": "function"}}, "tool_choice", "none, auto, required or"),
    ({"tools": [tool("a")], "tool_choice": named("b")}, "tool_choice", "no tool is named 'b'"),
    (
        {"tools": [tool("a")], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "tool_choice",
        "cannot follow response_format",
    ),
    (
        {"tools": [tool("a", parameters={"description": "x" * 70_000})], "tool_choice": named("a")},
        "tools",
        "at most 16384 bytes",
    ),
    (
        {"tools": [with_defs("a", "string"), with_defs("b", "integer")], "tool_choice": "required"},
        "tools[1].function.parameters.$defs.x",
        "another tool has another one",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        "messages[0].tool_calls",
        "only an assistant",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]", "must be a function"),
    ({"messages": [calling("[1]")]}, "messages[0].tool_calls[0].function.arguments", "must be a JSON object"),
    ({"messages": [calling("{")]}, "messages[0].tool_calls[0].function.arguments", "must be a JSON object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "must be a JSON schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"description": "x" * 70_000}}}},
        "response_format",
        "at most 16384 bytes",
    ),
]


@pytest.mark.parametrize(
    ("parse", "fields", "param", "problem"),
    [(completion, *bad) for bad in BAD_FIELDS + BAD_COMPLETION] + [(chat, *bad) for bad in BAD_FIELDS + BAD_CHAT],
)
def test_bad_fields_are_named(parse: Callable[..., Asked], fields: dict[str, Any], param: str, problem: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse(**fields)
    assert raised.value.param == param
    assert str(raised.value).startswith(f"{param}: ")
    assert problem in str(raised.value)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nonsense", b'{"prompt":"\xff"}', b'{"prompt":"a"} x', b'{"logit_bias":{"":' + b"[" * 100_000]
)
def test_what_is_no_json_is_said(body: bytes) -> None:
    with pytest.raises(RequestError) as raised:
        parse_completion(body)
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize("half", [b"\\ud800", b"\\ud800x", b"\\udc00", b"\\ud800\\u0041"])
def test_half_of_a_surrogate_pair_is_named_by_its_field(half: bytes) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair is no text") as raised:
        parse_chat(b'{"messages": [{"role": "user", "content": "' + half + b'"}]}')
    assert raised.value.param == "messages[0].content"


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"x"'])
def test_the_body_must_be_an_object(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body: expected an object"):
        parse_chat(body)
