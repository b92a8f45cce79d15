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
    folders = re.findall(r"tests(?:/\w+)?(?=\s|$)", expanded(recipe[1]))
    assert {"tests/unit", "tests/live"} <= set(folders) and not {"tests", "tests/vllm"} & set(folders)


def expanded(recipe: str) -> str:
    """With the Makefile's lists of folders in the place of their names."""
    variables = dict(re.findall(r"^(\w+) := (.+)$", MAKEFILE, re.M))
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], ""), recipe)
