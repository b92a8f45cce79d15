"""The bytes of tokens: those of an answer are its text's, whatever the tokenizer's manner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from pdbus.bus.messages import Sampling, TokenLogprob
from pdbus.nodes.answer import Answer
from pdbus.nodes.pieces import Pieces, byte_of_sign
from pdbus.nodes.text import StopChecker
from pdbus.nodes.tokenizer import ByteTokenizer

from tests.tokenizers_made import byte_fallback, byte_level

BYTE_LEVEL, SENTENCEPIECE = byte_level(), byte_fallback()
BYTE_LEVEL.no_truncation()


def joined(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    pieces = Pieces(tokenizer)
    return b"".join(pieces.of(i) for i in ids)


def test_every_byte_has_a_sign() -> None:
    assert sorted(byte_of_sign().values()) == list(range(256))


@given(st.text())
def test_byte_level_pieces_join_to_the_text(text: str) -> None:
    assert joined(BYTE_LEVEL, BYTE_LEVEL.encode(text, add_special_tokens=False).ids) == text.encode()


@given(st.text(st.characters(exclude_categories=("Cs", "Zs", "Cc"), exclude_characters="\u2581")))
def test_byte_fallback_pieces_join_to_the_text_behind_its_first_space(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special_tokens=False).ids
    assert joined(SENTENCEPIECE, ids).removeprefix(b" ") == text.encode()


def test_special_tokens_stand_for_their_names_and_unknown_ids_for_nothing() -> None:
    pieces = Pieces(BYTE_LEVEL)
    assert (pieces.of(1), pieces.of(99_999)) == (b"</s>", b"")


def test_a_tokenizer_of_whole_words_has_their_text() -> None:
    words = Tokenizer(models.WordLevel({"grün": 0, "<unk>": 1}, unk_token="<unk>"))
    assert Pieces(words).of(0) == "grün".encode()


@pytest.mark.parametrize(("token", "piece"), [(65, b"A"), (65 + 256, b"A"), (0xC3, b"\xc3"), (0, b"\0")])
def test_the_byte_tokenizer_has_one_byte_a_token(token: int, piece: bytes) -> None:
    assert ByteTokenizer(1000).piece(token) == piece


def an_answer(logprobs: int | None) -> Answer:
    tokenizer, sampling = ByteTokenizer(), Sampling(logprobs=logprobs)
    checker = StopChecker(sampling, tokenizer.eos_ids, tokenizer.decoder())
    return Answer(
        request=b"", link="", client_name="", client_inc=b"", client_id="", prompt=(), sampling=sampling,
        checker=checker, piece=tokenizer.piece,
    )  # fmt: skip


def test_pieces_go_with_the_logprobs_of_their_message() -> None:
    answer = an_answer(logprobs=2)
    answer.take(65, TokenLogprob(logprob=-0.1, top=((65, -0.1), (66, -2.0))))
    assert answer.message().pieces == ((b"A", b"A", b"B"),)
    answer.take(67, TokenLogprob(logprob=-1.0))
    assert answer.message().pieces == ((b"C",),)


def test_nobody_who_does_not_ask_for_logprobs_pays_for_pieces() -> None:
    answer = an_answer(logprobs=None)
    answer.take(65, TokenLogprob(logprob=-0.1))
    assert (answer.message().logprobs, answer.message().pieces) == ((), ())
