"""Makes tests/wire/golden.json: the bytes of one example of each message, as this version writes them.

Run it (`python -m tests.wire.golden`) only to add a message; bytes that are there must never change within a major.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from pdbus.bus.frames import pack
from pdbus.bus.messages import MESSAGES, Message
from pdbus.bus.wire import Declared, Header

FILE = Path(__file__).with_name("golden.json")
HEADER = Header(from_="p1", from_inc=bytes(range(16)), to="d1", to_inc=bytes(range(16, 32)), seq=7, cause=3)


def example(message_class: type[Message]) -> Message:
    """An instance with every field set to something that is not its default."""
    made = _declared(message_class)
    assert isinstance(made, Message)
    return made


def frames_hex(message_class: type[Message]) -> list[str]:
    return [frame.hex() for frame in pack(HEADER, example(message_class), [b"raw"])]


def _declared(declared: type[Declared]) -> Declared:
    hints = typing.get_type_hints(declared)
    return declared(**{f.name: _value(hints[f.name], f.name) for f in msgspec.structs.fields(declared)})


def _value(hint: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _value(next(a for a in args if a is not type(None)), name)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return (_value(args[0], name), _value(args[0], name))
    if origin is tuple:
        return tuple(_value(a, name) for a in args)
    if origin is dict or hint is Any:
        return {"key": [1, "two", None]}
    if isinstance(hint, type) and issubclass(hint, Declared):
        return _declared(hint)
    return {int: len(name) * 1000, str: f"<{name}>", bytes: name.encode(), float: 0.5, bool: True}[hint]


def main() -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    new = {kind: frames_hex(message) for kind, message in MESSAGES.items() if kind not in known}
    FILE.write_text(json.dumps({**known, **new}, indent=1) + "\n")


if __name__ == "__main__":
    main()
