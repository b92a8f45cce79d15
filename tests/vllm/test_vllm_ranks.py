"""vLLM servers of one and two ranks: what one computed with `--tensor-parallel-size` 1 another loads with 2, and back.

A decode server's answers are compared with its own, alone and with nothing cached: ranks of another number add in
another order, so that where the two best tokens are as good as equal the other one may come out. Those are counted.

In file order: the last test ends all servers.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdbus.nodes.replay.cluster_run import ClusterRun

from tests.vllm.recorded import wait_clean
from tests.vllm.servers import BLOCK, Server, free_port, ours

pytestmark = pytest.mark.timeout(900)
WAYS = {"1 to 2": ("p1", "d2"), "2 to 1": ("p2", "d1"), "2 to 2": ("p2", "d2")}
LENGTHS = (2, BLOCK, BLOCK + 1, 7 * BLOCK + 5)
ANSWER = 12
TIE = 1e-3  # how far apart the log probabilities of two tokens may be that change places
TIES_MAX = 0.05  # of all answers
AGAIN_S = 120.0


class Four:
    """Servers `p1`, `p2`, `d1` and `d2`, called after their ranks. `d2` knows both prefill servers."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.recordings = folder / "recordings"
        self.compared, self.ties = 0, 0
        self._pool = ThreadPoolExecutor(32)  # a request takes three
        bus = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("p1", "p2")}
        joins = {"d1": [bus["p2"]], "d2": [bus["p1"], bus["p2"]]}
        self.servers: dict[str, Server] = {}
        for name in ("p1", "p2", "d1", "d2"):
            more: dict[str, Any] = {"listen": bus[name]} if name in bus else {"join": joins[name], "pair_wait_s": 5}
            role = "kv_producer" if name in bus else "kv_consumer"
            transfer = ours(role, name=name, record=str(self.recordings), **more)
            self.servers[name] = Server(model, folder / f"{name}.log", len(self.servers) % 2, transfer, int(name[1]))

    def wait_ready(self) -> None:
        for server in self.servers.values():
            server.wait_ready()
        for p, d in WAYS.values():
            self.servers[d].wait_for(f"node.up node={p}")
            self.wait_handed_over(p, d, 1)

    def ask(self, p: str, d: str, prompt: Sequence[int], first: str = "") -> list[int]:
        """Both under one pair; `first` has a second's start."""
        parameters = {"kv_transfer_params": {"pdbus_pair": f"{secrets.token_hex(16)}@{p}"}}
        asked = {}
        for name in (p, d) if first != d else (d, p):
            tokens = ANSWER if name == d else 1
            asked[name] = self.submit(self.servers[name].tokens, prompt, tokens, **parameters)
            time.sleep(1 if first else 0)
        asked[p].result(120)
        answer: list[int] = asked[d].result(120)
        return answer

    def submit(self, call: Any, *args: Any, **more: Any) -> Any:
        return self._pool.submit(call, *args, **more)

    def many(self, p: str, d: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        asked = [self.submit(self.ask, p, d, prompt) for prompt in prompts]
        return [one.result(300) for one in asked]

    def check(self, d: str, prompt: Sequence[int], answered: list[int]) -> None:
        """What that server says alone, or a near tie, which is counted."""
        said = self.servers[d].complete(prompt, ANSWER, cache_salt=secrets.token_hex(16), logprobs=2)["choices"][0]
        alone = list(said["token_ids"])
        self.compared += 1
        if answered == alone:
            return
        at = next(i for i, (one, other) in enumerate(zip(answered, alone, strict=True)) if one != other)
        best = sorted(said["logprobs"]["top_logprobs"][at].values(), reverse=True)
        assert best[0] - best[1] < TIE, f"{answered} is not {alone}, at {at}: {best}"
        self.ties += 1

    def handed_over(self, d: str) -> int:
        return self.servers[d].handed_over()

    def wait_handed_over(self, p: str, d: str, seed: int) -> None:
        """Until it is; right all the while."""
        end, length = time.monotonic() + AGAIN_S, 40
        while True:
            before, prompt = self.handed_over(d), prompt_of(length, seed + length)
            self.check(d, prompt, self.ask(p, d, prompt))
            if self.handed_over(d) > before:
                return
            assert time.monotonic() < end, self.servers[d].log[-3000:]
            length += 1

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()
        self._pool.shutdown(wait=False)


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 380) for _ in range(length)]


