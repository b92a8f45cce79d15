"""Speculation on the decode node: the tokens of one node that does not speculate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.client import Client

from .conftest import Live, live_cluster

pytestmark = pytest.mark.live

REPEATING = [11, 12, 13, 14, 15, 16, 17] * 8


@pytest.fixture(scope="module")
def speculating(tiny_llama: Path) -> Iterator[Live]:
    options = {"model": str(tiny_llama), "deterministic": True, "kv_blocks": 256, "prefill_chunk": 64}
    with live_cluster(options=options, role_options={"decode": {"speculate": 4}}) as live:
        yield live
        live.check_clean()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "seed": 4, "top_p": 0.8}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("tokens", [1, 2, 17, 60])
def test_tokens_are_those_without(speculating: Live, sampling: dict[str, Any], tokens: int) -> None:
    """Whatever number of them is asked for: no draft brings one too many."""
    prompt = [40 + tokens + len(sampling), *REPEATING]
    here, there = speculating.both_answer(prompt, max_tokens=tokens, ignore_eos=True, **sampling)
    assert here.tokens == there.tokens and len(here.tokens) == tokens
    assert here.finished.timeline.prefill_node


def test_an_answer_that_ends_amid_drafts_ends_there(speculating: Live) -> None:
    """A bias has the model say one token for ever; from `min_tokens` on the first of them is the last."""
    ends = {"logit_bias": ((77, 100.0),), "stop_token_ids": (77,), "min_tokens": 9, "max_tokens": 30}
    here, there = speculating.both_answer([*REPEATING, 99], **ends)
    assert here.tokens == there.tokens and here.finished.reason == there.finished.reason == "stop"


def test_drafts_are_counted(speculating: Live) -> None:
    async def measured(client: Client) -> dict[str, float]:
        found = (await client.status())["measured"]
        return {name: samples[0][2] for name, _, _, samples in found if "spec_decode" in name}

    speculating.ask(
        speculating.decode, lambda c: c.generate(REPEATING, max_tokens=40, logit_bias=((77, 100.0),)).whole()
    )
    counted = speculating.ask(speculating.decode, measured)
    drafted, accepted = (counted[f"pdbus_spec_decode_{what}_tokens"] for what in ("draft", "accepted"))
    assert drafted >= accepted >= 15
