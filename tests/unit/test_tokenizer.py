"""Tokenizers: streamed pieces join to the whole text, none ends inside a character, templates are boxed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from pdbus.bus.errors import ConfigError, RequestError
from pdbus.nodes import tokenizer as tokenizer_module
from pdbus.nodes.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer

from tests.tokenizers_made import byte_fallback, byte_level

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_folder(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**defaults, **config}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture(scope="module")
def hf(folder: Path) -> HFTokenizer:
    return HFTokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer(write_folder(tmp_path_factory.mktemp("sp"), byte_fallback()))


def pieces(tokenizer: tokenizer_module.Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.add([i]) for i in ids), decoder.finish()]


# ---------------------------------------------------------------- detokenizing


@given(st.text())
def test_bytes_stream_to_the_whole_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    said = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(said) == text.replace("\0", "")
    assert said[-1] == ""


@given(st.lists(st.integers(0, 999)))
def test_any_bytes_stream_to_what_they_decode_to(ids: list[int]) -> None:
    tokenizer = ByteTokenizer(1000)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)) | st.sampled_from("👩‍👧🎉üß北 \n")))
def test_a_text_streams_whole_and_in_whole_characters(hf: HFTokenizer, text: str) -> None:
    """A character cut in two reaches the client as two replacement characters, and no later piece can mend it."""
    assume("<s>" not in text and "</s>" not in text)  # special tokens are not said
    said = pieces(hf, hf.encode(text))
    assert "".join(said) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in said)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 339), max_size=60) | st.lists(st.integers(100, 260), min_size=20, max_size=80))
def test_any_ids_stream_to_what_they_decode_to(hf: HFTokenizer, ids: list[int]) -> None:
    """Models also say what is no UTF-8, special tokens in the middle, and ids that no token has."""
    assert "".join(pieces(hf, ids)) == hf.decode(ids)


@given(st.lists(st.sampled_from(["the", "quick", "▁", "fox", "北京", "🎉", "ü"]), max_size=12))
def test_spaces_and_single_bytes_in_the_manner_of_sentencepiece(
    sentencepiece_like: HFTokenizer, words: list[str]
) -> None:
    ids = sentencepiece_like.encode(" ".join(words))
    said = pieces(sentencepiece_like, ids)
    assert "".join(said) == sentencepiece_like.decode(ids)
    assert not any("\ufffd" in piece for piece in said)


def test_a_character_of_four_single_bytes_is_said_once(sentencepiece_like: HFTokenizer) -> None:
    ids = sentencepiece_like.encode("🎉")
    assert [piece for piece in pieces(sentencepiece_like, ids[-4:]) if piece] == ["🎉"]


def test_a_space_after_a_special_token_is_kept(sentencepiece_like: HFTokenizer) -> None:
    """Such decoders strip a text's first space: the window must not begin at what only looks like a beginning."""
    ids = [*sentencepiece_like.encode("the fox"), 2, *sentencepiece_like.encode("the dog")]
    assert "".join(pieces(sentencepiece_like, ids)) == sentencepiece_like.decode(ids) == "the fox the dog"


def test_text_comes_as_soon_as_it_is_whole(hf: HFTokenizer) -> None:
    ids = hf.encode("fox 🎉!")
    said = pieces(hf, ids)
    assert said[1:3] != ["", ""] and said[-1] == ""


def test_a_long_run_of_broken_bytes_is_not_held_for_ever(hf: HFTokenizer) -> None:
    """Or each further token would decode the whole run again."""
    broken = hf._tokenizer.token_to_id("ĺ")  # a continuation byte alone
    decoder = hf.decoder()
    for _ in range(200):
        decoder.add([broken])
    assert len(decoder._held) < 20  # type: ignore[attr-defined]


# ---------------------------------------------------------------- encoding


def test_a_prompt_gets_the_special_tokens_of_the_post_processor_and_no_truncation(hf: HFTokenizer) -> None:
    ids = hf.encode("the quick brown fox jumps over the lazy dog")
    assert ids[0] == 0 and len(ids) > 4
    assert hf.decode(ids) == "the quick brown fox jumps over the lazy dog"


def test_a_conversation_gets_its_special_tokens_once(hf: HFTokenizer) -> None:
    ids = hf.chat([{"role": "user", "content": "hi"}])
    assert ids.count(0) == 1 and ids[0] == 0 and ids.count(1) == 1
    assert hf.decode(ids) == "<|user|>hi\n<|assistant|>"
    assert hf.decode(hf.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)) == "<|user|>hi\n"


def test_text_parts_are_joined_by_line_breaks_as_over_http(hf: HFTokenizer) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert hf.chat([{"role": "user", "content": parts}]) == hf.chat([{"role": "user", "content": "h\ni"}])


def test_the_byte_conversation() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert bytes(ByteTokenizer().chat(messages)) == b"system> be brief\nuser> hi\n>"


@pytest.mark.parametrize("tokenizer", ["hf", "bytes"])
@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty; at least one is needed"),
        (["hi"], r"messages\[0\] must be an object with role and content"),
        ([{"content": "hi"}], r"messages\[0\].role is None; one of system, developer, user, assistant, tool"),
        ([{"role": "bishop", "content": "hi"}], r"messages\[0\].role is 'bishop'; one of system"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\].content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] must be .* only text"),
        ([{"role": "user", "content": "\ud800"}], "character .* is half of a surrogate pair"),
    ],
)
def test_a_bad_conversation_is_refused_by_its_place(
    hf: HFTokenizer, tokenizer: str, messages: list[Any], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem) as e:
        (hf if tokenizer == "hf" else ByteTokenizer()).chat(messages)
    assert e.value.param == "messages"


