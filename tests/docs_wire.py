"""The wire as protocol.md must show it: fields of every declared type, with type and default."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

from pdbus.bus import messages
from pdbus.bus.messages import MESSAGES
from pdbus.bus.wire import Declared, Header

PARTS: dict[str, type[Declared]] = {
    name: part
    for name, part in vars(messages).items()
    if isinstance(part, type) and issubclass(part, Declared) and part.__module__ == messages.__name__
    and not issubclass(part, messages.Message)
}  # fmt: skip
DOCUMENTED: dict[str, type[Declared]] = {"Header": Header, **PARTS, **MESSAGES}

_SCALARS = {int: "int", str: "str", bytes: "bin", bool: "bool", float: "float"}


def rows(declared: type[Declared]) -> list[tuple[str, str, str]]:
    """(key, type, default) of each field, in order."""
    hints = typing.get_type_hints(declared)
    return [(f.encode_name, shown(hints[f.name]), _default(f)) for f in msgspec.structs.fields(declared)]


def shown(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(shown(a) if a is not type(None) else "nil" for a in arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {shown(arguments[0])}"
    if origin is tuple:
        return f"({', '.join(map(shown, arguments))})"
    if origin is dict:
        return "map"
    if isinstance(hint, type) and issubclass(hint, Declared):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return _SCALARS[hint]


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if value is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "needed"
    if isinstance(value, Declared):
        return "defaults"
    return "nil" if value is None else f"`{value}`".lower() if value or value in (0, False) else "empty"
