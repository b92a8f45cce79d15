"""What a client may ask: the bodies of /v1/completions and /v1/chat/completions, each turned into one `Asked`.

Every field is declared; an unknown one is refused by name. Fields of OpenAI's that clients send but that this server
does not act on are accepted with the value that changes nothing (`NEUTRAL`) and refused with any other. Beyond
OpenAI, as elsewhere in the field: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
return_token_ids; and of our own, deadline_ms.
"""

from __future__ import annotations

import json
from typing import Any

from pdbus.bus import wire
from pdbus.bus.errors import RequestError
from pdbus.bus.generation import Conversation
from pdbus.bus.messages import Sampling
from pdbus.bus.wire import Declared, replace
from pdbus.nodes.json_schema import check_form
from pdbus.nodes.limits import (
    DEADLINE_MS_MAX,
    LOGPROBS_MAX,
    PENALTY_MAX,
    REPETITION_MAX,
    ROLES,
    SEED_MAX,
    STOP_IDS_MAX,
    TEMPERATURE_MAX,
    check_bias,
    check_stops,
)

from .body import decode_body
from .tools import Tools, tools_of

UNTIL_FULL = 2**31 - 1  # Sampling.max_tokens: until the context is full; what chat asks when nobody says
SEED_OF_ZERO = SEED_MAX  # Sampling.seed 0 lets the node draw one, but a client that sends 0 wants 0 each time
CHOICES_MAX = 128  # OpenAI's; each is a request of its own at the node
DIGITS_MAX = 20  # of a token id that is written as text
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

# Inclusive, in the field's own unit.
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, CHOICES_MAX),
    "max_tokens": (1, UNTIL_FULL - 1),
    "max_completion_tokens": (1, UNTIL_FULL - 1),
    "min_tokens": (0, UNTIL_FULL - 1),
    "temperature": (0, TEMPERATURE_MAX),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-PENALTY_MAX, PENALTY_MAX),
    "frequency_penalty": (-PENALTY_MAX, PENALTY_MAX),
    "repetition_penalty": (0, REPETITION_MAX),
    "seed": (0, SEED_OF_ZERO - 1),
    "deadline_ms": (1, DEADLINE_MS_MAX),
    "logprobs": (0, LOGPROBS_MAX),
    "top_logprobs": (0, LOGPROBS_MAX),
}

# What leaves the answer as it is; null always does, and nothing else where there is no such value.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}


