"""Two real vLLM servers, one prompt's KV handed over: the same tokens as of one server alone, whatever happens.

In file order: the last test ends the prefill server.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time

import pytest

from pdbus.nodes.replay.cluster_run import ClusterRun

from tests.vllm.servers import BLOCK, LEASE_S, Pair

pytestmark = pytest.mark.timeout(900)
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 7 * BLOCK + 5, 20 * BLOCK)
ANSWER = 12


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 380) for _ in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_pair_answers_what_one_server_does(pair: Pair, length: int) -> None:
    """Every way a prompt can end in a block, chunked prefill too; and all of it but the last position was loaded."""
    prompt, before = prompt_of(length, length), pair.d.handed_over()
    answered = pair.tokens(prompt, ANSWER)
    assert pair.d.handed_over() - before == length - 1
    assert answered == pair.p.tokens(prompt, ANSWER)


@pytest.mark.parametrize(("warm", "seed"), [("p", 3001), ("d", 3101), ("both", 3201)])
def test_what_is_cached_already_changes_nothing(pair: Pair, warm: str, seed: int) -> None:
    prompt = prompt_of(5 * BLOCK + 3, seed)
    if warm in ("p", "both"):
        pair.p.tokens(prompt[: 3 * BLOCK + 1], 1)
    if warm in ("d", "both"):
        pair.d.tokens(prompt[: 2 * BLOCK + 1], 1)
    before = pair.d.handed_over()
    answered = pair.tokens(prompt, ANSWER)
    cached = 2 * BLOCK if warm in ("d", "both") else 0
    assert pair.d.handed_over() - before == len(prompt) - 1 - cached
    assert answered == pair.p.tokens(prompt, ANSWER)


def test_what_was_handed_over_is_a_prefix_for_the_next(pair: Pair) -> None:
    """Loaded blocks enter the decode server's own prefix cache: they must be as good as computed ones."""
    prompt = prompt_of(4 * BLOCK, 3000)
    pair.tokens(prompt, 2)
    longer = [*prompt, *prompt_of(9, 4000)]
    assert pair.d.tokens(longer, ANSWER) == pair.p.tokens(longer, ANSWER)


def test_many_at_once(pair: Pair) -> None:
    prompts = [prompt_of(40 + 37 * n, 10000 + n) for n in range(8)]
    asked = [pair.submit(pair.tokens, prompt, ANSWER) for prompt in prompts[:4]]
    asked += [pair.submit(pair.tokens, prompt, ANSWER) for prompt in prompts[4:]]
    answers = [one.result(300) for one in asked]
    assert answers == [pair.p.tokens(prompt, ANSWER) for prompt in prompts]


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_server_may_be_asked_first(pair: Pair, first: str) -> None:
    prompt, before = prompt_of(70, 5000 if first == "prefill" else 6000), pair.d.handed_over()
    parameters = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
    if first == "prefill":
        pair.p.complete(prompt, 1, **parameters)
        answered = pair.d.tokens(prompt, ANSWER, **parameters)
    else:
        waiting = pair.submit(pair.d.tokens, prompt, ANSWER, **parameters)
        time.sleep(1)  # the decode server has asked by then, or has not: both must work
        pair.p.complete(prompt, 1, **parameters)
        answered = waiting.result(60)
    assert pair.d.handed_over() - before == len(prompt) - 1
    assert answered == pair.p.tokens(prompt, ANSWER)


@pytest.mark.parametrize(
    "parameters",
    [
        {"pdbus_pair": "0" * 31},
        {"pdbus_pair": ["0" * 32]},
        {"pdbus_pair": f"{'0' * 32}@nobody"},
        {"remote_block_ids": [0, 1], "remote_host": "127.0.0.1", "remote_port": 1, "do_remote_prefill": True},
    ],
)
def test_parameters_of_a_client_are_not_trusted(pair: Pair, parameters: dict[str, object]) -> None:
    prompt, before = prompt_of(50, 7000), pair.d.handed_over()
    answered = pair.d.tokens([*prompt, len(parameters)], ANSWER, kv_transfer_params=parameters)
    assert pair.d.handed_over() == before
    assert answered == pair.p.tokens([*prompt, len(parameters)], ANSWER)


def test_a_pair_with_another_prompt_is_refused(pair: Pair) -> None:
    """Who learns or guesses a pair gets nobody's KV with it."""
    mine, theirs, before = prompt_of(66, 8000), prompt_of(66, 9000), pair.d.handed_over()
    parameters = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
    pair.p.complete(theirs, 1, **parameters)
    assert pair.d.tokens(mine, ANSWER, **parameters) == pair.p.tokens(mine, ANSWER)
    assert pair.d.handed_over() == before


