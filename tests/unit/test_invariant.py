"""--deterministic: a row's bits depend on its own prefix alone, not on chunks, neighbours, blocks or process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdbus.bus.messages import Sampling
from pdbus.nodes.engines.invariant import ROWS
from pdbus.nodes.engines.linear import LinearMaker
from pdbus.nodes.models.random_llama import write_random_llama

from tests.torch_models import Loaded, Walk, cut, load, prompt_of, run

LENGTH, TOKENS, VOCAB = 300, 8, 384  # more than one tile of keys
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7)
STRAIGHT, SHUFFLED = list(range(20)), list(range(63, 43, -1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module", params=["float32", "fp16"])
def tiny(folder: Path, request: pytest.FixtureRequest) -> Loaded:
    return load(folder, deterministic=True, weights=request.param)


def compute(loaded: Loaded, chunks: list[int], blocks: list[int], neighbours: int = 0) -> tuple[list[int], bytes]:
    """Tokens and KV bytes of the one prompt that all tests compare."""
    walk = Walk(loaded, 0, prompt_of(LENGTH, VOCAB), blocks, chunks, SEEDED)
    others = [
        Walk(loaded, n + 1, prompt_of(5 + 9 * n, VOCAB, n), range(20 + 5 * n, 25 + 5 * n), cut(5 + 9 * n, 3 + n))
        for n in range(neighbours)
    ]
    run(loaded, [*others, walk], TOKENS)
    return walk.tokens, loaded.kv(blocks, LENGTH + TOKENS - 1).numpy().tobytes()


@pytest.fixture(scope="module")
def whole(tiny: Loaded) -> tuple[list[int], bytes]:
    return compute(tiny, [LENGTH], STRAIGHT)


@pytest.mark.parametrize("size", [1, 7, 15, 16, 17, 64, 100, 256, 299])
def test_chunks_do_not_matter(tiny: Loaded, whole: tuple[list[int], bytes], size: int) -> None:
    assert compute(tiny, cut(LENGTH, size), SHUFFLED) == whole


@pytest.mark.parametrize("neighbours", [1, 4, 7])
def test_neighbours_do_not_matter(tiny: Loaded, whole: tuple[list[int], bytes], neighbours: int) -> None:
    assert compute(tiny, cut(LENGTH, 50), STRAIGHT, neighbours) == whole


def test_another_process_computes_the_same(folder: Path, tiny: Loaded, whole: tuple[list[int], bytes]) -> None:
    assert digests_elsewhere(folder, tiny.args.weights, {}) == [digest(whole), digest(whole)]


def test_older_instructions_are_invariant_too(folder: Path) -> None:
    """MKL's AVX2 products depend much more on the number of rows; their bits may differ from AVX-512's."""
    older = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    first, second = digests_elsewhere(folder, "float32", older)
    assert first == second


def digests_elsewhere(folder: Path, weights: str, env: dict[str, str]) -> list[str]:
    """The digests of two differently cut computations in one new process."""
    program = f"from {__name__} import print_digests; print_digests({str(folder)!r}, {weights!r})"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **paths, **env}, stdout=subprocess.PIPE)
    assert done.returncode == 0
    return done.stdout.decode().split()


def print_digests(folder: str, weights: str) -> None:
    for chunks in ([LENGTH], cut(LENGTH, 23)):
        print(digest(compute(load(folder, deterministic=True, weights=weights), chunks, STRAIGHT)))


def digest(computed: tuple[list[int], bytes]) -> str:
    tokens, kv = computed
    return hashlib.sha256(kv + repr(tokens).encode()).hexdigest()


@pytest.mark.parametrize("weights", ["float32", "fp16"])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (1024, 512), (4096, 512), (384, 64), (64, 128)])
def test_linear_rows_do_not_depend_on_their_number(shape: tuple[int, int], weights: str) -> None:
    """Plain products do: with 1 row and with 2 to 15 rows this library adds in other orders than with more."""
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(1024, shape[1])
    linear = LinearMaker(weights, packs=True, deterministic=True)("w", weight)
    whole = linear(x)
    for rows in (ROWS, 2 * ROWS, 48, 64, 80, 256, 272, 512):
        for first in (0, 3, 1024 - rows):
            assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows])