class StreamOptions(Declared, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # load generators ask for it; usage comes once all the same, at the end
    include_obfuscation: bool | None = None  # filler beside each chunk, against those who count bytes


class Common(Declared, forbid_unknown_fields=True):
    """What both bodies share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    deadline_ms: int | None = None

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    user: str | None = None  # these say who asks and why, nothing about the answer
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatMessage(Declared, forbid_unknown_fields=True):
    """The last four are what OpenAI's own client sends back, empty, with an assistant's earlier answer."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    annotations: list[Any] | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[Any] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


Prompt = str | list[dict[str, Any]] | Conversation | list[int]


class Asked(Declared):
    """What is asked of the node, and how its answers are wanted: `n` to each prompt, in order."""

    prompts: list[Prompt]
    n: int
    model: str
    sampling: Sampling
    stream: bool
    include_usage: bool
    return_token_ids: bool
    deadline_ms: int | None  # None: it does not say
    tools: Tools | None = None  # a chat's, where its answers may call any
    echo: bool = False  # the prompt comes first
    answers: bool = True  # with echo, nothing but the prompt may be wanted
    named: dict[str, str] = {}  # the SDK's fields, where the client asked for them by another


def parse_completion(data: bytes) -> Asked:
    """The body of /v1/completions. Raises RequestError naming the field at fault."""
    body = decode_body(data, CompletionBody)
    if not body.echo:
        limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return _asked(body, _prompts(body.prompt), limit, body.logprobs)
    answers = body.max_tokens != 0
    body = body if answers else replace(body, max_tokens=1)  # which nobody is told of
    asked = _asked(body, _prompts(body.prompt), body.max_tokens or COMPLETION_TOKENS, body.logprobs)
    scores = body.logprobs
    if scores is None and not all(isinstance(prompt, str) for prompt in asked.prompts):
        scores = 0  # the node says what text the ids stand for
    sampling = replace(asked.sampling, prompt_logprobs=scores)
    named = {"prompt_logprobs": "echo" if body.logprobs is None else "logprobs"}
    return replace(asked, sampling=sampling, echo=True, answers=answers, named=named)


def parse_chat(data: bytes) -> Asked:
    """The body of /v1/chat/completions. Raises RequestError naming the field at fault."""
    body = decode_body(data, ChatBody)
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages = messages_of(body.messages)
    prompt = Conversation(messages, tools.offered) if tools else messages
    asked = _asked(body, [prompt], _chat_limit(body), _chat_logprobs(body))
    if body.max_tokens is None and body.max_completion_tokens is not None:
        asked = replace(asked, named={"max_tokens": "max_completion_tokens"})
    if tools is None or not tools.schema:
        return replace(asked, tools=tools)
    if asked.sampling.json_schema:
        problem = "tool_choice: an answer that must call a tool cannot follow response_format, too"
        raise RequestError(problem, param="tool_choice")
    sampling = replace(asked.sampling, json_schema=tools.schema)
    return replace(asked, tools=tools, sampling=sampling, named={**asked.named, "json_schema": "tool_choice"})


def messages_of(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation as chat templates see it. Raises RequestError naming the field at fault."""
    if not messages:
        raise RequestError("messages: must hold at least one message", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _chat_limit(body: ChatBody) -> int:
    """One limit under its two names."""
    given = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    if len(set(given)) > 1:
        problem = f"max_tokens: {given[1]} is not max_completion_tokens, {given[0]}: give one of the two"
        raise RequestError(problem, param="max_tokens")
    return given[0] if given else UNTIL_FULL


def _asked(body: Common, prompts: list[Any], max_tokens: int, logprobs: int | None) -> Asked:
    _check_ranges(body)
    n = body.n or 1
    if n * len(prompts) > CHOICES_MAX:
        problem = f"n: {n} answers to each of {len(prompts)} prompts are more than {CHOICES_MAX}"
        raise RequestError(problem, param="n")
    _check_neutral(body)
    if body.model == "":
        raise RequestError("model: must not be empty: name the model, or leave the field out", param="model")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise RequestError(f"{param}: only false is supported", param=param, code="unsupported_value")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only allowed with stream true", param="stream_options")
    return Asked(
        prompts=prompts,
        n=n,
        model=body.model or "",
        sampling=replace(_sampling(body, max_tokens, logprobs), json_schema=_schema(body.response_format)),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        deadline_ms=body.deadline_ms,
    )


def _check_ranges(body: Common) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(body, name, None)
        if value is not None and not isinstance(value, bool) and not low <= value <= high:
            raise RequestError(f"{name}: must be between {low} and {high}, got {value}", param=name)
    if body.top_p == 0:
        raise RequestError("top_p: must be over 0, else no token is left to choose", param="top_p")
    if body.repetition_penalty == 0:
        raise RequestError("repetition_penalty: must be over 0; 1 changes nothing", param="repetition_penalty")


def _check_neutral(body: Common) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            only = " or ".join(wire.to_json(v).decode() for v in neutral or (None,))
            raise RequestError(f"{name}: only {only} is supported", param=name, code="unsupported_value")


def _sampling(body: Common, max_tokens: int, logprobs: int | None) -> Sampling:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens: {min_tokens} is more than max_tokens, {max_tokens}", param="min_tokens")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=SEED_OF_ZERO if body.seed == 0 else body.seed or 0,
        stop=_stops(body.stop),
        stop_token_ids=tuple(_token_ids(body.stop_token_ids or [], "stop_token_ids", STOP_IDS_MAX)),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_biases(body.logit_bias or {}),
    )


def _biases(biases: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    """OpenAI's form: token ids as text, each with what is added to its logit."""
    found = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= DIGITS_MAX):
            raise RequestError(f"logit_bias: keys must be token ids, got {key!r:.40}", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise RequestError(f"logit_bias: {key} must have a number, got {bias!r:.40}", param="logit_bias")
        found.append((int(key), bias))
    check_bias(tuple(found))
    return tuple((token, float(bias)) for token, bias in found)


def _schema(wanted: dict[str, Any] | None) -> str:
    """OpenAI's three forms: text, json_object, and json_schema, whose name, description and strictness say nothing
    here: an answer always follows it."""
    kind = (wanted or {"type": "text"}).get("type")
    if kind == "text":
        return ""
    if kind == "json_object":
        return '{"type":"object"}'
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type: must be text, json_object or json_schema, got {kind!r:.40}",
            param="response_format.type",
        )
    named = (wanted or {}).get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        param = "response_format.json_schema.schema"
        raise RequestError(f"{param}: must be a JSON schema, an object", param=param)
    text = wire.to_json(schema).decode()
    check_form(text, "response_format")  # the node looks into it
    return text


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    check_stops(stops)
    return stops


def _token_ids(ids: list[Any], name: str, ids_max: int) -> list[int]:
    """Ids that fit the wire; whether they are in the vocabulary only the node knows."""
    if len(ids) > ids_max:
        raise RequestError(f"{name}: at most {ids_max} ids, got {len(ids)}", param=name)
    try:
        wire.pack_u32(ids)  # a long prompt's, all at once: one by one they take longer than all else here
    except (TypeError, OverflowError):
        i = next(i for i, token in enumerate(ids) if not isinstance(token, int) or not 0 <= token < 2**32)
        raise RequestError(f"{name}[{i}]: must be a token id, got {ids[i]!r:.40}", param=f"{name}[{i}]") from None
    return ids


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """OpenAI's four forms: text, token ids, a list of either."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [_prompt(prompt, "prompt")]
    if not prompt:
        raise RequestError("prompt: must not be empty", param="prompt")
    if len(prompt) == 1:
        return [_prompt(prompt[0], "prompt")]
    return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(prompt)]


def _prompt(prompt: Any, path: str) -> Prompt:
    if isinstance(prompt, int):
        raise RequestError(f"{path}: must be text or token ids like the others, got {prompt}", param=path)
    if not prompt:
        raise RequestError(f"{path}: must not be empty", param=path)
    return prompt if isinstance(prompt, str) else _token_ids(prompt, path, wire.FRAME_BYTES_MAX // 4)


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    """What a chat template sees of one message: text only, parts joined by line breaks."""
    if message.role not in ROLES:
        got, roles = f"{message.role!r:.40}", ", ".join(ROLES)
        raise RequestError(f"{path}.role: must be one of {roles}, got {got}", param=f"{path}.role")
    if message.annotations:
        param = f"{path}.annotations"
        raise RequestError(f"{param}: not supported", param=param, code="unsupported_value")
    if message.tool_calls and message.role != "assistant":
        param = f"{path}.tool_calls"
        raise RequestError(f"{param}: only an assistant calls tools, not {message.role}", param=param)
    calls = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())]
    content = "" if calls and message.content is None else _content(message.content, f"{path}.content")
    plain = {"role": message.role, "content": content}
    extras = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": calls or None}
    return {**plain, **{key: value for key, value in extras.items() if value is not None}}


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Of an earlier answer. Templates want the arguments as an object, OpenAI's API has them as JSON text."""
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path}: must be a function with a name and arguments", param=path)
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{path}.function.arguments"
        raise RequestError(f"{param}: must be a JSON object, as text", param=param)
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _content(content: str | list[dict[str, Any]] | None, path: str) -> str:
    if content is None:
        raise RequestError(f"{path}: required field is missing", param=path)
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: dict[str, Any], path: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise RequestError(f'{path}.type: only "text" is supported, got {kind!r:.40}', param=f"{path}.type")
    if not isinstance(text, str):
        raise RequestError(f"{path}.text: expected a string", param=f"{path}.text")
    return text


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs: only allowed with logprobs true", param="top_logprobs")
    return None