def test_a_pair_that_the_prefill_server_never_hears_of(pair: Pair) -> None:
    prompt = prompt_of(66, 1001)
    lone = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
    assert pair.d.tokens(prompt, ANSWER, **lone) == pair.p.tokens(prompt, ANSWER)


def test_a_lease_that_expires(pair: Pair) -> None:
    """The decode server stands still for longer than the lease, and finds all announcements when it goes on."""
    prompt, before, failures = prompt_of(300, 1101), pair.d.handed_over(), pair.d.log.count("attempt.failed")
    parameters = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
    waiting = pair.submit(pair.d.tokens, prompt, ANSWER, **parameters)
    time.sleep(1)  # so that it has asked
    for pid in pair.d.pids():
        os.kill(pid, signal.SIGSTOP)
    try:
        pair.p.complete(prompt, 1, **parameters)
        time.sleep(LEASE_S + 1)
    finally:
        for pid in pair.d.pids():
            os.kill(pid, signal.SIGCONT)
    answered = waiting.result(120)
    assert pair.d.handed_over() == before
    assert pair.d.log.count("attempt.failed") == failures + 1
    assert answered == pair.p.tokens(prompt, ANSWER)


def test_reads_that_stand_still(pair: Pair) -> None:
    """Nothing of them may be used, and what arrives when they go on lands in blocks that nobody has."""
    prompt, before = prompt_of(300, 1102), pair.d.handed_over()
    (mover,) = pair.d.pids("pdbus.connector.mover")
    os.kill(mover, signal.SIGSTOP)
    try:
        answered = pair.tokens(prompt, ANSWER)
    finally:
        os.kill(mover, signal.SIGCONT)
    assert pair.d.handed_over() == before
    assert answered == pair.p.tokens(prompt, ANSWER)
    again = prompt_of(300, 1201)
    assert pair.tokens(again, ANSWER) == pair.p.tokens(again, ANSWER)


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_mover_that_dies_is_replaced(pair: Pair, side: str) -> None:
    server = pair.p if side == "p" else pair.d
    (mover,) = server.pids("pdbus.connector.mover")
    os.kill(mover, signal.SIGKILL)
    end, length = time.monotonic() + 120, 40
    while True:  # first computed here, then handed over again; right all the while
        before, prompt = pair.d.handed_over(), prompt_of(length, 50000 + length)
        assert pair.tokens(prompt, ANSWER) == pair.p.tokens(prompt, ANSWER)
        if pair.d.handed_over() > before:
            break
        assert time.monotonic() < end, pair.d.log[-3000:]
        length += 1


def test_a_client_that_goes_away(pair: Pair) -> None:
    """While the decode server waits for the pair, and while it answers: both servers go on."""
    import httpx

    for wait_s, told in ((0.5, False), (0.2, True)):
        prompt = prompt_of(120, 1301)
        parameters = {"pdbus_pair": secrets.token_hex(16)}
        if told:
            pair.p.complete(prompt, 1, kv_transfer_params=parameters)
        body = {"model": "m", "prompt": prompt, "max_tokens": 800, "ignore_eos": True, "kv_transfer_params": parameters}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{pair.d.url}/v1/completions", json=body, timeout=wait_s)
    prompt = prompt_of(130, 1401)
    assert pair.tokens(prompt, ANSWER) == pair.p.tokens(prompt, ANSWER)


def test_a_prefill_server_that_is_killed(pair: Pair) -> None:
    """Before its answer and after: the decode server computes what it does not get, and lives on."""
    prompts = [prompt_of(200 + n, 20000 + n) for n in range(3)]
    right = [pair.p.tokens(prompt, ANSWER) for prompt in prompts]
    lone = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
    waiting = pair.submit(pair.d.tokens, prompts[0], ANSWER, **lone)
    time.sleep(0.5)
    pair.p.kill()
    assert waiting.result(60) == right[0]
    for prompt, tokens in zip(prompts[1:], right[1:], strict=True):
        lone = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
        assert pair.d.tokens(prompt, ANSWER, **lone) == tokens


def test_what_both_recorded_verifies(pair: Pair) -> None:
    """All of the above: every life of both is run again and checked, as our own nodes' recordings are."""
    pair.d.stop()
    run = ClusterRun([pair.recordings])
    assert [finding.text for finding in run.failures] == []
    assert all(life.again for life in run.runs)
    assert sum(life.requests["fetched"] for life in run.runs if life.requests) > 0
