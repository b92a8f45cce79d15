"""On a GPU: `make check-gpu`. One script for the first one that PyTorch finds, CUDA before XPU; under 4 minutes.

The engine there against the engine on the CPU, a prefill node and a decode node there over real NIXL, through host
staging, against one node, and how fast it goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdbus.bus.messages import Sampling
from pdbus.nodes.models.random_llama import write_random_llama

from tests.deepseek_models import V3, write_deepseek
from tests.live.conftest import Live, live_cluster
from tests.torch_models import Walk, cut, load, prompt_of, run

KIND = next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not KIND, reason=f"PyTorch {torch.__version__} sees no CUDA or XPU device here"),
]

TOKENS, VOCAB = 12, 384
CLOSE = 2e-3  # of a log-probability; float32 on both, summed in other orders


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("models")
    if request.param == "deepseek":
        return write_deepseek(into / "made", V3)
    return Path(write_random_llama(into / "tiny", "tiny"))


@pytest.mark.parametrize("chunk", [16, 512])
def test_what_it_computes_is_what_the_cpu_computes(folder: Path, chunk: int) -> None:
    """The log-probabilities of a prompt's tokens, and of those that follow."""
    found = []
    for device in ("cpu", KIND):
        loaded = load(folder, blocks=64, device=device)
        sampling = Sampling(logprobs=1, prompt_logprobs=1)
        walks = [
            Walk(loaded, seq, prompt_of(n, VOCAB, seq), range(seq * 8, seq * 8 + 8), cut(n, chunk), sampling)
            for seq, n in enumerate((5, 33, 100))
        ]
        run(loaded, walks, TOKENS)
        found.append([[score.logprob for score in walk.scores] for walk in walks])
        found[-1] += [[result.logprob.logprob for result in walk.results if result.logprob] for walk in walks]
    for here, there in zip(*found, strict=True):
        assert there == pytest.approx(here, abs=CLOSE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")
    options = {
        "model": str(model), "device": KIND, "dtype": "float32", "kv_blocks": 128, "block_size": 16,
        "prefill_chunk": 64, "kv_digest": "on",
    }  # fmt: skip
    with live_cluster(options=options) as live:
        yield live
        live.check_clean()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=["greedy", "seeded"])
def test_a_pair_says_what_one_node_says(pair: Live, sampling: dict[str, float]) -> None:
    """Copied down, read over NIXL, digested, copied up."""
    for length in (10, 64, 300):
        here, there = pair.both_answer(prompt_of(length, VOCAB, length), max_tokens=TOKENS, ignore_eos=True, **sampling)
        assert here.tokens == there.tokens and here.finished.timeline.prefill_node


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_how_fast_it_goes(tmp_path: Path, dtype: str) -> None:
    """Reported, not judged: the 58M model, 1,024 tokens of a prompt, 8 sequences that decode."""
    loaded = load(write_random_llama(tmp_path / "58m", "58m"), blocks=640, dtype=dtype, device=KIND)
    loaded.engine.warm_up()
    prompts = [
        Walk(loaded, seq, prompt_of(1024, 8192, seq), range(seq * 80, seq * 80 + 80), [1024]) for seq in range(8)
    ]
    began = time.perf_counter()
    for walk in prompts:
        walk.take(loaded.engine.step([walk.next_row()])[0])
    prefilled = time.perf_counter()
    for _ in range(64):
        for walk, result in zip(prompts, loaded.engine.step([walk.next_row() for walk in prompts]), strict=True):
            walk.take(result)
    ended = time.perf_counter()
    print(f"\n{KIND} {dtype}: prefill {8 * 1024 / (prefilled - began):.0f} tokens/s, decode "
          f"{8 * 64 / (ended - prefilled):.0f} tokens/s at batch 8")  # fmt: skip
