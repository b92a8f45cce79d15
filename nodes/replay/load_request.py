"""One request of a load as its client saw it."""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdbus.bus.answers import error_of
from pdbus.bus.errors import PdError
from pdbus.bus.messages import Finished

from .load_target import Target
from .workload import Asked

BIN_NS = 100_000_000  # the grain of tokens over time
RECENT = 100  # answers that the present figures are made of

# Causes of failure that no node names. All others are codes of its errors.
TOO_LONG, UNREACHABLE, INTERRUPTED = "context_length_exceeded", "unreachable", "interrupted"


@dataclass(slots=True)
class Played:
    """Times are ns after the load began, 0 where something has not happened."""

    index: int
    target: int
    scheduled_ns: int
    prompt_tokens: int
    sent_ns: int = 0
    first_ns: int = 0  # when the first token came
    ended_ns: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the decode node's prefix cache
    remote: bool = False  # its KV was read from a prefill node
    cause: str = ""  # why it failed
    problem: str = ""  # that in words

    @property
    def completed(self) -> bool:
        return self.ended_ns > 0 and not self.cause


@dataclass
class Meter:
    """The clock of a load, and what all its answers together showed."""

    began_ns: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # of completed ones
    cached_tokens: int = 0
    lateness_ns: int = 0  # of the one sent last
    recent_ttft_ms: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    gaps_ms: array[float] = field(default_factory=lambda: array("f"))  # between tokens
    tokens_by_bin: Counter[int] = field(default_factory=Counter)  # of answers, by BIN_NS

    def now(self) -> int:
        return time.monotonic_ns() - self.began_ns

    def came(self, count: int, last_ns: int) -> int:
        """So many tokens have come, the ones before at `last_ns`, 0 for the first. Returns the time."""
        now = self.now()
        self.tokens_by_bin[now // BIN_NS] += count
        if last_ns and count:
            self.gaps_ms.extend([(now - last_ns) / count / 1e6] * count)
        return now


async def play(played: Played, asked: Asked, prompt: Sequence[int], target: Target, meter: Meter) -> None:
    """Sends it and reads its answer to the end. Whatever comes of it is in `played`; raises nothing of the bus."""
    try:
        await target.reach()
    except PdError as e:
        fail(played, UNREACHABLE, str(e), meter)
        return
    meter.in_flight += 1
    try:
        await _answered(played, asked, prompt, target, meter)
    except PdError as e:
        fail(played, error_of(e).code, str(e), meter)
    finally:
        meter.in_flight -= 1


async def _answered(played: Played, asked: Asked, prompt: Sequence[int], target: Target, meter: Meter) -> None:
    generation = target.generate(prompt, asked.output_tokens)
    played.sent_ns = meter.now()
    meter.lateness_ns = played.sent_ns - played.scheduled_ns
    last_ns = 0
    async for token in generation:
        count = len(token.tokens) // 4
        last_ns = meter.came(count, last_ns)
        if not played.first_ns:
            played.first_ns = last_ns
            meter.recent_ttft_ms.append((last_ns - played.sent_ns) / 1e6)
        played.answer_tokens += count
    assert generation.finished is not None
    _finish(played, generation.finished, meter)


def _finish(played: Played, finished: Finished, meter: Meter) -> None:
    played.prompt_tokens, played.cached_tokens = finished.prompt_tokens, finished.cached_tokens
    played.remote = finished.timeline.remote
    if finished.reason == "cancelled":
        fail(played, "cancelled", "the node cancelled it", meter)
        return
    played.ended_ns = meter.now()
    meter.completed += 1
    meter.prompt_tokens += played.prompt_tokens
    meter.cached_tokens += played.cached_tokens


def fail(played: Played, cause: str, problem: str, meter: Meter) -> None:
    meter.failed += 1
    played.ended_ns, played.cause, played.problem = meter.now(), cause, problem
