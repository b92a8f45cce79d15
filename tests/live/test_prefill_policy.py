"""`--prefill-policy auto` on real nodes: what is measured decides; each choice can be made again from the record."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdbus.bus.client import Client
from pdbus.bus.recording import read
from pdbus.nodes.cluster import Cluster
from pdbus.nodes.placing import Here, Placed, There, place
from pdbus.nodes.replay.verify import verify

from .conftest import answer

pytestmark = [pytest.mark.live, pytest.mark.long]

ASKED_MAX = 500  # until both have been measured: heartbeats tell of the prefill node's rate, one a second
OPTIONS = {"engine": "coded", "kv_blocks": 256, "prefill_chunk": 64, "threads": 1}


def prompt(salt: int) -> list[int]:
    return random.Random(salt).choices(range(5, 256), k=200)


async def _asked(folder: Path) -> list[bool]:
    """Whether each of three prompts was prefilled by the other node, once a prompt has been computed on both."""
    rates = {"prefill": {"coded_token_us": 5}, "decode": {"coded_token_us": 5000, "prefill_policy": "auto"}}
    cluster = Cluster(options={**OPTIONS, "record": str(folder)}, role_options=rates)
    async with cluster, Client(cluster.decode[0].address) as client:
        first = await answer(client, prompt(0), max_tokens=4)
        assert first.finished.timeline.remote, "while nothing was measured, the prefill node is asked"
        for salt in range(1, ASKED_MAX):
            if not (await answer(client, prompt(salt), max_tokens=4)).finished.timeline.remote:
                break
        answers = [await answer(client, prompt(ASKED_MAX + i), max_tokens=4) for i in range(3)]
        return [answered.finished.timeline.remote for answered in answers]


def test_prompts_go_to_the_machine_that_is_a_thousand_times_as_fast(tmp_path: Path, capsys: Any) -> None:
    assert asyncio.run(_asked(tmp_path)) == [True, True, True]
    assert verify([tmp_path]) == 0
    placed = list(_choices(tmp_path))
    assert {bool(data["node"]) for data in placed} == {True, False}
    for data in placed:
        here, there = dict(data["here"]), [dict(node) for node in data["there"]]
        scores = here.pop("estimate_ns"), tuple(node.pop("estimate_ns") for node in there)
        again = place(msgspec.convert(here, Here), [msgspec.convert(node, There) for node in there])
        assert again == Placed(node=data["node"], here_ns=scores[0], there_ns=scores[1])


def _choices(folder: Path) -> Any:
    for path in sorted(folder.iterdir()):
        for record in read(path):
            if record.kind == "Publish" and record.payload["event"] == "prefill.placed":
                yield record.payload["data"]
