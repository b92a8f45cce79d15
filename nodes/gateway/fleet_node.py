"""One node as the gateway knows it: what it says of itself, and what the gateway has running there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pdbus.bus.client import Client
from pdbus.bus.compatibility import DECODE_ROLES
from pdbus.bus.errors import Broken, PdError
from pdbus.bus.generation import Generation
from pdbus.bus.ports import parse_address
from pdbus.bus.station import Station

from .readable import unreadable
from .routing import NodeView, prompt_rates

GREET_S = 2.0  # for a node to answer hello; nobody waits for this one, and a node that starts is found the sooner
ONLY_PREFILLS = "it only prefills for others"  # the problem of a node that works, and is no decode node
CUT_S = 1.0  # for a connection that was cut to come back, before requests are taken away


class FleetNode:
    """A node at one address, through its lives.

    `unfit` says of its status why the gateway cannot use it, '' when it can; `on_change` hears when `problem` changes.
    """

    def __init__(
        self,
        address: str,
        station: Station,
        *,
        joined: bool,
        role: str,
        unfit: Callable[[dict[str, Any]], str],
        on_change: Callable[[FleetNode], None],
    ) -> None:
        self.address = address
        self._unfit = unfit
        self.joined = joined  # named by the user, not found by itself: never forgotten
        self.client = Client(address, station=station, on_change=self._client_changed)
        self._role = role  # as others tell, before it says so itself; '': nobody has
        self.name = ""
        self.incarnation = b""
        self.problem = "it has not answered yet"  # '' when it can be asked
        self.status: dict[str, Any] = {}
        self.answered_s = asyncio.get_running_loop().time()  # when it last did, or was first called
        self.news = asyncio.Event()  # something has changed: look at once
        self._on_change = on_change
        self._open: dict[Generation, None] = {}  # what the gateway has running there
        self._unanswered: dict[Generation, int] = {}  # of these, those without a token: what they have to compute
        self._others = 0  # requests there that are not ours, at the last status
        self._giving_up: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return not self.problem and self.client.reachable

    @property
    def role(self) -> str:
        return str(self.status.get("role", "")) or self._role

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer that fit there."""
        return int(self.status.get("max_model_len", 0))

    @property
    def may_decode(self) -> bool:
        """Or nobody has said yet what it does."""
        return not self.role or self.role in DECODE_ROLES

    @property
    def works(self) -> bool:
        """It can be asked, or is a prefill node that decode nodes can ask."""
        return self.problem in ("", ONLY_PREFILLS) and self.client.reachable

    @property
    def why(self) -> str:
        """Why it cannot be asked."""
        lost = "" if self.client.reachable else "the connection to it is lost"
        return f"{self.name or self.address}: {self.problem or lost}"

    @property
    def life(self) -> tuple[str, bytes]:
        return self.name, self.incarnation

    def view(self, matched_tokens: int = 0) -> NodeView:
        metrics, rates = self.status.get("metrics", {}), prompt_rates(self.status)
        return NodeView(
            name=self.name,
            incarnation=self.incarnation,
            running=self._others + len(self._open),
            queued=int(metrics.get("requests_waiting", 0)),
            queued_tokens=max(int(metrics.get("waiting_prefill_tokens", 0)), sum(self._unanswered.values())),
            free_blocks=int(metrics.get("kv_blocks_free", 0)) + int(metrics.get("kv_blocks_cached", 0)),
            block_size=int(self.status.get("block_size", 16)),
            matched_tokens=matched_tokens,
            prefill_tokens_per_s=rates.prefill,
            read_tokens_per_s=rates.read,
        )

    # ------------------------------------------------------------ what it says

    async def look(self) -> None:
        """Ask how it is."""
        self.news.clear()
        try:
            async with asyncio.timeout(GREET_S):
                node = await self.client.node()
            status = await self.client.status()
        except TimeoutError:
            self._is(f"it does not answer at {self.address}")
        except PdError as e:
            self._is(str(e))
        else:
            self.name, self.incarnation = node.name, node.incarnation
            self.answered_s = asyncio.get_running_loop().time()
            if field := unreadable(status):
                self._is(f"its status has {field} in a form that is not known here")
                return
            self.status = status
            self._others = max(0, int(status.get("metrics", {}).get("requests", 0)) - len(self._open))
            self._is(self._unfit(status))

    def _is(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._on_change(self)

    # ------------------------------------------------------------ what runs there

    def began(self, generation: Generation, missing_tokens: int) -> None:
        """`missing_tokens`: of its prompt, what this node has not cached."""
        self._open[generation] = None
        self._unanswered[generation] = missing_tokens

    def answered(self, generation: Generation) -> None:
        """Its first token has come."""
        self._unanswered.pop(generation, None)

    def ended(self, generation: Generation) -> None:
        self._open.pop(generation, None)
        self._unanswered.pop(generation, None)

    def close(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
        self.client.close()

    def _client_changed(self) -> None:
        self.news.set()
        if self._open and not self.client.reachable and self._giving_up is None:
            self._giving_up = asyncio.ensure_future(self._give_up())

    async def _give_up(self) -> None:
        """Requests need not wait until a silent node counts as dead: not those without a token, which can go elsewhere,
        and none at all when nobody listens there any more."""
        await asyncio.sleep(CUT_S)
        gone = not await _listens(self.address)
        if not self.client.reachable:
            for generation in list(self._open if gone else self._unanswered):
                generation.fail(Broken(f"the connection to {self.name} was cut"))
        self._giving_up = None


async def _listens(address: str) -> bool:
    """Whether somebody may listen there: only a connection that is refused says no."""
    at = parse_address(address, "address")
    try:
        async with asyncio.timeout(CUT_S):
            _, writer = await asyncio.open_connection(at.host, at.port)
        writer.close()
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        pass
    return True
