"""A DeepSeek model through real nodes: latents, of which every rank holds all, are read once by each reading rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import poison
from .lone_nodes import lone_nodes
from .test_same_tokens import SEEDED
from .test_tensor_parallel import Ranked, prompt
from tests.deepseek_models import V2, V3, write_deepseek

pytestmark = [pytest.mark.live, pytest.mark.long]

LENGTHS = (1, 17, 150)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = write_deepseek(tmp_path_factory.mktemp("models") / "deepseek", V3)
    return {"engine": "torch", "model": str(folder), "kv_blocks": 64, "prefill_chunk": 64, "http": False}


def test_two_ranks_decode_what_one_has_prefilled(model: dict[str, Any]) -> None:
    with lone_nodes(Ranked) as lone:
        lone.begin({"p": {}}, {"d": {"tp": 2}}, **model)
        (node,) = lone.decode
        poison(node.pid)
        for length in LENGTHS:
            assert lone.same(node, prompt(length, "latent"), ignore_eos=True, max_tokens=12) == "p"
        lone.check_clean()


@pytest.mark.parametrize(("there", "here"), [(2, 1), (2, 2)])
def test_any_number_of_ranks_reads_from_any_other(model: dict[str, Any], there: int, here: int) -> None:
    with lone_nodes(Ranked) as lone:
        lone.begin({"p": {"tp": there}}, {"d": {"tp": here}}, **model)
        for length in LENGTHS:
            assert lone.same(lone.decode[0], prompt(length, "latent"), ignore_eos=True, max_tokens=12) == "p"
        lone.check_clean()


@pytest.mark.parametrize("kind", ["V2", "V3"])
def test_with_latents_in_blocks_of_other_size_the_tokens_are_those_of_one_node(tmp_path: Path, kind: str) -> None:
    """Bit for bit, digests checked, through host staging."""
    folder = write_deepseek(tmp_path / "made", {"V2": V2, "V3": V3}[kind])
    with lone_nodes(Ranked) as lone:
        options = {"engine": "torch", "model": str(folder), "kv_blocks": 64, "deterministic": True, "http": False}
        fake = {"device": "fake", "kv_buffer_device": "cpu"}
        lone.begin({"p": {"block_size": 8, "kv_layout": "NHD"}}, {"d": fake}, kv_digest="on", **options)
        for length in LENGTHS:
            for sampling in ({}, SEEDED):
                asked = prompt(length, f"bits {sampling}")
                assert lone.same(lone.decode[0], asked, ignore_eos=True, max_tokens=12, **sampling) == "p"
        lone.check_clean()
