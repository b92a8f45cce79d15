"""The nodes that a load is sent to: what they must tell, and that a dead one holds nobody up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdbus.bus.errors import Broken, ConfigError, DeadlineExceeded
from pdbus.nodes.replay import load_target
from pdbus.nodes.replay.load_target import Target

from tests.loop import on_loop

SAYS = {"name": "d1", "role": "decode", "vocab_size": 256, "max_model_len": 2048, "block_size": 16}


class DeadClient:
    address = "tcp://d:1"

    def __init__(self) -> None:
        self.asked = 0

    async def node(self) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        raise DeadlineExceeded("no node answered at tcp://d:1")


def target(client: Any, **changes: Any) -> Target:
    return Target(client, {**SAYS, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "prefill"}, "d1 at tcp://d:1 is a prefill node; give decode nodes"),
        ({"vocab_size": None}, "d1 at tcp://d:1 does not tell its vocab_size: a newer pdbus does"),
        ({"block_size": "16"}, "does not tell its block_size"),
    ],
)
def test_a_node_that_will_not_do(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as failed:
        target(SimpleNamespace(address="tcp://d:1"), **changes)
    assert said in str(failed.value) and failed.value.setting == "--to"


@on_loop
async def test_a_dead_node_is_asked_once_for_all_that_wait() -> None:
    """Each question takes 5 s: a thousand requests, one after the other, would wait for an hour."""
    client = DeadClient()
    dead = target(client)
    outcomes = await asyncio.gather(*(dead.reach() for _ in range(1000)), return_exceptions=True)
    assert {(type(e), str(e)) for e in outcomes} == {(Broken, "no node answered at tcp://d:1")}
    assert client.asked == 1


@on_loop
async def test_it_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_target, "RETRY_S", 0.0)
    client = DeadClient()
    again = target(client)
    for _ in range(2):
        with pytest.raises(Broken):
            await again.reach()
    assert client.asked == 2
