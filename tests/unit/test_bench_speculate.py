"""`pd bench speculate`: the keys that its docstring promises, from a model that takes no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.nodes.bench import speculate
from pdbus.nodes.models.random_llama import write_random_llama


@pytest.mark.long
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_both_kinds_say_the_same_and_are_measured(tmp_path: Path, method: str) -> None:
    model = str(write_random_llama(tmp_path / "tiny", "tiny"))
    result = speculate.run(rounds=1, drafts=4, model=model, draft_model=model if method == "draft" else "")
    assert list(result) == [
        "model", "method", "drafts", "tokens", "steps", "acceptance", "plain_tokens_per_s", "tokens_per_s", "ratio",
        "equal",
    ]  # fmt: skip
    assert result["equal"] and result["method"] == method and result["steps"] <= result["tokens"]
    assert method != "draft" or result["acceptance"] > 0.9
