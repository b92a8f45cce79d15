"""A draft layer through P + D: the tokens of one node that does not speculate, the drafts of one that does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.client import Client
from pdbus.bus.messages import Sampling
from pdbus.nodes.node_process import NodeProcess

from .conftest import Live, live_cluster
from tests.deepseek_models import V3, write_drafting
from tests.torch_models import load, prompt_of
from tests.unit.test_drafts import answer

pytestmark = [pytest.mark.live, pytest.mark.long]
VOCAB, TOKENS = 384, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafting(tmp_path_factory.mktemp("models") / "made", V3, guessing=True)


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[Live]:
    options = {
        "model": str(model), "deterministic": True, "kv_blocks": 256, "prefill_chunk": 64, "kv_digest": "on",
        "speculate": 1, "speculate_method": "mtp",
    }  # fmt: skip
    with live_cluster(options=options) as live:
        yield live
        live.check_clean()


def counted(live: Live, node: NodeProcess) -> dict[str, float]:
    async def measured(client: Client) -> dict[str, float]:
        found = (await client.status())["measured"]
        return {name: samples[0][2] for name, _, _, samples in found if "spec_decode" in name}

    return live.ask(node, measured)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.4, "seed": 4}], ids=["greedy", "seeded"])
def test_tokens_and_acceptance_are_those_of_one_node(drafting: Live, model: Path, sampling: dict[str, Any]) -> None:
    """Prompts that end amid a block, at its end, and behind several chunks."""
    before = counted(drafting, drafting.decode), counted(drafting, drafting.oracle)
    for length in (10, 32, 200):
        prompt = prompt_of(length, VOCAB, seed=length + len(sampling))
        here, there = drafting.both_answer(prompt, max_tokens=TOKENS, ignore_eos=True, **sampling)
        plain, _ = answer(load(model, deterministic=True), prompt, Sampling(max_tokens=TOKENS, **sampling))
        assert here.tokens == there.tokens == plain
        assert here.finished.timeline.prefill_node
    after = counted(drafting, drafting.decode), counted(drafting, drafting.oracle)
    pair, one = ({name: new[name] - old[name] for name in new} for old, new in zip(before, after, strict=True))
    assert pair == one
    assert pair["pdbus_spec_decode_accepted_tokens"] >= (20 if not sampling else 1)
