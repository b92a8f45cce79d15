"""Right bytes: with the coded engine one wrong byte of KV, anywhere in the prompt, ends the request and is named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdbus.bus.client import Client
from pdbus.bus.recording import read

from .conftest import Answered, Live, answer

pytestmark = pytest.mark.live

B, CHUNK = 16, 64
LENGTHS = (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3)


def prompt(length: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [(salt >> 7) + 10, (salt & 127) + 100, *random.Random(salt).choices(range(5, 256), k=length)][:length]


def assert_equal(here: Answered, there: Answered) -> None:
    assert here.finished.error is None, here.finished.error
    assert here.tokens == there.tokens
    assert here.text == there.text
    assert (here.finished.reason, here.finished.prompt_tokens) == (there.finished.reason, there.finished.prompt_tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_decodes_from_kv_read_over_nixl(coded: Live, length: int) -> None:
    """The destination is poisoned before: whatever a read leaves out is a wrong byte."""
    coded.poison(coded.decode)
    here, there = coded.both_answer(prompt(length, salt=length), max_tokens=20)
    assert_equal(here, there)
    assert here.finished.timeline.remote
    assert here.finished.timeline.read_bytes > 0


def test_no_process_of_a_node_on_loopback_listens_elsewhere(coded: Live) -> None:
    """NIXL's listeners among them: it authenticates nobody."""
    for node in coded.cluster.nodes:
        for process in (control := psutil.Process(node.pid), *control.children(recursive=True)):
            there = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert set(there) <= {"127.0.0.1"}, (process.cmdline(), there)


@pytest.mark.parametrize("sampling", [{"temperature": 0.8, "seed": 7}, {"logprobs": 2}, {"ignore_eos": True}])
def test_sampling_crosses_the_hand_off(coded: Live, sampling: dict[str, Any]) -> None:
    here, there = coded.both_answer(prompt(40, salt=101), max_tokens=12, **sampling)
    assert_equal(here, there)


@pytest.mark.parametrize("warm_tokens", [B, 3 * B, 4 * B])
def test_blocks_already_on_the_decode_node_are_kept(coded: Live, warm_tokens: int) -> None:
    """One block, several, and all of them: what is there is not read again."""
    whole = prompt(4 * B + 3, salt=200 + warm_tokens)
    coded.both_answer([*whole[:warm_tokens], 1], max_tokens=2)
    here, there = coded.both_answer(whole, max_tokens=10)
    assert_equal(here, there)
    assert here.finished.cached_tokens == warm_tokens
    assert here.finished.timeline.remote is (warm_tokens < 4 * B)


def test_a_prefill_node_with_a_warm_cache_announces_what_it_has(coded: Live) -> None:
    """The decode node is cold, the prefill node warm: it computes the rest only, all of it is read."""
    whole = prompt(6 * B + 5, salt=300)
    coded.ask(coded.decode, lambda client: answer(client, whole, max_tokens=1))
    coded.ask(coded.decode, forget_all)
    here, there = coded.both_answer(whole, max_tokens=8)
    assert_equal(here, there)
    assert here.finished.timeline.remote


async def forget_all(client: Client) -> None:
    """Fill the pool with other content, so often that nothing stays cached there."""
    for salt in range(400, 408):
        await answer(client, prompt(254 * B, salt), max_tokens=2)


def test_interleaved_requests_do_not_mix(coded: Live) -> None:
    prompts = [prompt(n, salt=500 + n) for n in (5, 16, 33, 64, 65, 100, 200, 300)]

    async def all_at_once(client: Client) -> list[Answered]:
        return list(await asyncio.gather(*(answer(client, p, max_tokens=15) for p in prompts)))

    for here, there in zip(coded.ask(coded.decode, all_at_once), coded.ask(coded.oracle, all_at_once), strict=True):
        assert_equal(here, there)


def test_one_token_needs_no_decode_step(coded: Live) -> None:
    here, there = coded.both_answer(prompt(50, salt=600), max_tokens=1)
    assert_equal(here, there)
    assert len(here.tokens) == 1


def test_a_stop_string_in_the_first_token_ends_the_request_at_once(coded: Live) -> None:
    first = coded.ask(coded.oracle, lambda client: answer(client, prompt(50, salt=700), max_tokens=1)).text
    here, there = coded.both_answer(prompt(50, salt=700), max_tokens=20, stop=(first,))
    assert_equal(here, there)
    assert (here.text, here.finished.reason) == ("", "stop")


def test_the_first_token_is_out_before_the_last_read_is_confirmed(coded: Live, recordings: Path) -> None:
    coded.check_clean()  # what is confirmed from here on is this request's
    finished = coded.ask(coded.decode, lambda client: answer(client, prompt(300, salt=850), max_tokens=4)).finished
    assert finished.timeline.remote
    (file,) = recordings.glob(f"{coded.decode.name}-*")
    token, released = coded.run(order_of(file, "TakeFirstToken", "MessageCame lease.released"))
    assert token < released


async def order_of(file: Path, *kinds: str) -> list[int]:
    """Where in a recording the last record of each kind stands, once the last request's have been flushed."""
    while True:
        places = {record.kind: record.sequence for record in read(file)}
        if all(kind in places for kind in kinds) and places[kinds[-1]] > places["GenerateAsked"]:
            return [places[kind] for kind in kinds]
        await asyncio.sleep(0.02)


def test_reads_begin_while_the_prompt_is_still_computed(coded: Live) -> None:
    """Several chunks: reading starts after the first, so it lasts longer than the hand-over after the last."""
    long = prompt(20 * CHUNK, salt=950)
    timeline = coded.ask(coded.decode, lambda client: answer(client, long, max_tokens=4)).finished.timeline
    assert timeline.read_ns > timeline.mover_ns / 20


def test_200_mixed_requests_with_50_cancels_leave_nothing(coded: Live) -> None:
    outcomes = coded.ask(coded.decode, lambda client: storm(client, requests=200, cancels=50))
    assert outcomes.count("cancelled") > 0
    assert set(outcomes) <= {"length", "cancelled"}


async def storm(client: Client, requests: int, cancels: int) -> Sequence[str]:
    """Requests of all sizes, some cancelled after none, one or a few tokens."""
    gate = asyncio.Semaphore(16)

    async def one(i: int) -> str:
        async with gate:
            generation = client.generate(prompt(1 + i * 37 % 400, salt=1000 + i), max_tokens=1 + i % 20)
            leave_after = i // 4 % 4 if i % 4 == 0 and i // 4 < cancels else None
            if leave_after == 0:
                await asyncio.sleep(i % 7 / 1000)
                await generation.cancel()
            async for _ in generation:
                if leave_after is not None and len(generation.tokens) >= leave_after:
                    await generation.cancel()
                    break
            return generation.finished.reason if generation.finished else "cancelled"

    return await asyncio.gather(*(one(i) for i in range(requests)))
