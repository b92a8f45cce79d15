"""Stop handling: nothing of a stop string is ever said, nothing else is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdbus.bus.messages import Sampling
from pdbus.nodes.text import StopChecker, unfinished
from pdbus.nodes.tokenizer import ByteTokenizer

EOS = 0


class Words:
    """A detokenizer whose tokens are the words of a list, to place borders at will."""

    def __init__(self, words: list[str], tail: str = "") -> None:
        self._words, self._tail = words, tail

    def add(self, ids: tuple[int, ...]) -> str:
        return "".join(self._words[i - 1] for i in ids)

    def finish(self) -> str:
        return self._tail


def answer(words: list[str], **sampling: object) -> tuple[list[str], str | None]:
    """What is said for each token up to the end, and the reason; the flush comes last when there was none."""
    checker = StopChecker(Sampling(**sampling), (EOS,), Words(words))  # type: ignore[arg-type]
    said: list[str] = []
    for i, word in enumerate(words, 1):
        text, reason = checker.add(EOS if word == "<eos>" else i)
        said.append(text)
        if reason is not None:
            assert checker.finish() == ""
            return said, reason
    return [*said, checker.finish()], None


def test_text_is_said_at_once_when_nothing_can_stop_it() -> None:
    assert answer(["a", "b"]) == (["a", "b", ""], None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["so\nEND", " more"], ["so\n"]),
        (["so ", "END"], ["so ", ""]),
        (["so E", "N", "D."], ["so ", "", ""]),
        (["soE", "ND", " more"], ["so", ""]),
        (["E", "E", "N", "E", "ND!"], ["", "E", "", "EN", ""]),
    ],
)
def test_a_stop_string_is_found_across_token_borders(words: list[str], said: list[str]) -> None:
    assert answer(words, stop=("END",)) == (said, "stop")


def test_what_only_began_like_a_stop_string_is_said() -> None:
    assert answer(["EN", "ough"], stop=("END",)) == (["", "ENough", ""], None)


def test_text_held_back_is_said_when_the_length_ends_the_answer() -> None:
    assert answer(["the EN"], stop=("END",)) == (["the ", "EN"], None)


def test_text_held_back_is_said_when_the_sequence_ends() -> None:
    assert answer(["the EN", "<eos>"], stop=("END",)) == (["the ", "EN"], "stop")


def test_the_first_of_several_stop_strings_wins() -> None:
    assert answer(["one. Two! Three"], stop=("!", ".")) == (["one"], "stop")
    assert answer(["ab", "c"], stop=("bcd", "abc")) == (["", ""], "stop")


def test_an_empty_stop_string_stops_nothing() -> None:
    assert answer(["a"], stop=("",)) == (["a", ""], None)


def test_the_end_of_sequence_is_not_said() -> None:
    assert answer(["a", "<eos>", "b"]) == (["a", ""], "stop")


def test_a_stop_token_is_not_said() -> None:
    assert answer(["a", "b", "c"], stop_token_ids=(2,)) == (["a", ""], "stop")


def test_ignore_eos_ignores_only_that() -> None:
    words = Words(["a", "b"])
    checker = StopChecker(Sampling(ignore_eos=True, stop_token_ids=(2,)), (1,), words)
    assert checker.add(1) == ("a", None)
    assert checker.add(2) == ("", "stop")


def test_before_min_tokens_nothing_stops_an_answer() -> None:
    assert answer(["x", "x", "x", "x"], min_tokens=3, stop_token_ids=(1, 2, 3)) == (["x", "x", ""], "stop")
    assert answer(["a.", "b.", "c.", "d."], min_tokens=3, stop=(".",)) == (["a.", "b.", "c"], "stop")


def test_the_last_of_min_tokens_may_complete_a_stop_string() -> None:
    assert answer(["E", "N", "D"], min_tokens=3, stop=("END",)) == (["", "", ""], "stop")


def test_a_stop_string_complete_before_min_tokens_is_text() -> None:
    assert answer(["END", "x", "y"], min_tokens=2, stop=("END",)) == (["END", "x", "y", ""], None)


def test_half_a_character_at_the_end_is_flushed() -> None:
    checker = StopChecker(Sampling(), (EOS,), ByteTokenizer().decoder())
    assert checker.add(0xC3) == ("", None)
    assert checker.add(EOS) == ("\ufffd", "stop")


def test_half_a_character_behind_a_stop_string_is_not() -> None:
    checker = StopChecker(Sampling(stop=("!",)), (EOS,), Words(["a!"], tail="\ufffd"))
    assert checker.add(1) == ("a", "stop")
    assert checker.finish() == ""


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_borders_of_tokens_change_nothing(words: list[str], stops: list[str]) -> None:
    """Whatever the tokens are, what is said is the text up to the first stop string to be complete, or all of it."""
    said, reason = answer(words, stop=tuple(stops))
    text, cut = "", None
    for word in words:
        text += word
        cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None:
            break
    assert ("".join(said), reason) == (text[:cut], None if cut is None else "stop")


@given(st.text("abc"), st.lists(st.text("abc", min_size=1)))
def test_no_more_is_held_back_than_must_be(text: str, stops: list[str]) -> None:
    held = unfinished(text, stops)
    assert held == 0 or any(len(stop) > held and stop.startswith(text[-held:]) for stop in stops)
    assert not any(text.endswith(stop[:n]) for stop in stops for n in range(held + 1, len(stop)))
