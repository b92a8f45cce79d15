"""A draft model through P + D: the tokens of one node that does not speculate, the drafts of one that does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdbus.bus.messages import Sampling
from pdbus.nodes.models.random_llama import write_random_llama

from .conftest import Live, live_cluster
from .test_mtp_pair import counted
from tests.torch_models import load, prompt_of
from tests.unit.test_drafts import answer

pytestmark = [pytest.mark.live, pytest.mark.long]
VOCAB, TOKENS = 384, 40


class Models(NamedTuple):
    model: Path
    draft: Path  # the same, a little off: right often, but not always


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    into = tmp_path_factory.mktemp("models")
    model = write_random_llama(into / "tiny", "tiny")
    draft = Path(shutil.copytree(model, into / "nearly"))
    tensors, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor += 0.01 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    return Models(model, draft)


@pytest.fixture(scope="module", params=[{}, {"kv_buffer_device": "cpu", "device": "fake", "kv_layout": "NHD"}],
                ids=["direct", "staged"])  # fmt: skip
def drafting(models: Models, request: pytest.FixtureRequest) -> Iterator[Live]:
    options = {
        "model": str(models.model), "deterministic": True, "kv_blocks": 256, "prefill_chunk": 64, "kv_digest": "on",
        "speculate": 4, "speculate_method": "draft", "draft_model": str(models.draft), **request.param,
    }  # fmt: skip
    with live_cluster(options=options) as live:
        yield live
        live.check_clean()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.4, "seed": 4}], ids=["greedy", "seeded"])
def test_tokens_and_acceptance_are_those_of_one_node(drafting: Live, models: Models, sampling: dict[str, Any]) -> None:
    """Prompts that end amid a block, at its end, and behind several chunks."""
    before = counted(drafting, drafting.decode), counted(drafting, drafting.oracle)
    for length in (10, 32, 200):
        prompt = prompt_of(length, VOCAB, seed=length + len(sampling))
        here, there = drafting.both_answer(prompt, max_tokens=TOKENS, ignore_eos=True, **sampling)
        plain, _ = answer(load(models.model, deterministic=True), prompt, Sampling(max_tokens=TOKENS, **sampling))
        assert here.tokens == there.tokens == plain
        assert here.finished.timeline.prefill_node
    after = counted(drafting, drafting.decode), counted(drafting, drafting.oracle)
    pair, one = ({name: new[name] - old[name] for name in new} for old, new in zip(before, after, strict=True))
    assert pair == one
    assert pair["pdbus_spec_decode_accepted_tokens"] >= 20
