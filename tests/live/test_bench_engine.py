"""`pd bench engine`: the keys that its docstring promises, from a model that takes no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.nodes.bench import engine
from pdbus.nodes.models.random_llama import write_random_llama

COMMON = ["weights", "ms", "tokens_per_s", "linear_ms", "ratio_to_linear"]
STARTUP = ["import_cpu_ms", "ready_cpu_ms", "import_bytes", "weight_bytes", "slab_bytes", "peak_bytes", "peak_ratio"]


@pytest.mark.live
@pytest.mark.long
def test_every_kind_is_measured_beside_the_bare_linears(tmp_path: Path) -> None:
    result = engine.run(rounds=1, model=str(write_random_llama(tmp_path / "tiny", "tiny")))
    assert [(row["tokens"], row["weights"]) for row in result["prefill"]] == [
        (tokens, kind) for tokens in engine.PROMPTS for kind in engine.KINDS
    ]
    assert all(list(row) == ["tokens", *COMMON] for row in result["prefill"])
    assert len(result["decode"]) == len(engine.BATCHES) * len(engine.CONTEXTS) * len(engine.KINDS)
    assert all(list(row) == ["batch", "context", *COMMON] for row in result["decode"])
    assert len(result["long_context"]) == len(engine.BATCHES) * len(engine.KINDS)
    assert all(list(row) == ["batch", "weights", "growth"] for row in result["long_context"])
    assert [list(row) for row in result["startup"]] == [["weights", *STARTUP]] * len(engine.KINDS)
