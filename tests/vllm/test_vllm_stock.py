"""The same faults with vLLM's own NixlConnector: what it does is shown, not judged.

The last file: both servers of our pair have ended by then, since a machine may not hold two pairs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import faults
from tests.vllm.servers import Pair, StockPair

pytestmark = pytest.mark.timeout(1200)


def test_the_same_faults_with_the_stock_connector(
    pair: Pair, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.d.stop()
    pair.p.stop()
    with StockPair(model, tmp_path) as stock:
        for seed, what in enumerate((faults.frozen, faults.restarted, faults.killed)):
            try:
                how = str(what(stock, 200_000 + 1000 * seed))
            except Exception as e:
                how = f"{type(e).__name__}: {e}"[:200]
            with capsys.disabled():
                print(f"\nNixlConnector, prefill server {what.__name__}: {how}")
