"""Ports of clusters in one process: chosen well before their nodes bind them."""

from __future__ import annotations

import random

import pytest

from pdbus.nodes.cluster import Cluster


def test_no_port_is_chosen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chance says: a cluster and its oracle start side by side."""
    monkeypatch.setattr(random, "randrange", lambda *_: 24_000)
    clusters = [Cluster(1, 1), Cluster(0, 0, both=1), Cluster(2, 2)]
    nodes = [node for cluster in clusters for node in cluster.nodes]
    ports = [int(node.address.rpartition(":")[2]) + i for node in nodes for i in range(3)]
    ports += [int(node.http.rpartition(":")[2]) for node in nodes if node.http]
    assert len(ports) == len(set(ports))
