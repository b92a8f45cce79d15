"""Clocks of nodes have nothing in common: each counts from its machine's start. No decision compares two of them."""

from __future__ import annotations

import zlib

import pytest

from pdbus.nodes import events as ev
from pdbus.nodes.core import NodeCore

from .cluster_node import SimNode
from .cluster_sim import run
from .cluster_world import S


def origin_ns(node: SimNode) -> int:
    """Some seconds or many years; the same machine, rebooted, has another."""
    return (zlib.crc32(f"{node.name} {node.life}".encode()) >> 4 * (node.life % 7)) * S


class Elsewhere(NodeCore):
    """On a machine whose clock began so much earlier than the simulation."""

    origin_ns: int

    def handle(self, event: ev.NodeEvent, now: int) -> list[ev.NodeEffect]:
        return super().handle(event, now + self.origin_ns)

    def next_deadline(self) -> int | None:
        due = super().next_deadline()
        return None if due is None else due - self.origin_ns


def ends(seed: int) -> list[object]:
    """All that clients were told, times they were told of among it."""
    return [(client.tokens, client.end) for client in run(seed).clients]


@pytest.mark.parametrize("seed", range(3))
def test_where_clocks_begin_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With crashes, cuts, pauses, lost and late messages: leases, renewals, deadlines and durations stay the same."""
    before = ends(seed)

    def new_core(node: SimNode) -> NodeCore:
        core = made(node)
        core.__class__ = Elsewhere
        core.origin_ns = origin_ns(node)  # type: ignore[attr-defined]
        return core

    made = SimNode.new_core
    monkeypatch.setattr(SimNode, "new_core", new_core)
    assert ends(seed) == before
