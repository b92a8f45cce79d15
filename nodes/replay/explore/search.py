"""Goes through a model: exhaustively, breadth first, so that the first violation found is the shortest; or by a seed.

A model says what a state is, which moves are possible in it and what each leads to; nothing else of it is known here.
"""

from __future__ import annotations

import gc
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

FAULT_SHARE = 0.1  # of the moves of a random run: enough to meet each other, few enough to get somewhere
NO_CLEAN_END = "this can never end cleanly"
TOLD_EVERY = 4096  # states

S = TypeVar("S")
M = TypeVar("M", bound="AnyMove")


class Violation(AssertionError):
    """What must never be, has come to be."""


class AnyMove(Protocol):
    @property
    def faults(self) -> int:
        """How many faults it costs; 0 for what happens by itself."""
        ...


class Model(Protocol[S, M]):
    """States and moves are hashable. The same move in the same state always leads to the same state."""

    def initial(self) -> S: ...

    def moves(self, state: S) -> Sequence[M]:
        """Everything that can happen next."""
        ...

    def apply(self, state: S, move: M) -> S:
        """The state after a move. Raises Violation."""
        ...

    def outcome(self, state: S) -> str:
        """How all ended, '' where something is left."""
        ...

    def describe(self, move: M) -> str:
        """In words, for a trace."""
        ...


class Found(NamedTuple, Generic[M]):
    """A violation and the moves that lead to it."""

    problem: str
    moves: tuple[M, ...]


class Explored(NamedTuple, Generic[M]):
    """`whole`: every state that can be reached was."""

    states: int
    transitions: int
    depth: int
    cpu_s: float
    outcomes: dict[str, int]  # of the states in which all is over
    whole: bool
    found: Found[M] | None = None


class Search(Generic[S, M]):
    """Every state that can be reached, by number, with the move that reached it first."""

    def __init__(self, model: Model[S, M], states_max: int, tell: Callable[[int, int], None]) -> None:
        self._model = model
        self._states_max = states_max
        self._tell = tell
        self._states: list[S] = []
        self._numbers: dict[S, int] = {}
        self._moves: dict[M, int] = {}
        self._came_from = array("I"), array("I")  # state, move
        self._edges = array("I"), array("I")  # from, to
        self._began = time.process_time()

    def run(self) -> Explored[M]:
        """The shortest violation, or proof that there is none and that all can end cleanly from everywhere."""
        gc.disable()  # millions of tuples without a cycle among them
        try:
            return self._run()
        finally:
            gc.enable()

    def _run(self) -> Explored[M]:
        self._add(self._model.initial())
        depth, first = 0, 0
        while first < len(self._states):
            last = len(self._states)
            for number in range(first, last):
                found = self._expand(number)
                if found or len(self._states) > self._states_max:
                    return self._result(depth, False, found)
                if number % TOLD_EVERY == 0:
                    self._tell(len(self._states), depth)
            depth, first = depth + 1, last
        hopeless = self._hopeless()
        return self._result(depth - 1, True, Found(NO_CLEAN_END, self._trace(hopeless)) if hopeless else None)

    def _expand(self, number: int) -> Found[M] | None:
        model, state = self._model, self._states[number]
        for move in model.moves(state):
            try:
                after = model.apply(state, move)
            except Violation as e:
                return Found(str(e), (*self._trace(number), move))
            self._add(after, number, move)
        return None

    def _add(self, state: S, before: int = 0, move: M | None = None) -> None:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
            self._came_from[0].append(before)
            self._came_from[1].append(self._moves.setdefault(move, len(self._moves)) if move is not None else 0)
        if move is not None:
            self._edges[0].append(before)
            self._edges[1].append(number)

    def _hopeless(self) -> int:
        """The first state from which no clean end can be reached; 0 for none."""
        before, start = self._backwards()
        todo = [number for number, state in enumerate(self._states) if self._model.outcome(state)]
        hope = bytearray(len(self._states))
        for number in todo:
            hope[number] = 1
        while todo:
            number = todo.pop()
            for k in range(start[number], start[number + 1]):
                if not hope[before[k]]:
                    hope[before[k]] = 1
                    todo.append(before[k])
        return max(0, hope.find(0))

    def _backwards(self) -> tuple[array[int], array[int]]:
        """The states that lead to state n are before[start[n] : start[n + 1]]."""
        froms, tos = self._edges
        start = array("I", bytes(4 * (len(self._states) + 1)))
        for to in tos:
            start[to] += 1
        for number in range(1, len(start)):
            start[number] += start[number - 1]
        before = array("I", bytes(4 * len(froms)))
        for from_, to in zip(froms, tos, strict=True):
            start[to] -= 1
            before[start[to]] = from_
        return before, start

    def _trace(self, number: int) -> tuple[M, ...]:
        moves = list(self._moves)
        trace: list[M] = []
        while number:
            trace.append(moves[self._came_from[1][number]])
            number = self._came_from[0][number]
        return tuple(reversed(trace))

    def _result(self, depth: int, whole: bool, found: Found[M] | None) -> Explored[M]:
        outcomes = Counter(outcome for state in self._states if (outcome := self._model.outcome(state)))
        cpu_s = time.process_time() - self._began
        return Explored(len(self._states), len(self._edges[0]), depth, cpu_s, dict(outcomes), whole, found)


def explore(
    model: Model[S, M], states_max: int = 1 << 31, tell: Callable[[int, int], None] = lambda states, depth: None
) -> Explored[M]:
    """Every state, or as many as `states_max`. `tell` hears of states and depth now and then."""
    return Search(model, states_max, tell).run()


def walk(model: Model[S, M], seed: int, moves_max: int = 400) -> Found[M] | None:
    """One random run: until all is over, nothing can happen, or it is long enough."""
    chooser = random.Random(seed)
    state = model.initial()
    trace: list[M] = []
    for _ in range(moves_max):
        moves = model.moves(state)
        if not moves:
            return None if model.outcome(state) else Found(NO_CLEAN_END, tuple(trace))
        faults = [move for move in moves if move.faults]
        others = [move for move in moves if not move.faults]
        move = chooser.choice(faults if faults and (not others or chooser.random() < FAULT_SHARE) else others)
        trace.append(move)
        try:
            state = model.apply(state, move)
        except Violation as e:
            return Found(str(e), tuple(trace))
    return None


def shortened(model: Model[S, M], found: Found[M]) -> Found[M]:
    """A violation without the moves that it does not need: none of those that are left can be left out alone."""
    moves, size = list(found.moves), len(found.moves) // 2
    while size:
        at = 0
        while at < len(moves):
            without = _played(model, moves[:at] + moves[at + size :])
            if without is None:
                at += size
            else:
                found, moves = without, list(without.moves)
        size = min(size, len(moves)) // 2
    return found


def _played(model: Model[S, M], moves: Sequence[M]) -> Found[M] | None:
    """The violation that these moves lead to, without those that cannot be made any more; None for none."""
    state, made = model.initial(), list[M]()
    for move in moves:
        if move not in model.moves(state):
            continue
        made.append(move)
        try:
            state = model.apply(state, move)
        except Violation as e:
            return Found(str(e), tuple(made))
    return None


def told(model: Model[Any, M], found: Found[M]) -> str:
    """The violation and what led to it, one line each."""
    events = (f"  {number}. {model.describe(move)}" for number, move in enumerate(found.moves, 1))
    return "\n".join((found.problem, *events))
