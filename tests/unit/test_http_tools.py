"""Tools over HTTP: what an answer says of them, in one piece and in a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.generation import Conversation
from pdbus.bus.messages import Finished, Timeline, Token
from pdbus.nodes.http.answer import Chat
from pdbus.nodes.http.schema import Asked, parse_chat
from pdbus.nodes.http.tools import FreeReader

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now, somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MESSAGES = [{"role": "user", "content": "how is the weather?"}]


def asked(**fields: Any) -> Asked:
    return parse_chat(json.dumps({"messages": MESSAGES, "tools": [WEATHER, CLOCK], **fields}).encode())


def whole(text: str, reason: str = "stop", **fields: Any) -> dict[str, Any]:
    token = Token(client_id="", request=b"r", index=0, tokens=b"", text=text)
    return Chat(asked(**fields), "m", 0).choice([token], finished(reason))


def finished(reason: str) -> Finished:
    return Finished(client_id="", request=b"r", reason=reason, timeline=Timeline())


def streamed(pieces: Sequence[str], reason: str = "stop", **fields: Any) -> dict[str, Any]:
    """The chunks put together as OpenAI's client does it."""
    answer = Chat(asked(**fields), "m", 0)
    tokens = [Token(client_id="", request=b"r", index=i, tokens=b"", text=text) for i, text in enumerate(pieces)]
    chunks = [answer.chunk(b"r", token) for token in tokens] + [answer.closing(b"r", finished(reason))]
    content, calls = "", dict[int, dict[str, Any]]()
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"name": piece["function"].get("name"), "arguments": ""})
            call["arguments"] += piece["function"].get("arguments", "")
    return {"content": content, "calls": list(calls.values()), "reason": chunks[-1]["choices"][0]["finish_reason"]}


def calls_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in choice["message"].get("tool_calls", ())
    ]


# ---------------------------------------------------------------- free


def test_a_call_is_read_and_its_arguments_are_json_text() -> None:
    choice = whole(CALL)
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function" and call["id"].startswith("call_") and "index" not in call
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


def test_text_before_calls_stays_and_white_space_around_them_goes() -> None:
    choice = whole(f"Let me look.\n{CALL}\n{CALL}\n")
    assert choice["message"]["content"] == "Let me look."
    assert [call["name"] for call in calls_of(choice)] == ["weather", "weather"]


@pytest.mark.parametrize(
    "text",
    ["", "  ", "plain", "a < b", "<tool_cal", CALL[:-3], "<tool_call>no json</tool_call>", "<tool_call>[1]</tool_call>",
     '<tool_call>{"name": 1}</tool_call>', "</tool_call>", "[" * 5000,
     '<tool_call>{"name": "a\\ud800"}</tool_call>', '<tool_call>{"name": "a", "arguments": "\\ud800"}</tool_call>',
     '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
     '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>'],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    choice = whole(text)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert streamed(list(text)) == {"content": text, "calls": [], "reason": "stop"}


def test_an_answer_cut_off_after_a_call_says_so() -> None:
    assert whole(CALL, reason="length")["finish_reason"] == "length"


PARTS = st.lists(st.sampled_from([CALL, "text", "\n", " ", "<", "<tool_call>", "</tool_call>", "{}", '"', "ä"]))


@given(PARTS, st.data())
def test_however_it_is_cut_a_stream_says_what_the_whole_says(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    choice = whole(text)
    said = streamed(pieces)
    assert said["content"] == (choice["message"]["content"] or "")
    assert said["calls"] == calls_of(choice)
    assert said["reason"] == choice["finish_reason"]


def test_text_is_not_held_back_longer_than_it_could_begin_a_call() -> None:
    reader = FreeReader()
    assert reader.add("a <to").text == "a"
    assert reader.add("ol").text == ""
    assert reader.add("s>").text == " <tools>"


# ---------------------------------------------------------------- forced


def forced(**fields: Any) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(asked(**fields).sampling.json_schema)
    return schema


NAMED = {"type": "function", "function": {"name": "weather"}}


def test_a_tool_by_name_is_its_parameters_and_arguments_come_as_they_are_made() -> None:
    assert forced(tool_choice=NAMED) == WEATHER["function"]["parameters"]  # type: ignore[index]
    arguments = '{"city": "Köln"}'
    assert calls_of(whole(arguments, tool_choice=NAMED)) == [{"name": "weather", "arguments": arguments}]
    said = streamed(list(arguments), tool_choice=NAMED)
    assert said == {"content": "", "calls": [{"name": "weather", "arguments": arguments}], "reason": "tool_calls"}


def test_required_is_one_of_the_tools_at_least() -> None:
    schema = forced(tool_choice="required")
    assert schema["minItems"] == 1 and "maxItems" not in schema
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["weather", "clock"]
    assert forced(tool_choice="required", parallel_tool_calls=False)["maxItems"] == 1
    text = '[{"name": "weather", "arguments": {"city": "x"}}, {"name": "clock", "arguments": {}}]'
    calls = [{"name": "weather", "arguments": '{"city": "x"}'}, {"name": "clock", "arguments": "{}"}]
    assert calls_of(whole(text, tool_choice="required")) == calls
    assert streamed(list(text), tool_choice="required")["calls"] == calls


def test_required_that_was_cut_off_stays_text() -> None:
    choice = whole('[{"name": "wea', reason="length", tool_choice="required")
    assert choice["message"]["content"] == '[{"name": "wea' and choice["finish_reason"] == "length"


def test_definitions_stand_where_references_look_for_them() -> None:
    """As pydantic writes parameters."""
    city = {"type": "object", "properties": {"name": {"type": "string"}}}
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/City"}}, "$defs": {"City": city}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    schema = forced(tools=[tool], tool_choice="required")
    assert schema["$defs"] == {"City": city}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["arguments"]


# ---------------------------------------------------------------- what the model is told


def test_tools_go_to_the_template_unless_none_may_be_called() -> None:
    (prompt,) = asked().prompts
    assert prompt == Conversation(MESSAGES, (WEATHER, CLOCK))
    assert asked(tool_choice="none").prompts == [MESSAGES]
    assert asked(tool_choice="none").tools is None


def test_an_earlier_call_comes_back_with_its_arguments_as_an_object() -> None:
    """Templates write them as JSON themselves; a text would be written in quotes."""
    function = {"name": "weather", "arguments": '{"city": "x"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    prompt: Any = asked(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}, answer]).prompts[0]
    assert prompt.messages[1] == {
        "role": "assistant", "content": "",
        "tool_calls": [{**call, "function": {"name": "weather", "arguments": {"city": "x"}}}],
    }  # fmt: skip
    assert prompt.messages[2] == answer