def test_half_a_surrogate_pair_is_no_prompt(hf: HFTokenizer) -> None:
    for tokenizer in (hf, ByteTokenizer()):
        with pytest.raises(RequestError, match="character 1 is half of a surrogate pair") as e:
            tokenizer.encode("a\udc00")
        assert e.value.param == "prompt"


# ---------------------------------------------------------------- templates


def chat_with(tmp_path: Path, template: Any, **message: object) -> str:
    tokenizer = HFTokenizer(write_folder(tmp_path, byte_level(), chat_template=template))
    return tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi", **message}]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('only odd conversations') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_refuses_the_request(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses this conversation") as e:
        chat_with(tmp_path, template)
    assert e.value.param == "messages"


def test_what_templates_are_used_to_finding(tmp_path: Path) -> None:
    assert chat_with(tmp_path, "{{ messages[0].extra | tojson }}", extra={"a": "<é>"}) == '{"a": "<é>"}'
    assert chat_with(tmp_path, "{{ strftime_now('%Y') | length }}") == "4"
    assert (
        chat_with(tmp_path, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    )
    assert chat_with(tmp_path, "{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"
    assert chat_with(tmp_path, "{% if tools is not none %}tools{% else %}none{% endif %}") == "none"
    assert chat_with(tmp_path, "a\n  {% if true %}\nb\n  {% endif %}\n") == "a\nb\n"


def test_a_template_is_given_tools_and_earlier_calls(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    tokenizer = HFTokenizer(write_folder(tmp_path, byte_level(), chat_template=template))
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
    assert tokenizer.decode(tokenizer.chat(messages, tools=tools)) == 'f g hi {"a": 1}'
    assert tokenizer.decode(tokenizer.chat(messages)) == 'hi {"a": 1}'


def test_a_template_with_no_place_for_tools_says_so(tmp_path: Path) -> None:
    """Else the model would never hear of them."""
    tokenizer = HFTokenizer(write_folder(tmp_path, byte_level(), chat_template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="no place for tools") as e:
        tokenizer.chat([{"role": "user", "content": "hi"}], tools=[{"type": "function"}])
    assert (e.value.param, e.value.code) == ("tools", "unsupported_value")


def test_bytes_have_a_line_for_tools() -> None:
    ids = ByteTokenizer().chat([{"role": "user", "content": "hi"}], tools=[{"name": "f"}])
    assert bytes(ids) == b'tools> [{"name":"f"}]\nuser> hi\n>'


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert chat_with(tmp_path / "named", [{"name": "x", "template": "x"}, {"name": "default", "template": "d"}]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat_with(tmp_path, "settings") == "file"


def test_a_model_without_a_template_takes_prompts_only(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template; send a prompt instead") as e:
        chat_with(tmp_path, None)
    assert e.value.param == "messages"


# ---------------------------------------------------------------- loading


def test_ends_of_sequence_are_those_of_tokenizer_and_generation(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    assert HFTokenizer(folder).eos_ids == (1,)
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert HFTokenizer(folder).eos_ids == (1, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert HFTokenizer(folder).eos_ids == (1, 7, 9)


def test_added_tokens_count_as_vocabulary(tmp_path: Path) -> None:
    bpe = byte_level()
    size = bpe.get_vocab_size()
    bpe.add_tokens([AddedToken("<think>")])
    assert HFTokenizer(write_folder(tmp_path, bpe)).vocab_size == size + 1


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "is no tokenizer: "),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "{", "Expecting property name"),
        ("chat_template.jinja", "{% for %}", "its chat template is broken at line 1"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
        ("tokenizer_config.json", '{"chat_template": 5}', "its chat_template must be text, not int"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "no template is named default"),
    ],
)
def test_a_broken_folder_is_a_broken_setting(
    tmp_path: Path, name: str, content: str | bytes | None, problem: str
) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=problem) as e:
        HFTokenizer(folder)
    assert e.value.setting == "--model"


def test_text_that_has_no_token_is_the_request_s_fault(tmp_path: Path) -> None:
    """The package raises a bare exception; unhandled it would end the node."""
    words = Tokenizer(models.WordPiece({"a": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = HFTokenizer(write_folder(tmp_path, words))
    with pytest.raises(RequestError, match="tokenizer does not take it") as e:
        tokenizer.encode("zzz")
    assert e.value.param == "prompt"


def test_the_engine_decides_which_tokenizer(folder: Path) -> None:
    assert isinstance(load_tokenizer("torch", str(folder)), HFTokenizer)
    coded = load_tokenizer("coded", "", 512)
    assert isinstance(coded, ByteTokenizer) and coded.vocab_size == 512


def test_the_base_install_can_use_the_byte_tokenizer() -> None:
    """tokenizers and jinja2 belong to an extra: importing the module must not need them."""
    program = (
        "import sys; sys.modules['tokenizers'] = sys.modules['jinja2'] = None; import pdbus.nodes.tokenizer as t;"
        "print(t.ByteTokenizer().encode('a')); t.HFTokenizer('x')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "[97]\n"
    assert "needs the package tokenizers: pip install 'pdbus[http]'" in run.stderr
