"""A prefill server that freezes, is killed or is started again: right tokens, both engines alive, nothing left over."""

from __future__ import annotations

import time

import pytest

from tests.vllm import faults
from tests.vllm.faults import Outcome, prompt_of
from tests.vllm.recorded import wait_clean
from tests.vllm.servers import Pair

pytestmark = pytest.mark.timeout(900)
AGAIN_S = 60.0  # within it what is well again is used again


def check(outcome: Outcome, pair: Pair, seed: int) -> None:
    assert outcome.right and outcome.in_time and outcome.alive, str(outcome)
    wait_handed_over(pair, seed)
    wait_clean(pair.recordings)


def wait_handed_over(pair: Pair, seed: int) -> None:
    """Until KV is handed over again; right all the while."""
    end, length = time.monotonic() + AGAIN_S, 60
    while True:
        prompt, before = prompt_of(seed + length, length), pair.d.handed_over()
        assert pair.tokens(prompt, 4) == pair.p.tokens(prompt, 4)
        if pair.d.handed_over() > before:
            return
        assert time.monotonic() < end, pair.d.log[-3000:]
        length += 1
        time.sleep(0.5)


def test_a_prefill_server_that_freezes_before_its_kv_is_read(pair: Pair) -> None:
    check(faults.frozen(pair, 100_000), pair, 101_000)


def test_a_prefill_server_that_is_frozen_from_the_beginning(pair: Pair) -> None:
    """As a gateway asks: both at once."""
    prompt = prompt_of(110_000)
    with pair.p.frozen():
        asked = pair.submit(pair.d.tokens, prompt, 12, kv_transfer_params={"pdbus_pair": "a" * 32})
        answered = asked.result(faults.STILL_S)
    assert answered == pair.p.tokens(prompt, 12)
    wait_handed_over(pair, 111_000)
    wait_clean(pair.recordings)


def test_a_prefill_server_that_is_started_again_before_its_kv_is_read(pair: Pair) -> None:
    check(faults.restarted(pair, 120_000), pair, 121_000)


def test_a_prefill_server_that_is_killed_before_its_kv_is_read(pair: Pair) -> None:
    check(faults.killed(pair, 130_000), pair, 131_000)
