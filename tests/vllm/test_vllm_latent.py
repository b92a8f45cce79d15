"""A cache of latents (MLA), and a decode server that drafts by prompt lookup: it says what it says alone.

A cache of latents is one row for each token, without heads, K or V. Drafts that need only tokens begin with the first
step after the hand-off. vLLM's CPU kernels for latents compute a prompt's last position otherwise when the positions
before are cached, which shows in the tokens of a random model: so an answer through the pair is compared with one of
the decode server alone that has cached all of the prompt but its last position, as after a hand-off.
"""

from __future__ import annotations

import json
import random
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.vllm.recorded import wait_clean
from tests.vllm.servers import BLOCK, Pair

pytestmark = pytest.mark.timeout(900)
BLOCKS = (1, 2, 7, 20)  # that a prompt fills, but for its last token
ANSWER = 12
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def write_latent_model(folder: Path, words: Path) -> Path:
    """A random DeepSeek-V2 of two layers, with the sizes of latents that CPU kernels are made for, and the tokenizer of
    the model in `words`."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=2, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.1,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in words.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def latent_pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    latent = write_latent_model(tmp_path_factory.mktemp("latent") / "model", model)
    drafts = ("--speculative-config", json.dumps(DRAFTS))
    with Pair(latent, tmp_path_factory.mktemp("logs"), options=("--dtype", "bfloat16"), drafts=drafts) as started:
        yield started


def prompt_of(length: int, seed: int) -> list[int]:
    """The second half repeats the first, so that there is something to draft."""
    draw = random.Random(seed)
    half = [draw.randrange(4, 380) for _ in range(-(-length // 2))]
    return (half + half)[:length]


def alone(pair: Pair, prompt: list[int]) -> list[int]:
    """The decode server's answer, of what it computed itself, all but the last position before it was asked."""
    apart = {"cache_salt": secrets.token_hex(16)}
    pair.d.tokens(prompt, 1, **apart)
    return pair.d.tokens(prompt, ANSWER, **apart)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_latents_are_handed_over(latent_pair: Pair, blocks: int) -> None:
    prompt, before = prompt_of(blocks * BLOCK + 1, blocks), latent_pair.d.handed_over()
    answered = latent_pair.tokens(prompt, ANSWER)
    assert latent_pair.d.handed_over() - before == len(prompt) - 1
    assert answered == alone(latent_pair, prompt)


def test_what_is_cached_is_not_loaded(latent_pair: Pair) -> None:
    prompt = prompt_of(5 * BLOCK + 1, 100)
    latent_pair.d.tokens(prompt[: 2 * BLOCK + 1], 1)
    before = latent_pair.d.handed_over()
    assert len(latent_pair.tokens(prompt, ANSWER)) == ANSWER
    assert latent_pair.d.handed_over() - before == 3 * BLOCK


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_prompts_may_end_anywhere(latent_pair: Pair, length: int) -> None:
    before = latent_pair.d.handed_over()
    assert len(latent_pair.tokens(prompt_of(length, length), ANSWER)) == ANSWER
    assert latent_pair.d.handed_over() - before == length - 1


def test_the_decode_server_has_drafted(latent_pair: Pair) -> None:
    latent_pair.tokens(prompt_of(3 * BLOCK, 200), 4 * ANSWER)
    assert latent_pair.d.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_nothing_is_left(latent_pair: Pair) -> None:
    wait_clean(latent_pair.recordings)
