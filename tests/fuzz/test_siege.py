"""Garbage and near misses at real nodes: they go on serving, stay as small as they were, and log no traceback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .siege import besiege

pytestmark = pytest.mark.live


@pytest.mark.parametrize(
    ("wire", "http"), [(2000, 200), pytest.param(100_000, 10_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_nodes_outlive_garbage(tmp_path: Path, wire: int, http: int) -> None:
    siege = asyncio.run(besiege(tmp_path, wire=wire, http=http, seed=1))
    print(siege.told())
    assert siege.problems == []
    assert siege.wire == wire and siege.http == http
    assert siege.refused > 0
