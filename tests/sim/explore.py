"""Drives a `Network`: exhaustively, breadth first, so that the first violation found is the shortest; or by a seed."""

from __future__ import annotations

import gc
import random
import time
from array import array
from typing import NamedTuple

from tests.sim.network import Move, Network, State
from tests.sim.nodes import Violation

FAULT_SHARE = 0.1  # of the moves of a random run: enough to meet each other, few enough to get somewhere


class Found(NamedTuple):
    """A violation and the list of events that leads to it."""

    problem: str
    events: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((self.problem, *(f"  {n + 1}. {event}" for n, event in enumerate(self.events))))


class Explored(NamedTuple):
    states: int
    transitions: int
    depth: int
    cpu_s: float
    outcomes: dict[str, int]  # of the states in which all is over
    found: Found | None = None


class Explorer:
    """Every state that can be reached, by number, with the move that reached it first."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._came_from: list[tuple[int, Move | None]] = []
        self._edges = array("I"), array("I")  # from, to
        self._began = time.process_time()

    def run(self) -> Explored:
        """The shortest violation, or proof that there is none and that all can end cleanly from everywhere."""
        gc.disable()  # millions of tuples without a cycle among them
        try:
            return self._run()
        finally:
            gc.enable()

    def _run(self) -> Explored:
        self._add(self._network.initial(), -1, None)
        depth, first = 0, 0
        while first < len(self._states):
            last = len(self._states)
            for number in range(first, last):
                found = self._expand(number)
                if found:
                    return self._result(depth, found)
            depth, first = depth + 1, last
        hopeless = self._hopeless()
        return self._result(depth - 1, Found("this can never end cleanly", self._trace(hopeless)) if hopeless else None)

    def _expand(self, number: int) -> Found | None:
        network, state = self._network, self._states[number]
        for move in network.moves(state):
            try:
                after = network.apply(state, move)
                network.check(after)
            except Violation as e:
                return Found(str(e), (*self._trace(number), network.describe(move)))
            self._add(after, number, move)
        return None

    def _add(self, state: State, before: int, move: Move | None) -> None:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
            self._came_from.append((before, move))
        if before >= 0:
            self._edges[0].append(before)
            self._edges[1].append(number)

    def _hopeless(self) -> int:
        """The first state from which no clean end can be reached; 0 for none."""
        before, start = self._backwards()
        todo = [number for number, state in enumerate(self._states) if self._network.clean(state)]
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

    def _trace(self, number: int) -> tuple[str, ...]:
        events: list[str] = []
        while (step := self._came_from[number])[1] is not None:
            number, move = step
            assert move is not None
            events.append(self._network.describe(move))
        return tuple(reversed(events))

    def _result(self, depth: int, found: Found | None) -> Explored:
        outcomes: dict[str, int] = {}
        for state in self._states:
            if self._network.clean(state):
                outcome = self._network.decode(state).outcome
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
        cpu_s = time.process_time() - self._began
        return Explored(len(self._states), len(self._edges[0]), depth, cpu_s, outcomes, found)


def explore(network: Network) -> Explored:
    return Explorer(network).run()


def walk(network: Network, seed: int, steps_max: int = 400) -> Found | None:
    """One random run: until all is over, nothing can happen, or it is long enough."""
    chooser = random.Random(seed)
    state = network.initial()
    events: list[str] = []
    for _ in range(steps_max):
        moves = network.moves(state)
        if not moves:
            break
        faults = [move for move in moves if move.faults]
        others = [move for move in moves if not move.faults]
        move = chooser.choice(faults if faults and (not others or chooser.random() < FAULT_SHARE) else others)
        events.append(network.describe(move))
        try:
            state = network.apply(state, move)
            network.check(state)
        except Violation as e:
            return Found(str(e), tuple(events))
    return None
