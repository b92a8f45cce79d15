"""Bytes in, declared types out. The only module that knows msgspec and msgpack.

A message begins with `pd1.<kind>`, so that a peer of another major is refused without decoding anything. Its header
and body are msgpack maps with string keys: unknown keys are ignored, missing ones take their defaults, wrong types are
refused by the field's name.
"""

from __future__ import annotations

import array
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar, Union, dataclass_transform

import msgpack
import msgspec

from .errors import RemoteProtocolError, RequestError

PREFIX = b"pd1."  # with the major version
FRAME_BYTES_MAX = 16 << 20  # largest control message; ZeroMQ itself drops a peer that exceeds it (MAXMSGSIZE)
FRAMES_MAX = 16

# What a node keeps of others and passes on, in its status for one: together it must fit a message.
Word = Annotated[str, msgspec.Meta(max_length=1024)]  # names, addresses
Id = Annotated[bytes, msgspec.Meta(max_length=64)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Names = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=1024)]

T = TypeVar("T", bound="Declared")
Raw = msgspec.Raw  # the type of a field that decoding leaves encoded: `bytes(raw)`


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every declared type: messages, ipc messages, events and effects of the machines."""


class Header(Declared, rename={"from_": "from"}):
    """Who says it to whom. `seq` counts per sender incarnation and connection; `cause` is the `seq` (as the
    sender of that message wrote it) of the message that led to this one, 0 when none did."""

    from_: str
    from_inc: bytes
    to: str = ""
    to_inc: bytes = b""
    seq: int = 0
    cause: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}
_many: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def encode(value: Declared) -> bytes:
    """One declared value as msgpack."""
    return _encoder.encode(value)


def encode_all(values: Iterable[Declared]) -> bytes:
    """Each as `encode` does, one after the other."""
    return b"".join(map(_encoder.encode, values))


def decode(data: bytes | memoryview, kind: type[T], *, name: str = "") -> T:
    """Decode one declared value. Raises RemoteProtocolError naming `name` and the field at fault."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoded(decoder, data, name)  # type: ignore[no-any-return]


def decoder(kind: type[T]) -> Callable[[bytes | memoryview], T]:
    """`decode` for one type over and over: what it returns raises RemoteProtocolError naming the field at fault.

    `kind` may also be a parametrized generic one (`MessageCame[Goodbye]`).
    """
    name, made = getattr(kind, "__name__", ""), msgspec.msgpack.Decoder(kind)

    def decode_one(data: bytes | memoryview) -> T:
        return _decoded(made, data, name)  # type: ignore[no-any-return]

    return decode_one


def decode_many(data: bytes | memoryview, kind: type[T]) -> tuple[T, ...]:
    """Decode an array of one declared type. Raises RemoteProtocolError as `decode` does."""
    many = _many.get(kind)
    if many is None:
        many = _many[kind] = msgspec.msgpack.Decoder(tuple[kind, ...])  # type: ignore[valid-type]
    return _decoded(many, data, "")  # type: ignore[no-any-return]


def array_of(encoded: Sequence[bytes]) -> bytes:
    """Values that are encoded already as one array: what `decode_many` reads."""
    return b"".join((b"\xdd", len(encoded).to_bytes(4, "big"), *encoded))


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview, name: str) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        raise RemoteProtocolError(str(e), kind=name, field=_path(str(e))) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise RemoteProtocolError(f"not msgpack: {e}", kind=name) from None


def _path(problem: str) -> str:
    """Where msgspec says that it is: "... - at `$.stop[0]`", of a map's key "... - at `key` in `$.data`"."""
    found = re.search(r"`\$\.?([^`]*)`$", problem)
    return found[1] if found else ""


def decode_union(data: bytes | memoryview, base: type[T], *, name: str = "") -> T:
    """Decode one of the tagged subclasses of `base`. Raises RemoteProtocolError as `decode` does."""
    decoder = _decoders.get(base)
    if decoder is None:
        decoder = _decoders[base] = msgspec.msgpack.Decoder(Union[tuple(base.__subclasses__())])  # noqa: UP007
    return _decoded(decoder, data, name)  # type: ignore[no-any-return]


