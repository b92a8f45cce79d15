"""`pd bench smooth`: it measures what it says, a read whose blocks lie anywhere."""

from __future__ import annotations

import pytest

from pdbus.nodes.bench import smooth

pytestmark = pytest.mark.live


@pytest.mark.long
def test_the_long_prompt_is_read_from_scattered_blocks() -> None:
    figures = smooth.run(prompt_tokens=2000, step_ms=5, turns=1)
    assert figures["reads"] == 1
    assert figures["runs"] > 100  # of 125 blocks
    assert figures["alone_gaps"] > figures["during_gaps"] >= smooth.ANSWERS
