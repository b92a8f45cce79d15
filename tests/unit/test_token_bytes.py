"""How many tokens a text has at least: never more than it really has, or prompts that fit would be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from pdbus.bus.errors import RequestError
from pdbus.nodes.token_bytes import UNKNOWN, token_bytes
from pdbus.nodes.tokenizer import HFTokenizer

from tests.tokenizers_made import byte_fallback, byte_level

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
LONGEST_WORD = "the quick brown fox jumps over the lazy dog "


def without_truncation(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    return tokenizer


def changed(change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    """The byte-level tokenizer with its JSON changed."""
    spec = json.loads(without_truncation(byte_level()).to_str())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec))


def composing() -> Tokenizer:
    tokenizer = without_truncation(byte_level())
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def without_z_and_tab(spec: dict[str, Any]) -> None:
    spec["model"]["vocab"] = {
        text: i for text, i in spec["model"]["vocab"].items() if "z" not in text and "ĉ" not in text
    }
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "z" not in "".join(pair)]


TOKENIZERS = {
    "byte-level": without_truncation(BYTE_LEVEL),
    "byte fallback": BYTE_FALLBACK,
    "composing": composing(),
    "without some bytes": changed(without_z_and_tab),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.text()
    | st.text("the quick brown fox \t z")
    | st.text("\u1112\u1161\u11ab\u03b1\u0313\u0300\u0345")
    | st.integers(1, 200).map(LONGEST_WORD.__mul__)
)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    each = token_bytes(tokenizer)
    assert each.longest
    assert each.tokens_min(text.encode()) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_byte_without_a_token_counts_for_none() -> None:
    each = token_bytes(TOKENIZERS["without some bytes"])
    assert sorted(each.dropped) == [ord("\t"), ord("z")]
    assert each.tokens_min(b"z\t" * 1000) == 0


def stripping(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Strip()


def shortening(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("aa", "b")])


def splitting(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer])


def removing(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), tokenizer.pre_tokenizer])


def taking_blanks(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [stripping, shortening, splitting, removing, taking_blanks])
def test_a_tokenizer_that_may_drop_text_has_no_bound(change: Callable[[Tokenizer], None]) -> None:
    tokenizer = byte_level()
    change(tokenizer)
    assert token_bytes(tokenizer) == UNKNOWN


@pytest.mark.parametrize("messages", [False, True])
def test_what_cannot_fit_is_refused(tmp_path: Any, messages: bool) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = HFTokenizer(tmp_path)
    text = "fox " * 1000
    with pytest.raises(RequestError, match=r"at least \d+ tokens; with one for the answer at most 51 fit") as raised:
        tokenizer.chat([{"role": "user", "content": text}], tokens_max=50) if messages else tokenizer.encode(text, 50)
    assert (raised.value.param, raised.value.code) == ("messages" if messages else "prompt", "context_length_exceeded")
    assert tokenizer.encode("the quick brown fox", 50)
