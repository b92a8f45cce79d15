"""The children of one kind, a process for each rank: started, heard, spoken to and ended as one.

The death of one ends the others, for what a rank holds is of no use without the rest. `on_exit` is called once, when
the last has been reaped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from pdbus.bus.errors import Broken
from pdbus.bus.wire import Declared

from .managed import Managed
from .process import Exit

STARTS_MAX = 3  # in a row without becoming ready
RESTART_WAIT_S = 0.1  # before the next but one; those that die at once must not spin

Received = TypeVar("Received", bound=Declared)
Received_contra = TypeVar("Received_contra", contravariant=True)
Joined = TypeVar("Joined")
Joined_co = TypeVar("Joined_co", covariant=True)


class Join(Protocol[Received_contra, Joined_co]):
    """One life of all ranks (joins.py): what they are told, and what they say."""

    def tell(self, message: Declared) -> None: ...

    def hear(self, rank: int, message: Received_contra) -> Iterable[Joined_co]: ...


class Ranks(Generic[Received, Joined]):
    def __init__(
        self,
        ranks: int,
        make: Callable[[int, Callable[[Received], None], Callable[[Exit], None]], Managed[Received]],
        join: Callable[[int], Join[Received, Joined]],
        *,
        on_message: Callable[[Joined], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        """`make(rank, on_message, on_exit)` makes the child of a rank, `join(ranks)` what joins the words of a life."""
        self._make_join = join
        self._join = join(ranks)
        self._on_message = on_message
        self._on_exit = on_exit
        self._children: Sequence[Managed[Received]] = [self._made(make, rank) for rank in range(ranks)]
        self._alive: dict[int, None] = {}
        self._first: Exit | None = None  # the end that ended the others
        self._turn = asyncio.Lock()  # a life that is being started is not stopped by halves
        self._ending: set[asyncio.Task[None]] = set()

    def _made(
        self, make: Callable[[int, Callable[[Received], None], Callable[[Exit], None]], Managed[Received]], rank: int
    ) -> Managed[Received]:
        return make(rank, lambda message: self._hear(rank, message), lambda ended: self._reaped(rank, ended))

    @property
    def pids(self) -> tuple[int, ...]:
        """0 for one that does not run."""
        return tuple(child.pid for child in self._children)

    @property
    def running(self) -> bool:
        """Some of them run, or are being started."""
        return bool(self._alive)

    async def start(self, changes: Callable[[int], dict[str, str]] = lambda rank: {}) -> None:
        """Spawn all, with some arguments changed by rank. Not while any is running."""
        self._alive = dict.fromkeys(range(len(self._children)))
        self._first = None
        self._join = self._make_join(len(self._children))
        async with self._turn:
            await asyncio.gather(*(child.start(**changes(rank)) for rank, child in enumerate(self._children)))

    def send(self, message: Declared) -> None:
        """To all. Dropped by those that have not said that they are ready."""
        self._join.tell(message)
        for child in self._children:
            child.send(message)

    async def stop(self) -> None:
        async with self._turn:
            await asyncio.gather(*(child.stop() for child in self._children))

    def _hear(self, rank: int, message: Received) -> None:
        for said in self._join.hear(rank, message):
            self._on_message(said)

    def _reaped(self, rank: int, ended: Exit) -> None:
        self._alive.pop(rank, None)
        if self._first is None:
            self._first = ended
            if self._alive:
                task = asyncio.get_running_loop().create_task(self.stop())
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        if not self._alive:
            self._on_exit(self._first)


class Starts:
    """How often children of one kind were started again, in a row, without becoming ready."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._in_a_row = 0

    def ready(self) -> None:
        self._in_a_row = 0

    def wait_s(self) -> float:
        """They are to be started again: after how long. Raises Broken when that was tried too often."""
        self._in_a_row += 1
        if self._in_a_row >= STARTS_MAX:
            raise Broken(f"the {self._what} ended {STARTS_MAX} times in a row before it was ready")
        return RESTART_WAIT_S * (self._in_a_row - 1)
