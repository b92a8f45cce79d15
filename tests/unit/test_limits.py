"""What a request may ask of sampling: one rule at every door."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdbus.bus.errors import RequestError
from pdbus.bus.messages import Sampling
from pdbus.nodes.http.schema import parse_completion
from pdbus.nodes.limits import check_sampling, check_scored, check_stop_ids

BAD: list[dict[str, Any]] = [
    {"max_tokens": 0}, {"min_tokens": -1}, {"temperature": -0.1}, {"temperature": 2.1}, {"top_k": -1}, {"top_p": 0.0},
    {"top_p": 1.1}, {"seed": -1}, {"stop": ("",)}, {"stop": ("x",) * 17}, {"logprobs": 21},
    {"min_p": 1.1}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"repetition_penalty": 0.0},
    {"repetition_penalty": 10.5},
]  # fmt: skip
GOOD: list[dict[str, Any]] = [
    {"temperature": 2.0},
    {"seed": 2**63 - 2},
    {"top_p": 1.0},
    {"logprobs": 20},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_what_the_sdk_may_not_ask_http_may_not_either(fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(RequestError) as sdk:
        check_sampling(Sampling(**fields))
    with pytest.raises(RequestError) as http:
        parse_completion(json.dumps({"prompt": "x", **fields}).encode())
    assert sdk.value.param == http.value.param == name


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_what_the_sdk_may_ask_http_may_too(fields: dict[str, Any]) -> None:
    check_sampling(Sampling(**fields))
    parse_completion(json.dumps({"prompt": "x", **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs_from": 1},
        {"prompt_logprobs_from": -1, "prompt_logprobs": 0},
        {"prompt_logprobs_from": 5, "prompt_logprobs": 0},
    ],
    ids=str,
)
def test_tokens_that_are_scored_are_some_of_the_prompt_s(fields: dict[str, Any]) -> None:
    check_scored(Sampling(prompt_logprobs=0, prompt_logprobs_from=4), 5)
    with pytest.raises(RequestError, match="it must be from 0 to 4, the prompt's last token"):
        check_scored(Sampling(**fields), 5)


def test_a_stop_token_outside_the_vocabulary_is_named() -> None:
    check_stop_ids((0, 255), 256)
    with pytest.raises(RequestError, match="must be a token id from 0 to 255, got 256") as raised:
        check_stop_ids((7, 256), 256)
    assert raised.value.param == "stop_token_ids[1]"
