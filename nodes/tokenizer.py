"""Text to token ids and back. Knows no request and no stop string; a tokenizer may be used from several threads.

Two kinds: HFTokenizer for a Hugging Face folder, ByteTokenizer for the coded engine. Only HFTokenizer needs the
packages tokenizers and jinja2, and imports them when it is made.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pdbus.bus.errors import ConfigError, RequestError
from pdbus.bus.wire import to_json

from .limits import ROLES, too_long
from .pieces import Pieces
from .token_bytes import UNKNOWN, TokenBytes, token_bytes

if TYPE_CHECKING:
    from .chat_template import Template

ONE_BYTE = TokenBytes(1)
FILES = (  # of a Hugging Face folder, all that HFTokenizer reads
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "config.json",
)  # fmt: skip
REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8, or not yet, decode to
HELD_IDS_MAX = 16  # a character has at most four bytes: a longer unfinished run is no UTF-8, and is not held for ever
Message = Mapping[str, Any]


class Detokenizer(Protocol):
    """Token ids in, text out as soon as it cannot change any more.

    Never ends in the middle of a character. The pieces of one answer, with `finish`, join to `decode` of all its ids.
    """

    def add(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """What was held back. Nothing may be added afterwards."""
        ...


class Tokenizer(Protocol):
    eos_ids: tuple[int, ...]
    spells_text: bool  # what tokens spell is known exactly, and an engine samples them by it
    vocab_size: int

    def encode(self, text: str, tokens_max: int | None = None, *, special: bool = True) -> list[int]:
        """Ids of a bare prompt, with the special tokens that the model expects around it unless not `special`. Raises
        RequestError; also, before any work, for text that has certainly more than `tokens_max`."""
        ...

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tokens_max: int | None = None,
        tools: Sequence[Message] | None = None,
    ) -> list[int]:
        """Ids of a conversation by the model's template. Raises RequestError (param `messages`), like `encode`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The whole text, special tokens left out."""
        ...

    def decoder(self) -> Detokenizer:
        """A new detokenizer, for one answer."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for by itself; special tokens stand for their names."""
        ...


def load_tokenizer(engine: str, model: str, coded_vocab: int = 256) -> Tokenizer:
    """The tokenizer that goes with an engine. Raises ConfigError naming `--model`."""
    return ByteTokenizer(coded_vocab) if engine == "coded" else HFTokenizer(Path(model))


# ---------------------------------------------------------------- conversations


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates want them: content parts of type text joined. Raises RequestError naming the place."""
    if not messages:
        raise RequestError("messages is empty; at least one is needed", param="messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {role!r}; one of {', '.join(ROLES)}", param="messages")
    return {**message, "content": _content(message, where)}


def _content(message: Message, where: str) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param="messages")
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(f"{where} must be {{type: text, text: ...}}; only text is understood", param="messages")
    return text


def _fitting(text: str, param: str, each: TokenBytes, tokens_max: int | None) -> bytes:
    """As UTF-8. Raises RequestError for half of a surrogate pair, which JSON can carry and no tokenizer takes, and for
    text that has certainly more than `tokens_max` tokens."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError as e:
        raise RequestError(f"character {e.start} is half of a surrogate pair, no valid text", param=param) from None
    if tokens_max is not None and (tokens := each.tokens_min(encoded)) > tokens_max:
        raise too_long(tokens, tokens_max, param, "" if each == ONE_BYTE else "at least ")
    return encoded


