"""What happens to a request whose prefill server freezes, or is started again, between its two halves. For any pair."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any, NamedTuple, Protocol

import httpx

from .servers import Server

TOKENS, ANSWER = 300, 12
STILL_S = 20.0  # how long the prefill server stands still
LATER_S = 60.0  # and how long its readers have then


class AnyPair(Protocol):
    p: Server
    d: Server

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]: ...


class Outcome(NamedTuple):
    """`answer`: the tokens, or what was said instead. `in_time`: while the prefill server stood still or had just been
    started. `alive`: the decode server answers another request rightly afterwards."""

    answer: list[int] | str
    right: bool
    in_time: bool
    seconds: float
    alive: bool

    def __str__(self) -> str:
        what = "right tokens" if self.right else "wrong tokens" if isinstance(self.answer, list) else self.answer
        alive = "goes on" if self.alive else "does not answer any more"
        return f"{what} after {self.seconds:.1f} s{'' if self.in_time else ', too late'}; decode server {alive}"


def prompt_of(seed: int, length: int = TOKENS) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, 380) for _ in range(length)]


def frozen(pair: AnyPair, seed: int) -> Outcome:
    """P has computed the prompt, and stands still before D reads it."""
    prompt = prompt_of(seed)
    parameters = pair.prefilled(prompt)
    return _outcome(pair, prompt, parameters, seed, lambda ask: _while_frozen(pair, ask))


def restarted(pair: AnyPair, seed: int) -> Outcome:
    """P has computed the prompt, ends, and is started again on the same ports, before D reads it."""
    prompt = prompt_of(seed)
    parameters = pair.prefilled(prompt)
    pair.p.kill()
    pair.p.start()
    pair.p.wait_ready()
    return _outcome(pair, prompt, parameters, seed, _at_once)


def killed(pair: AnyPair, seed: int) -> Outcome:
    """P has computed the prompt, and is gone before D reads it. Afterwards it is started again."""
    prompt = prompt_of(seed)
    parameters = pair.prefilled(prompt)
    pair.p.kill()
    try:
        return _outcome(pair, prompt, parameters, seed, lambda ask: _then_started(pair, ask))
    finally:
        pair.p.wait_ready()


Ask = Callable[[], Future[dict[str, Any]]]
Asked = tuple[dict[str, Any] | str, bool, float]


def _while_frozen(pair: AnyPair, ask: Ask) -> Asked:
    with pair.p.frozen():
        asked = ask()
        answer, seconds = _waited(asked, STILL_S)
    if answer is not None:
        return answer, True, seconds
    answer, more = _waited(asked, LATER_S)
    return answer or "no answer", False, seconds + more


def _at_once(ask: Ask) -> Asked:
    answer, seconds = _waited(ask(), LATER_S)
    return answer or "no answer", answer is not None, seconds


def _then_started(pair: AnyPair, ask: Ask) -> Asked:
    found = _at_once(ask)
    pair.p.start()
    pair.p.wait_ready()
    return found


def _outcome(
    pair: AnyPair, prompt: list[int], parameters: dict[str, Any], seed: int, how: Callable[[Ask], Asked]
) -> Outcome:
    pool = ThreadPoolExecutor(1)

    def ask() -> Future[dict[str, Any]]:
        return pool.submit(pair.d.complete, prompt, ANSWER, kv_transfer_params=parameters)

    said, in_time, seconds = how(ask)
    pool.shutdown(wait=False)
    answer = _tokens(said)
    right = answer == pair.p.tokens(prompt, ANSWER)  # which never was given KV of others
    return Outcome(answer, right, in_time, seconds, _is_alive(pair, seed))


def _waited(asked: Future[dict[str, Any]], seconds: float) -> tuple[dict[str, Any] | str | None, float]:
    began = time.monotonic()
    answer: dict[str, Any] | str | None
    try:
        answer = asked.result(seconds)
    except TimeoutError:
        answer = None
    except httpx.HTTPError as e:
        answer = type(e).__name__
    return answer, time.monotonic() - began


def _tokens(answer: dict[str, Any] | str) -> list[int] | str:
    if isinstance(answer, str):
        return answer
    if "choices" in answer:
        return list(answer["choices"][0]["token_ids"])
    return f"error {answer.get('error', answer)}"[:120]


def _is_alive(pair: AnyPair, seed: int) -> bool:
    prompt = prompt_of(seed + 500_000, 100)
    try:
        return pair.d.tokens(prompt, ANSWER) == pair.p.tokens(prompt, ANSWER)
    except (httpx.HTTPError, AssertionError):
        return False
