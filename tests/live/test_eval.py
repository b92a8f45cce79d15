"""`pd eval`: the demo model is itself on one node, through P + D, and through P + D with its attention made latent."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes.evaluation.command import BLOCK_SIZE, of_its_own
from pdbus.nodes.evaluation.scoring import Figures
from pdbus.nodes.evaluation.tasks import Expected, Tasks, load_tasks
from pdbus.nodes.models.demo import fetch_demo_model

from .test_latent_demo_model import lift

pytestmark = [pytest.mark.live, pytest.mark.model, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def told() -> tuple[Tasks, Expected]:
    try:
        fetch_demo_model()
        return load_tasks()
    except ConfigError as e:
        if "cannot fetch" in str(e):
            pytest.skip(str(e))
        raise


def is_right(found: Figures, expected: Expected) -> bool:
    assert found.capitals == expected.capitals
    assert found.perplexity == pytest.approx(expected.perplexity, rel=0.005)
    return True


def test_one_node_says_so_for_programs(told: tuple[Tasks, Expected]) -> None:
    command = [sys.executable, "-c", "from pdbus.nodes.cli import main; main()", "eval", "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    said = json.loads(done.stdout)
    assert set(said) == {"capitals", "perplexity"}
    assert is_right(Figures(**said, prompts=0, remote=0), told[1])


@pytest.mark.parametrize("latent", [False, True], ids=["as it is", "latent attention"])
def test_a_decode_node_that_reads_its_kv_has_the_same(
    told: tuple[Tasks, Expected], latent: bool, tmp_path: Path
) -> None:
    model = fetch_demo_model()
    model = lift(model, tmp_path / "lifted") if latent else model
    options = {"model": str(model), "block_size": BLOCK_SIZE}
    name, found = asyncio.run(of_its_own(1, options, told[0]))
    assert name == model.name and is_right(found, told[1])
    assert found.remote >= len(told[0].capitals) + 24, "each question and text reads KV"
