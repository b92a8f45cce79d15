"""Tests that need vLLM are a tier of their own: no other target runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

MAKEFILE = (Path(__file__).resolve().parents[2] / "Makefile").read_text()


@pytest.mark.parametrize("target", ["test", "check-long"])
def test_other_targets_name_their_folders(target: str) -> None:
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert recipe is not None
    folders = re.findall(r"tests(?:/\w+)?(?=\s|$)", recipe[1])
    assert folders and not {"tests", "tests/vllm"} & set(folders)


def test_the_pure_tier_is_without_vllm() -> None:
    pure = re.search(r"^PURE := (.+)$", MAKEFILE, re.M)
    assert pure is not None and "tests/vllm" not in pure[1]