@pytest.fixture(scope="module")
def four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Four]:
    made = Four(model, tmp_path_factory.mktemp("ranks"))
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    return WAYS[request.param]


@pytest.mark.parametrize("length", LENGTHS)
def test_any_ranks_answer_what_the_decode_server_does_alone(four: Four, way: tuple[str, str], length: int) -> None:
    """And all of the prompt but its last position was loaded."""
    p, d = way
    prompt, before = prompt_of(length, 1000 * int(p[1]) + length), four.handed_over(d)
    answered = four.ask(p, d, prompt)
    assert four.handed_over(d) - before == length - 1
    four.check(d, prompt, answered)


@pytest.mark.parametrize("warm", ["prefill", "decode", "both"])
def test_what_is_cached_already_changes_nothing(four: Four, way: tuple[str, str], warm: str) -> None:
    p, d = way
    prompt = prompt_of(5 * BLOCK + 3, secrets.randbits(32))
    if warm != "decode":
        four.servers[p].tokens(prompt[: 3 * BLOCK + 1], 1)
    if warm != "prefill":
        four.servers[d].tokens(prompt[: 2 * BLOCK + 1], 1)
    before = four.handed_over(d)
    answered = four.ask(p, d, prompt)
    assert four.handed_over(d) - before == len(prompt) - 1 - (0 if warm == "prefill" else 2 * BLOCK)
    four.check(d, prompt, answered)
    longer = [*prompt, *prompt_of(9, 7)]
    four.check(d, longer, four.servers[d].tokens(longer, ANSWER))  # upon what was handed over, in its own cache


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_server_may_be_asked_first(four: Four, way: tuple[str, str], first: str) -> None:
    p, d = way
    prompt, before = prompt_of(70, secrets.randbits(32)), four.handed_over(d)
    answered = four.ask(p, d, prompt, first=p if first == "prefill" else d)
    assert four.handed_over(d) - before == len(prompt) - 1
    four.check(d, prompt, answered)


def test_many_at_once(four: Four, way: tuple[str, str]) -> None:
    prompts = [prompt_of(40 + 37 * n, secrets.randbits(32)) for n in range(6)]
    for prompt, answered in zip(prompts, four.many(*way, prompts), strict=True):
        four.check(way[1], prompt, answered)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_mover_of_one_rank_that_is_killed(four: Four, way: tuple[str, str], side: str) -> None:
    """While a prompt is handed over: right tokens, and later ones are handed over again."""
    p, d = way
    movers = four.servers[p if side == "prefill" else d].pids("pdbus.connector.mover")
    assert len(movers) == int((p if side == "prefill" else d)[1])
    prompts = [prompt_of(300, secrets.randbits(32)) for _ in range(2)]
    asked = [four.submit(four.ask, p, d, prompt) for prompt in prompts]
    os.kill(movers[-1], signal.SIGKILL)
    for prompt, one in zip(prompts, asked, strict=True):
        four.check(d, prompt, one.result(120))
    four.wait_handed_over(p, d, secrets.randbits(32))


def test_nothing_is_left_over(four: Four) -> None:
    wait_clean(four.recordings, tuple(four.servers))


def test_near_ties_are_few(four: Four) -> None:
    assert four.compared > 30
    assert four.ties <= TIES_MAX * four.compared, f"{four.ties} of {four.compared}"


def test_what_all_recorded_verifies(four: Four) -> None:
    four.stop()
    run = ClusterRun([four.recordings])
    assert [finding.text for finding in run.failures] == []
    assert all(life.again for life in run.runs)