def to_plain(value: Any) -> Any:
    """A declared value as plain dicts, lists and scalars, for tools and JSON."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def to_json(value: Any) -> bytes:
    """JSON of plain or declared values; bytes become hex."""
    return msgspec.json.encode(value, enc_hook=repr)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """The inverse of to_json for one declared type. Raises RemoteProtocolError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as e:
        raise RemoteProtocolError(str(e)) from None


_JSON_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null",
}  # fmt: skip


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode what a user wrote as JSON. Raises RequestError whose message and `param` name the field at fault."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as e:
        raise _field_error(str(e)) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if found := _lax(data):
            path, problem = found
            raise RequestError(f"{path}: {problem}", param=path) from None
        problem = str(e).removeprefix("JSON is malformed: ")
        raise RequestError(f"the body must be one JSON object in UTF-8: {problem}", code="invalid_json") from None


def plain_json(data: bytes) -> dict[str, Any]:
    """An object that a user wrote as JSON, of any content. Raises RequestError as `decode_json` does."""
    found: dict[str, Any] = decode_json(data, dict[str, Any])  # type: ignore[type-var]
    return found


def _lax(data: bytes) -> tuple[str, str] | None:
    """Where something stands that only a laxer parser takes, and what; None when that is not the problem."""
    try:
        return _find_lax(json.loads(data), "")
    except (ValueError, RecursionError):
        return None


def _find_lax(value: Any, path: str) -> tuple[str, str] | None:
    if isinstance(value, float) and not math.isfinite(value):
        return path or "the body", "NaN and infinity are no JSON numbers"
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
        return path or "the body", "half of a surrogate pair is no text"
    parts: Iterable[tuple[Any, str]] = ()
    if isinstance(value, dict):
        parts = ((item, f"{path}.{key}" if path else key) for key, item in value.items())
    elif isinstance(value, list):
        parts = ((item, f"{path}[{i}]") for i, item in enumerate(value))
    return next((found for item, at in parts if (found := _find_lax(item, at))), None)


def _field_error(text: str) -> RequestError:
    problem, _, path = text.partition(" - at `")
    path = path.removesuffix("`").removeprefix("$").removeprefix(".")
    if named := re.match("Object (contains|missing).* `(.*)`", problem):
        path = f"{path}.{named[2]}" if path else named[2]
        problem = "unknown field" if named[1] == "contains" else "required field is missing"
    problem = re.sub("`([^`]*)`", lambda m: _json_words(m[1]), problem)
    return RequestError(f"{path or 'the body'}: {problem[0].lower()}{problem[1:]}", param=path or None)


def _json_words(types: str) -> str:
    names = types.removesuffix(" | null").split(" | ")
    return " or ".join(_JSON_WORDS.get(name, name) for name in names)


def replace(value: T, **changes: Any) -> T:
    """A copy of a frozen declared value with some fields changed."""
    return msgspec.structs.replace(value, **changes)


def unpack_foreign(data: bytes, bytes_max: int = FRAME_BYTES_MAX) -> Any:
    """msgpack that has no declared type here. Raises RemoteProtocolError."""
    if len(data) > bytes_max:
        raise RemoteProtocolError(f"{len(data)} bytes of msgpack, at most {bytes_max}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)  # no length inside can pass the buffer's
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as e:
        raise RemoteProtocolError(f"not msgpack: {e}") from None


def pack_foreign(value: Any) -> bytes:
    """Plain values as msgpack."""
    return msgpack.packb(value, use_bin_type=True)  # type: ignore[no-any-return]


def pack_u32(values: Iterable[int]) -> bytes:
    """Block ids or token ids as little-endian u32."""
    packed = array.array("I", values)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes | memoryview) -> Sequence[int]:
    """The inverse of pack_u32. Raises RemoteProtocolError when the length is no multiple of four."""
    if len(data) % 4:
        raise RemoteProtocolError(f"{len(data)} bytes is no list of u32")
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed
