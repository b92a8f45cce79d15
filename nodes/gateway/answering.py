"""One request through the gateway: a node is chosen, and another one where the first fails before
anything has gone out.

What is tried again: a node that is lost, that drains or shuts down, or that failed; at most `TRIES_MAX` times, each at
another node, within the request's deadline. A node that is full is no failure: when all are, the request waits. Nor is
one where the prompt does not fit: one where more fits is asked. What else a client asked wrongly, no other node would
answer otherwise: that error passes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdbus.bus.errors import Broken, Closed, DeadlineExceeded, Overloaded, PdError, RequestError
from pdbus.bus.generation import Generation, Prompt
from pdbus.bus.messages import Finished, Sampling, Token

from .fleet_node import FleetNode
from .flights import DECODE, PREFILL, WAITING, Flight
from .prefixes import Read

if TYPE_CHECKING:
    from .gateway import Gateway

log = logging.getLogger("pdbus.gateway")

TRIES_MAX = 3  # a request that breaks whoever takes it shall not break all
LATE_S = 2.0  # after its deadline, for the node to say so
PULL_S = 0.02  # a request that waited and was not refused within this has room: the next one may try
RETRY_AFTER_MS = 1000  # where no node has said when to come back
GOOD = ("stop", "length")
TOO_LONG = "context_length_exceeded"  # RequestError.code
TOKEN_BYTES = 4


class Routed:
    """An answer as it comes (nodes/http/upstream.py)."""

    def __init__(
        self,
        gateway: Gateway,
        number: int,
        prompt: Prompt,
        *,
        model: str,
        sampling: Sampling,
        deadline_ms: int,
        stream: bool,
        traceparent: str = "",
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.traceparent = traceparent
        self.attempt = 0
        self.finished: Finished | None = None
        self._gateway = gateway
        self._model = model
        self._sampling = sampling
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + deadline_ms / 1000
        self._streams = stream
        self._said = False  # a token has gone out
        self._node: FleetNode | None = None
        self._generation: Generation | None = None
        self._failed: dict[tuple[str, bytes], PdError] = {}  # by node's life
        self._full: dict[tuple[str, bytes], Overloaded] = {}  # since the last wait
        self._too_short = -1  # tokens that fit where it did not
        self._too_long: list[RequestError] = []  # what was said there
        self._waited = False
        self._read: Read | None = None
        self._flight: Flight = gateway.flights.begins(number, gateway.now_ns())
        self._end = "cancelled"  # unless it ends otherwise

    async def __aenter__(self) -> Routed:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gateway.ended(self, self._flight, self._end)
        await self._leave()

    def __aiter__(self) -> Routed:
        return self

    async def __anext__(self) -> Token:
        try:
            token = await self._next()
        except PdError as e:
            self._end = "error"
            self._gateway.flights.failed(e, self._gateway.now_ns(), number=self.number, node=self._flight.node)
            raise
        if not token.index:
            self._flight.enters(DECODE, self._flight.node, self._gateway.now_ns())
        self._flight.tokens = token.index + len(token.tokens) // TOKEN_BYTES
        return token

    async def _next(self) -> Token:
        while True:
            if self._generation is None:
                await self._place()
            assert self._generation is not None and self._node is not None
            try:
                async with asyncio.timeout_at(self._deadline_s + LATE_S):
                    token = await anext(self._generation)
            except TimeoutError:
                await self._leave()
                raise DeadlineExceeded("the node did not say how the request ended at its deadline") from None
            except StopAsyncIteration:
                problem = self._ended(self._generation.finished)
                if problem is None:
                    raise
            except PdError as e:
                problem = e
            else:
                self._node.answered(self._generation)
                self._said = True
                return token
            await self._failed_there(problem)

    def _ended(self, finished: Finished | None) -> Exception | None:
        """Keep a good end; what is wrong with another one."""
        if finished is not None and finished.reason in GOOD:
            self.finished, self._end = finished, finished.reason
            self._flight.prompt_tokens = finished.prompt_tokens
            self._flight.prefill_node = finished.timeline.prefill_node
            return None
        return Broken("the node ended the request before its answer was complete")

    async def _failed_there(self, problem: Exception) -> None:
        """Raises the problem unless another node may be tried."""
        node, gone_out = self._node, self._said and self._streams
        full = isinstance(problem, Overloaded) and not gone_out
        await self._leave(room=not full)
        assert node is not None
        if full:
            assert isinstance(problem, Overloaded)
            self._full[node.life] = problem
            self._flight.enters(WAITING, "", self._gateway.now_ns())
            return
        if self._is_too_long(problem, node):
            self._flight.enters(WAITING, "", self._gateway.now_ns())
            return
        if not isinstance(problem, Broken | Closed | DeadlineExceeded):
            raise problem
        named = {"request": self.number, "attempt": self.attempt, "peer": node.name}
        log.warning("attempt failed: %s", problem, extra=named)
        if gone_out:
            raise problem
        self._failed[node.life] = problem
        self._gateway.counters["retries"] += 1
        if self._left_s <= 0 and isinstance(problem, DeadlineExceeded):
            raise problem
        if self._left_s <= 0:
            raise DeadlineExceeded(f"the request's deadline has passed; before that: {problem}")
        if len(self._failed) >= TRIES_MAX:
            raise problem
        self._gateway.flights.failed(problem, self._gateway.now_ns(), number=self.number, node=node.name)
        self._flight.enters(WAITING, "", self._gateway.now_ns())

    def _is_too_long(self, problem: Exception, node: FleetNode) -> bool:
        """For this node, and not for another one that can be asked."""
        if not isinstance(problem, RequestError) or problem.code != TOO_LONG:
            return False
        self._too_short = max(self._too_short, node.longest)
        self._too_long = [problem]
        return any(self._may_ask(other) for other in self._gateway.fleet.ready())

    def _may_ask(self, node: FleetNode) -> bool:
        return node.life not in self._failed and node.longest > self._too_short

    @property
    def _left_s(self) -> float:
        return self._deadline_s - self._loop.time()

    # ------------------------------------------------------------ a node for it

    async def _place(self) -> None:
        """Give it to a node. Raises Broken when none is ready, what the last one said when all have failed, Overloaded
        and DeadlineExceeded when none has room."""
        gateway = self._gateway
        if len(gateway.waiting) and not self._waited:
            await self._wait()  # behind those that wait already
        while self._left_s > 0:
            ready = gateway.fleet.ready()
            if not ready:
                await gateway.fleet.look()
                ready = gateway.fleet.ready()
            if not ready:
                raise next(reversed(self._failed.values()), None) or gateway.fleet.none_ready()
            left = [node for node in ready if self._may_ask(node)]
            free = [node for node in left if node.life not in self._full]
            if free:
                if self._read is None:
                    self._read = await gateway.read(self.prompt)
                    continue  # meanwhile the nodes may be others
                self._ask(*gateway.choose(self, self._read, free))
                return
            if not left:
                raise [*self._too_long, *self._failed.values()][-1]
            await self._wait()
        raise DeadlineExceeded("no node had taken the request within its deadline")

    def _ask(self, node: FleetNode, missing_tokens: int) -> None:
        self._node = node
        self._generation = node.client.generate(
            self.prompt,
            model=self._model,
            sampling=self._sampling,
            deadline_ms=max(1, int(self._left_s * 1000)),
            traceparent=self.traceparent,
        )
        node.began(self._generation, missing_tokens)
        self._flight.enters(PREFILL, node.name, self._gateway.now_ns())
        if self._waited:
            self._loop.call_later(PULL_S, self._pull, self._generation)

    def _pull(self, generation: Generation) -> None:
        if generation is self._generation:
            self._gateway.waiting.room()

    async def _wait(self) -> None:
        retry_ms = max((full.retry_after_ms for full in self._full.values()), default=RETRY_AFTER_MS)
        self._full.clear()
        again, self._waited = self._waited, True
        await self._gateway.waiting.turn(self._left_s, retry_after_ms=retry_ms, again=again)

    async def _leave(self, *, room: bool = True) -> None:
        """Cancels at the node what has not ended there. `room`: it has left a place there."""
        generation, node = self._generation, self._node
        self._generation = self._node = None
        if generation is not None and node is not None:
            await generation.aclose()
            node.ended(generation)
            if room:
                self._gateway.waiting.room()