# ---------------------------------------------------------------- bytes


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, id 0 is the end of sequence; a larger vocabulary repeats them.

    A conversation is one line `role> content` a message, and a last line `>` that asks for the answer.
    """

    eos_ids: tuple[int, ...] = (0,)
    spells_text = False

    def __init__(self, vocab_size: int = 256) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, tokens_max: int | None = None, *, special: bool = True) -> list[int]:
        return list(_fitting(text, "prompt", ONE_BYTE, tokens_max))

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tokens_max: int | None = None,
        tools: Sequence[Message] | None = None,
    ) -> list[int]:
        lines = [f"{m['role']}> {m['content']}{_as_json(m.get('tool_calls'))}\n" for m in checked_messages(messages)]
        told = f"tools> {_as_json(tools)}\n" if tools else ""
        text = told + "".join(lines) + (">" if add_generation_prompt else "")
        return list(_fitting(text, "messages", ONE_BYTE, tokens_max))

    def decode(self, ids: Sequence[int]) -> str:
        return _bytes_of(ids).decode(errors="replace")

    def decoder(self) -> Detokenizer:
        return _ByteDetokenizer()

    def piece(self, token: int) -> bytes:
        return bytes((token & 255,))


def _as_json(value: Any) -> str:
    return to_json(value).decode() if value else ""


def _bytes_of(ids: Sequence[int]) -> bytes:
    return bytes(i & 255 for i in ids if i not in ByteTokenizer.eos_ids)


class _ByteDetokenizer:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(_bytes_of(ids))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


# ---------------------------------------------------------------- Hugging Face


class HFTokenizer:
    """tokenizer.json of a Hugging Face folder, its chat template and its ends of sequence."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder)
        self._tokenizer = _load_tokenizer_json(folder / "tokenizer.json")
        settings = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_ids = _eos_ids(folder, settings, self._tokenizer.token_to_id)
        special = {k: _content_of(v) for k, v in settings.items() if k.endswith("_token") and _content_of(v)}
        self._variables = {**special, "documents": None}  # templates ask `is not none`
        self.spells_text = self._tokenizer.decoder is not None
        self._render = _template(folder, settings)
        self._pieces = Pieces(self._tokenizer)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return token_bytes(self._tokenizer)

    def encode(self, text: str, tokens_max: int | None = None, *, special: bool = True) -> list[int]:
        return self._ids(text, "prompt", tokens_max, special=special)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tokens_max: int | None = None,
        tools: Sequence[Message] | None = None,
    ) -> list[int]:
        checked = checked_messages(messages)
        if self._render is None:
            raise RequestError("this model has no chat template; send a prompt instead", param="messages")
        if tools and not self._render.takes_tools:
            problem = "tools: this model's chat template has no place for tools"
            raise RequestError(problem, param="tools", code="unsupported_value")
        given = {**self._variables, "tools": list(tools) if tools else None}
        try:
            text = self._render.render(messages=checked, add_generation_prompt=add_generation_prompt, **given)
        except Exception as e:  # whatever the model's template, a program of its own, may raise
            raise RequestError(f"the model's chat template refuses this conversation: {e}", param="messages") from None
        return self._ids(
            text, "messages", tokens_max, special=False
        )  # the template has written the special tokens itself

    def _ids(self, text: str, param: str, tokens_max: int | None, *, special: bool) -> list[int]:
        long = tokens_max is not None and len(text) > tokens_max
        _fitting(text, param, self._token_bytes if long else UNKNOWN, tokens_max)
        try:
            # A batch's calls let go of Python's lock while they work; `encode` would stop the node for seconds.
            [encoded] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except Exception as e:  # the package raises bare Exception, for text that has no token
            raise RequestError(f"{param}: the model's tokenizer does not take it: {e}", param=param) from None
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def decoder(self) -> Detokenizer:
        return WindowDetokenizer(self.decode)

    def piece(self, token: int) -> bytes:
        return self._pieces.of(token)


class WindowDetokenizer:
    """Decodes a window of the last few ids twice, without and with the new ones: the difference is the new text.

    The older half of the window is context, since some decoders treat the first id of a text otherwise.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # said already
        self._context_text = ""
        self._held: list[int] = []  # not said yet

    def add(self, ids: Sequence[int]) -> str:
        self._held.extend(ids)
        text = self._decode(self._context + self._held)
        if not text.endswith(REPLACEMENT):
            return self._say(text, len(self._held))
        return self._settled(text) if len(self._held) > HELD_IDS_MAX else ""

    def finish(self) -> str:
        return self._decode(self._context + self._held)[len(self._context_text) :]

    def _settled(self, text: str) -> str:
        """Say all but the last held id, if what that one adds does not reach back over the border between them."""
        before, last = self._decode(self._context + self._held[:-1]), self._decode(self._held[-1:])
        return self._say(before, len(self._held) - 1) if last and before + last == text else ""

    def _say(self, text: str, count: int) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._context, self._held = self._held[:count], self._held[count:]
            self._context_text = self._decode(self._context)
        return new


def _load_tokenizer_json(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError("--model", "needs the package tokenizers: pip install 'pdbus[http]'") from None
    if not path.is_file():
        raise ConfigError("--model", f"{path.parent} has no {path.name}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the package raises bare Exception
        raise ConfigError("--model", f"{path} is no tokenizer: {e}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError("--model", f"{path}: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError("--model", f"{path} must hold a JSON object")
    return value


def _content_of(token: Any) -> str:
    """A special token as the settings write it: a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _eos_ids(folder: Path, settings: dict[str, Any], id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    """The tokenizer's end of sequence, and those of generation_config.json, else of config.json."""
    named = id_of(_content_of(settings.get("eos_token")))
    found = [] if named is None else [named]
    for name in ("generation_config.json", "config.json"):
        listed = _read_json(folder / name).get("eos_token_id")
        if listed is not None:
            found += listed if isinstance(listed, list) else [listed]
            break
    return tuple(sorted({i for i in found if isinstance(i, int)}))


def _template(folder: Path, settings: dict[str, Any]) -> Template | None:
    """The chat template; None when the model has none. Raises ConfigError."""
    path = folder / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("--model", f"{path} cannot be read: {e}") from None
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        if "default" not in named:
            raise ConfigError(
                "--model", f"of its chat templates, no template is named default: {', '.join(map(str, named))}"
            )
        source = named["default"]
    if not source:
        return None
    if not isinstance(source, str):
        raise ConfigError("--model", f"its chat_template must be text, not {type(source).__name__}")
    try:
        from .chat_template import compile_template
    except ImportError:
        raise ConfigError("--model", "chat templates need the package jinja2: pip install 'pdbus[http]'") from None
    return compile_template(source)
