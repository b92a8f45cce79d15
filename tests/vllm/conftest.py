"""Tests that need vLLM: `make test-vllm`, in an environment of its own. Elsewhere nothing of them is collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("vllm") is not None else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pdbus.nodes.models.random_llama import write_random_llama

    return write_random_llama(tmp_path_factory.mktemp("models") / "wide", "wide")


@pytest.fixture(scope="session")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One prefill and one decode server, for all tests: a start takes most of a minute."""
    from tests.vllm.servers import LEASE_S, Pair

    with Pair(model, tmp_path_factory.mktemp("logs"), prefill={"lease_s": LEASE_S, "park_s": 5}) as started:
        yield started
