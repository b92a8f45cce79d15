"""Bugs that the simulated cluster must find, each with a seed in which it showed when this was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdbus.bus.wire import replace
from pdbus.connector.handoff import Holder
from pdbus.connector.own_mover import OwnMover
from pdbus.nodes import core, decode, peers, scheduler
from pdbus.nodes import events as ev

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]

BUGS: dict[str, tuple[Bug, int]] = {}


def found_by(seed: int) -> Callable[[Bug], Bug]:
    def register(bug: Bug) -> Bug:
        BUGS[bug.__name__] = bug, seed
        return bug

    return register


@found_by(4)
def a_first_token_counts_only_when_the_shell_has_taken_it(patch: Patch) -> None:
    """Its attempt may fail in the same breath, and the worker has one token more than is counted."""
    patch.setattr(decode.Requests, "first_token_known", lambda self, request, payload, now: [
        ev.TakeFirstToken(request=r.request, seq=r.seq, payload=payload) for r in [self.get(request)] if r
    ])  # fmt: skip
    right = decode.Requests.first_token_taken

    def wrong(self: decode.Requests, request: bytes, stop: bool, now: int) -> Any:
        if (r := self.get(request)) is not None:
            self._count(r, now, own=False)
        return right(self, request, stop, now)

    patch.setattr(decode.Requests, "first_token_taken", wrong)


@found_by(70)
def a_retry_after_the_first_token_has_a_block_too_many(patch: Patch) -> None:
    right = decode.Requests._fetch

    def wrong(self: decode.Requests, r: decode.Request, *rest: Any) -> Any:
        return replace(right(self, r, *rest), blocks=r.blocks)

    patch.setattr(decode.Requests, "_fetch", wrong)


@found_by(0)
def blocks_of_a_failed_attempt_stay_held(patch: Patch) -> None:
    right = decode.Requests.attempt_failed

    def wrong(self: decode.Requests, failed: Any) -> None:
        r = self.get(failed.request)
        if r is not None:
            self._pool.hold(r.blocks, Holder.HELD)
        right(self, failed)

    patch.setattr(decode.Requests, "attempt_failed", wrong)


@found_by(5)
def reads_without_a_mover_are_waited_for(patch: Patch) -> None:
    right = OwnMover.look
    patch.setattr(OwnMover, "look", lambda self: right(self) if self.up else [])


@found_by(11)
def a_lost_worker_leaves_its_prefix_cache(patch: Patch) -> None:
    patch.setattr("pdbus.connector.pool.BlockPool.reset", lambda self: None)


@found_by(0)
def a_new_worker_is_not_told_of_the_sequences(patch: Patch) -> None:
    def wrong(self: core.NodeCore, event: ev.WorkerUp, now: int, out: list[ev.NodeEffect]) -> None:
        self.worker_up = True
        self._pass_on(self.mover.announce(), now, out)

    patch.setitem(core._HANDLERS, ev.WorkerUp, wrong)


@found_by(2)
def a_lost_mover_keeps_the_epoch(patch: Patch) -> None:
    right = core.NodeCore._mover_lost
    patch.setitem(
        core._HANDLERS,
        ev.MoverLost,
        lambda self, event, now, out: right(self, replace(event, asked=True), now, out),
    )


@found_by(3)
def a_prefix_is_published_before_it_is_computed(patch: Patch) -> None:
    right = scheduler.Scheduler._advance

    def wrong(self: scheduler.Scheduler, s: scheduler.Sequence, row: Any, tokens: int) -> Any:
        s.computed += 1
        progress = right(self, s, row, tokens)
        s.computed -= 1
        return replace(progress, computed=s.computed, prompt_done=s.computed >= s.prompt_tokens)

    patch.setattr(scheduler.Scheduler, "_advance", wrong)


@found_by(0)
def a_step_does_not_hold_its_blocks(patch: Patch) -> None:
    right = scheduler.Scheduler._begin

    def wrong(self: scheduler.Scheduler, rows: Any) -> None:
        right(self, rows)
        self._pool.drop(self._held, Holder.IN_STEP)
        self._held = []

    patch.setattr(scheduler.Scheduler, "_begin", wrong)


@found_by(56)
def a_peer_that_left_while_it_was_loaded_stays_in_the_mover(patch: Patch) -> None:
    right = peers.Peers._forget

    def wrong(self: peers.Peers, name: str, incarnation: bytes, out: list[ev.NodeEffect], but: str = "") -> None:
        effects: list[ev.NodeEffect] = []
        ready = dict(self._ready)
        right(self, name, incarnation, effects, but)
        out += [e for e in effects if not isinstance(e, ev.RemovePeer) or e.peer in ready]

    patch.setattr(peers.Peers, "_forget", wrong)


@found_by(0)
def the_halves_of_the_handoff_do_not_hear_of_an_end(patch: Patch) -> None:
    patch.setattr(core.NodeCore, "_ended", lambda self, effects, now, out: out.extend(effects))
