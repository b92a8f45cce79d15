"""One request as two servers are asked it: the same prompt, joined by a pair that nobody can guess.

What clients send as `kv_transfer_params` is dropped: it would name whose KV they get.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from pdbus.connector.vllm.pair import PAIR_BYTES, PARAMETER

PARAMETERS = "kv_transfer_params"
ONE_STEP: dict[str, Any] = {"max_tokens": 1, "stream": False}  # of the prefill server, which samples for nobody
OF_THE_ANSWER = (  # what shapes it, and not the prompt
    "max_completion_tokens", "min_tokens", "n", "stop", "stop_token_ids", "stream_options", "logprobs", "top_logprobs",
    "response_format", "structured_outputs",
)  # fmt: skip

Body = dict[str, Any]


class Legs(NamedTuple):
    """Bodies for the two servers."""

    prefill: Body
    decode: Body


def new_pair(node: str = "") -> str:
    """`node`: the prefill server's name on the bus, where there are several."""
    token = secrets.token_hex(PAIR_BYTES)
    return f"{token}@{node}" if node else token


def legs(body: Mapping[str, Any], pair: str) -> Legs:
    """What P and what D is asked."""
    decode = {**alone(body), PARAMETERS: {PARAMETER: pair}}
    prefill = {key: value for key, value in decode.items() if key not in OF_THE_ANSWER}
    return Legs({**prefill, **ONE_STEP}, decode)


def alone(body: Mapping[str, Any]) -> Body:
    """What D is asked where it computes the prompt itself."""
    return {key: value for key, value in body.items() if key != PARAMETERS}
