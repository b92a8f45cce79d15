"""Prompts are read beside the node's loop; a long one keeps no short one waiting, and not too much text waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdbus.bus.errors import Overloaded, RequestError
from pdbus.bus.messages import Generate
from pdbus.bus.wire import pack_u32
from pdbus.nodes import prompt_reader
from pdbus.nodes.prompt_reader import PromptReader
from pdbus.nodes.tokenizer import ByteTokenizer, HFTokenizer

from tests.loop import on_loop
from tests.tokenizers_made import byte_level


def text(prompt: str) -> Generate:
    return Generate(client_id="c", text=prompt)


class Gated(ByteTokenizer):
    """Reads long text only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Event()

    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        if len(text) > prompt_reader.LONG_CHARS:
            self.begun.set()
            self.gate.wait(20)
        return super().encode(text, tokens_max)


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        (text("hi"), [104, 105]),
        (Generate(client_id="c", messages=({"role": "user", "content": "a"},)), list(b"user> a\n>")),
        (Generate(client_id="c", tokens=pack_u32([7, 8])), [7, 8]),
    ],
)
@on_loop
async def test_the_three_kinds_of_prompt(asked: Generate, ids: Sequence[int]) -> None:
    reader = PromptReader(ByteTokenizer(), 256, 2**31)
    assert list(await reader.read(asked)) == ids
    reader.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"text": "a", "tokens": b""}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"tokens": b""}, "prompt"),
        ({"tokens": pack_u32([256])}, "prompt"),
        ({"messages": ()}, "messages"),
        ({"messages": ({"role": "user", "content": [7, {"text": 5}]},)}, "messages"),
    ],
)
@on_loop
async def test_what_is_no_prompt_names_its_field(fields: dict[str, Any], param: str) -> None:
    reader = PromptReader(ByteTokenizer(), 256, 2**31)
    with pytest.raises(RequestError) as raised:
        await reader.read(Generate(client_id="c", **fields))
    assert raised.value.param == param
    reader.close()


@on_loop
async def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    tokenizer = Gated()
    reader = PromptReader(tokenizer, 256, 2**31)
    long = asyncio.create_task(reader.read(text("x" * (prompt_reader.LONG_CHARS + 1))))
    await asyncio.to_thread(tokenizer.begun.wait)
    assert list(await reader.read(text("hi"))) == [104, 105]
    assert not long.done()
    tokenizer.gate.set()
    assert len(await long) == prompt_reader.LONG_CHARS + 1
    reader.close()


@on_loop
async def test_too_much_waiting_text_is_refused_until_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 requests of 16 MiB each would be 64 GiB."""
    monkeypatch.setattr(prompt_reader, "WAITING_CHARS_MAX", prompt_reader.LONG_CHARS + 10)
    tokenizer = Gated()
    reader = PromptReader(tokenizer, 256, 2**31)
    long = asyncio.create_task(reader.read(text("x" * (prompt_reader.LONG_CHARS + 1))))
    await asyncio.to_thread(tokenizer.begun.wait)
    assert len(await reader.read(text("x" * 9))) == 9
    with pytest.raises(Overloaded) as raised:
        await reader.read(text("x" * 10))
    assert raised.value.retry_after_ms > 0
    tokenizer.gate.set()
    await long
    assert len(await reader.read(text("x" * 10))) == 10
    reader.close()


def test_the_loop_goes_on_while_a_model_s_tokenizer_works(tmp_path: Any) -> None:
    """It is one call into foreign code, which may keep Python's lock for as long as it takes: then no heartbeat, no
    renewal and nobody's token gets out."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = HFTokenizer(tmp_path)
    prompt = "the quick brown fox " * 20_000
    turns, done = 0, threading.Event()

    def turn() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            time.sleep(0.001)

    thread = threading.Thread(target=turn)
    thread.start()
    before = turns
    assert len(tokenizer.encode(prompt)) > 20_000
    during = turns - before
    done.set()
    thread.join()
    assert during > 3


@pytest.mark.parametrize(
    ("asked", "param", "problem"),
    [
        (text("x" * 11), "prompt", "the prompt has 11 tokens"),
        (Generate(client_id="c", messages=({"role": "user", "content": "x" * 5},)), "messages", "has 13 tokens"),
        (Generate(client_id="c", tokens=pack_u32([7] * 11)), "prompt", "the prompt has 11 tokens"),
    ],
)
@on_loop
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(asked: Generate, param: str, problem: str) -> None:
    reader = PromptReader(ByteTokenizer(), 256, 10)
    with pytest.raises(RequestError, match=problem) as raised:
        await reader.read(asked)
    assert (raised.value.param, raised.value.code) == (param, "context_length_exceeded")
    assert "with one for the answer at most 11 fit (max_model_len)" in str(raised.value)
    reader.close()
