"""Tools over HTTP: what a client offers the model, and what the model's answer says of them.

An answer calls tools in one of two forms. Free (`tool_choice` auto): the model's own, where it is that of Hermes and
Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` between text; anything else stays text. Forced
(`required`, or one tool by name): JSON that the answer is made to follow by a schema.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from pdbus.bus import wire
from pdbus.bus.errors import RequestError
from pdbus.bus.wire import Declared
from pdbus.nodes.json_schema import check_form

TOOLS_MAX = 128  # OpenAI's
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # OpenAI's, and the dots that others use
OPEN, CLOSE = "<tool_call>", "</tool_call>"
DEFINITIONS = ("$defs", "definitions")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Tools(Declared):
    """`offered` goes to the template. `named`: the one tool to be called; `required`: one at least of them."""

    offered: tuple[dict[str, Any], ...]
    required: bool = False
    named: str = ""
    parallel: bool = True

    @property
    def schema(self) -> str:
        """That a forced answer follows, as JSON text; '' where the answer is free."""
        if self.named:
            return _text(_parameters(next(t for t in self.offered if _function(t)["name"] == self.named)))
        if not self.required:
            return ""
        calls = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(t) for t in self.offered]}}
        return _text({**calls, **({} if self.parallel else {"maxItems": 1}), **_definitions(self.offered)})


def tools_of(tools: list[Any] | None, choice: Any, parallel: bool | None) -> Tools | None:
    """OpenAI's three fields. None: the model hears of no tools. Raises RequestError naming the field at fault."""
    offered = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if len(offered) > TOOLS_MAX:
        raise RequestError(f"tools: at most {TOOLS_MAX}, got {len(offered)}", param="tools")
    names = [_function(tool)["name"] for tool in offered]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise RequestError(f"tools: two are named {twice}", param="tools")
    named = _named(choice, names)
    required = choice == "required"
    if required and not offered:
        raise RequestError("tool_choice: required, but tools offers none", param="tool_choice")
    if not offered or choice == "none":
        return None
    made = Tools(offered=offered, required=required, named=named, parallel=parallel is not False)
    if schema := made.schema:
        check_form(schema, "tools")
    return made


def _tool(tool: Any, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f'{path}.type: only "function" is supported', param=f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{path}.function: must be an object", param=f"{path}.function")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = f"must be 1 to 64 letters, digits, _ - or ., got {name!r:.80}"
        raise RequestError(f"{path}.function.name: {problem}", param=f"{path}.function.name")
    if parameters is not None and not isinstance(parameters, dict):
        problem = f"{path}.function.parameters: must be a JSON schema, an object"
        raise RequestError(problem, param=f"{path}.function.parameters")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{path}.function.description: expected a string", param=f"{path}.function.description")
    return tool


def _named(choice: Any, names: list[str]) -> str:
    if choice is None or choice in ("none", "auto", "required"):
        return ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        problem = "must be none, auto, required or a function by name"
        raise RequestError(f"tool_choice: {problem}", param="tool_choice")
    if name not in names:
        raise RequestError(f"tool_choice: no tool is named {name!r:.80}", param="tool_choice")
    return name


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return function


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return _function(tool).get("parameters") or ANY_OBJECT


def _definitions(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What parameters refer to as `#/$defs/...` has to stand at the top of the schema that holds them all."""
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        for key in DEFINITIONS:
            own = _parameters(tool).get(key)
            for name, schema in own.items() if isinstance(own, dict) else ():
                if found.setdefault(key, {}).setdefault(name, schema) != schema:
                    param = f"tools[{i}].function.parameters.{key}.{name}"
                    raise RequestError(f"{param}: another tool has another one of that name", param=param)
    return found


def _call(tool: dict[str, Any]) -> dict[str, Any]:
    arguments = {key: value for key, value in _parameters(tool).items() if key not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": _function(tool)["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _text(schema: dict[str, Any]) -> str:
    return wire.to_json(schema).decode()


# ---------------------------------------------------------------- the answer


class Called(NamedTuple):
    """What new text of an answer says: text for people, and calls or pieces of one as OpenAI's deltas have them."""

    text: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class Reader:
    """Of one answer that may call tools. `calls`: how many it has begun."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, text: str) -> Called:
        raise NotImplementedError

    def finish(self) -> Called:
        """What was held back, at the answer's end."""
        return Called()

    def _begin(self, name: str, arguments: str) -> dict[str, Any]:
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        return {
            "index": self.calls - 1,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }


class FreeReader(Reader):
    """Of text with calls in it. What could be the beginning of one is held back, and so is white space before it; a
    call that is cut off or no JSON stays text."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""
        self._after_call = False  # white space is of no interest there

    def add(self, text: str) -> Called:
        self._held += text
        said, calls = list[str](), list[dict[str, Any]]()
        while True:
            if self._after_call:
                self._held = self._held.lstrip()
                self._after_call = not self._held
            before, opened, rest = self._held.partition(OPEN)
            inside, closed, after = rest.partition(CLOSE)
            if not closed:
                break
            called = _called(inside)
            if called:
                calls.append(self._begin(*called))
            said.append(before.rstrip() if called else before + opened + inside + closed)
            self._held, self._after_call = after, bool(called)
        known = before if opened else self._held[: len(self._held) - _overlap(self._held)]
        said.append(known.rstrip())
        self._held = self._held[len(said[-1]) :]
        return Called("".join(said), tuple(calls))

    def finish(self) -> Called:
        said, self._held = self._held, ""
        return Called(said)


class NamedReader(Reader):
    """Of the arguments of one call, as they come."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def add(self, text: str) -> Called:
        if not self.calls:
            return Called(calls=(self._begin(self._name, text),))
        return Called(calls=({"index": 0, "function": {"arguments": text}},) if text else ())


class RequiredReader(Reader):
    """Of a list of calls, known when it is complete. One that was cut off stays text."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""

    def add(self, text: str) -> Called:
        self._held += text
        return Called()

    def finish(self) -> Called:
        try:
            found = [_of_object(one) for one in json.loads(self._held)]
        except (ValueError, TypeError, RecursionError):
            found = [None]
        if None in found:
            return Called(self._held)
        return Called(calls=tuple(self._begin(*one) for one in found if one))


def reader_of(tools: Tools) -> Reader:
    if tools.named:
        return NamedReader(tools.named)
    return RequiredReader() if tools.required else FreeReader()


def _called(inside: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON text, of what stands in a call's tags."""
    try:
        return _of_object(json.loads(inside))
    except (ValueError, RecursionError):
        return None


def _of_object(value: Any) -> tuple[str, str] | None:
    """Raises ValueError for what no JSON can say."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", {})
    said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{said}".encode()  # json.loads takes half of a surrogate pair, which no answer can carry
    return name, said


def _overlap(text: str) -> int:
    """How many of its last characters could begin a call."""
    return next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
