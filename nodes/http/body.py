"""A body of JSON: what `wire.decode_json` takes, but for a key that stands twice in one object. Which of the two values
counts differs from parser to parser, so that whoever looked at the body before us may have seen the other one."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pdbus.bus import wire
from pdbus.bus.errors import RequestError
from pdbus.bus.wire import Declared

T = TypeVar("T", bound=Declared)
Pairs = list[tuple[str, Any]]

KEY_END = re.compile(rb'"\s*:')  # inside text, too


def decode_body(data: bytes, kind: type[T]) -> T:
    """Raises RequestError naming the field at fault."""
    body = wire.decode_json(data, kind)
    check_keys(data)
    return body


def check_keys(data: bytes) -> None:
    """Of valid JSON. Raises RequestError naming the key that stands twice in one object."""
    if not _may_repeat(data):
        return
    try:
        json.loads(data, object_pairs_hook=_once, parse_int=len, parse_float=len)  # numbers are of no interest
    except _Twice:
        path = _path(json.loads(data, object_pairs_hook=_Object, parse_int=len, parse_float=len), "") or "the body"
        raise RequestError(f"{path}: is given twice", param=path) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None


def _may_repeat(data: bytes) -> bool:
    """False: no two keys of the whole body are the same. Cheap: a long prompt is not parsed again."""
    keys = [before[before.rfind(b'"') + 1 :] for before in KEY_END.split(data)[:-1]]
    return len(set(keys)) < len(keys) or any(b"\\" in key for key in keys)  # an escape writes the same otherwise


class _Twice(Exception):
    pass


class _Object(list[tuple[str, Any]]):
    """As it was written: its pairs."""


def _once(pairs: Pairs) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _Twice


def _path(value: Any, path: str) -> str:
    """Where the first key stands that its object had before; '' for none."""
    if not isinstance(value, list):
        return ""
    seen = set[str]()
    for i, item in enumerate(value):
        if isinstance(value, _Object):
            at = f"{path}.{item[0]}" if path else item[0]
            if item[0] in seen:
                return at
            seen.add(item[0])
            found = _path(item[1], at)
        else:
            found = _path(item, f"{path}[{i}]")
        if found:
            return found
    return ""
