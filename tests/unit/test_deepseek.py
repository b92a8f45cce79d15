"""DeepSeek-V2 and V3 compute what transformers computes, out of latents in the cache; what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdbus.bus.errors import ConfigError
from pdbus.nodes.config import load as load_settings
from pdbus.nodes.host import Host
from pdbus.nodes.models.config import check_ranks, parse_config, resolve_model
from pdbus.nodes.models.mlp import Router
from pdbus.nodes.setup import set_up

from tests.deepseek_models import V2, V3, write_deepseek
from tests.torch_models import Loaded, Walk, cut, load, prompt_of, run
from tests.unit.test_torch_engine import ALL_LOGPROBS, LENGTH, VOCAB, expected, logprobs

BLOCKS = [9, 3, 6, 5, 12, 0]
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7,
    "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "V2": V2,
    "V2, queries compressed, experts by groups": V2 | GROUPED | {"q_lora_rank": 40},
    "V2, yarn": V2 | {"rope_scaling": YARN},
    "V3": V3,
    "V3, yarn": V3 | {"rope_scaling": YARN},
    "V3, longrope": V3 | {"rope_scaling": LONGROPE},
    "V3, queries straight, halves": V3 | {"q_lora_rank": None, "rope_interleave": False},
    "V3, biases, weights as they are": V3 | {"attention_bias": True, "norm_topk_prob": False},
    "V3, no experts": V3 | {"first_k_dense_replace": 3},
    "V3, experts everywhere, tied": V3 | {"first_k_dense_replace": 0, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("models") / "made", MODELS[request.param])


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(folder, blocks=32)


@pytest.mark.parametrize("chunks", [[LENGTH], cut(LENGTH, 16), [1] * LENGTH, [69, 1]])
def test_logits_equal_transformers(loaded: Loaded, reference: torch.nn.Module, chunks: list[int]) -> None:
    prompt = prompt_of(LENGTH, VOCAB)
    walk = Walk(loaded, 1, prompt, BLOCKS, chunks, ALL_LOGPROBS)
    run(loaded, [walk], 1)
    torch.testing.assert_close(logprobs(walk), expected(reference, prompt), atol=1e-4, rtol=0)


def test_a_step_mixes_prefill_chunks_and_decodes(loaded: Loaded, reference: torch.nn.Module) -> None:
    """Rows of one step go to different experts."""
    lengths = [1, 15, 40, 100]
    walks = [
        Walk(loaded, seq, prompt_of(n, VOCAB, seq), range(8 * seq, 8 * seq + 8), cut(n, 7 + 20 * seq), ALL_LOGPROBS)
        for seq, n in enumerate(lengths)
    ]
    run(loaded, walks, 5)
    for walk, length in zip(walks, lengths, strict=True):
        wanted = expected(reference, prompt_of(length, VOCAB, walk.seq))
        torch.testing.assert_close(logprobs(walk), wanted, atol=1e-4, rtol=0)


def test_the_cache_holds_one_latent_of_each_token(loaded: Loaded) -> None:
    geometry = loaded.args.geometry
    assert (geometry.kv_heads, geometry.kv_parts, geometry.head_dim) == (1, 1, 32 + 8)


# ---------------------------------------------------------------- one model


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("models") / "v3", V3)


@pytest.mark.parametrize("weights", ["float32", "fp16"])
def test_deterministic_rows_depend_on_their_own_prefix_alone(v3: Path, weights: str) -> None:
    """Neither chunks nor neighbours change a bit of the tokens or of the latents; experts see rows of both."""
    loaded = load(v3, deterministic=True, weights=weights)
    found = []
    for turn, chunks in enumerate([[300], cut(300, 7), cut(300, 50)]):
        walk = Walk(loaded, 0, prompt_of(300, VOCAB), range(20), chunks)
        others = [Walk(loaded, n + 1, prompt_of(9 * n + 5, VOCAB, n), range(20 + 5 * n, 25 + 5 * n), cut(9 * n + 5, 3))
                  for n in range(3 * turn)]  # fmt: skip
        run(loaded, [*others, walk], 6)
        found.append((walk.tokens, loaded.kv(range(20), 305).numpy().tobytes()))
    assert found[0] == found[1] == found[2]


def test_a_bfloat16_checkpoint_loses_nothing_in_fp16(v3: Path, tmp_path: Path) -> None:
    """V3's routers are float32 for transformers, whatever the checkpoint's type."""
    for file in v3.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(v3 / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded, prompt = load(tmp_path, blocks=16), prompt_of(LENGTH, VOCAB)
    walk = Walk(loaded, 1, prompt, BLOCKS, [30, 40], ALL_LOGPROBS)
    run(loaded, [walk], 1)
    torch.testing.assert_close(logprobs(walk), expected(model.eval(), prompt), atol=1e-4, rtol=0)


def test_speculation_changes_no_token(v3: Path) -> None:
    """Drafts are a few rows behind a prefix: neither a prompt's chunk nor one row of a batch."""
    prompt, found = prompt_of(10, VOCAB) * 4, []
    for speculate in (0, 6):
        loaded = load(v3, blocks=16, speculate=speculate)
        walk = Walk(loaded, 1, prompt, range(8), [40])
        while len(walk.tokens) < 24:
            [result] = loaded.engine.step([walk.next_row()])
            walk.tokens += [result.token, *(more.token for more in result.more)]
            walk._at += len(result.more)
        found.append(walk.tokens[:24])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "total"), [({}, 1.0), ({"num_experts_per_tok": 1}, None), ({"norm_topk_prob": False}, None)], ids=str
)
def test_v2_s_weights_are_normed_as_its_makers_do_it(change: dict[str, Any], total: float | None) -> None:
    """Of several experts they then sum to 1, without the factor that else scales them. transformers passes over it."""
    config = parse_config(V2 | {"norm_topk_prob": True} | change, {}).experts
    assert config is not None
    drawn = torch.randn(5, config.count, generator=torch.Generator().manual_seed(1))
    chosen, weights = Router(config, lambda x: x, None)(drawn)
    scores = drawn.softmax(-1).topk(config.chosen)
    plain = scores.values / scores.values.sum(-1, keepdim=True) if total else scores.values * 1.7
    torch.testing.assert_close(weights, plain)
    assert chosen.tolist() == scores.indices.tolist()


def test_a_published_configuration_is_read() -> None:
    """DeepSeek-V2-Lite's, as far as it says anything of its shape."""
    config = parse_config(
        {
            "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
            "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000, "routed_scaling_factor": 1.0,
            "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
            "vocab_size": 102400, "rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {},
    )  # fmt: skip
    assert (config.kv_heads, config.kv_parts, config.head_dim, config.layers) == (1, 1, 576, 27)
    assert config.rope.attention_factor == 1.0 and config.rope.score_factor > 1.58


def test_longrope_ends_where_other_factors_would_hold(tmp_path: Path) -> None:
    """Beyond it transformers turns all keys by other angles, which keys in a cache cannot follow."""
    assert parse_config(V3 | {"rope_scaling": LONGROPE}, {}).max_positions == 128
    folder = write_deepseek(tmp_path / "long", V3 | {"rope_scaling": LONGROPE})
    with pytest.raises(ConfigError, match=r"--max-model-len: 200 is more than the model's own limit, 128"):
        set_up(load_settings({"model": str(folder), "max_model_len": "200"}, host=HOST))


HOST = Host(cpus=(0,), memory_bytes=1 << 30, run_dir="/tmp", name_suffix="3f2a")


def test_a_node_sizes_its_memory_by_latents(v3: Path) -> None:
    """Every rank holds all of them."""
    for tp in ("1", "2"):
        made = set_up(load_settings({"model": str(v3), "tp": tp, "kv_blocks": "10", "role": "prefill"}, host=HOST))
        assert made.slab_bytes == (10 * 16 * 3 * (32 + 8) * 4,) * int(tp)
        assert made.geometry.kv_parts == 1


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("base", "change", "problem"),
    [
        (V3, {"kv_lora_rank": None}, "kv_lora_rank is None"),
        (V3, {"kv_lora_rank": "32"}, "kv_lora_rank is '32'"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank is 0"),
        (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, but must be even"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads is 2, but must be num_attention_heads, 4"),
        (V3, {"rope_interleave": "yes"}, "rope_interleave is 'yes'"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, but must be an integer, at least 0"),
        (V3, {"first_k_dense_replace": None}, "first_k_dense_replace is None"),
        (V3, {"n_routed_experts": 10**6}, "n_routed_experts is 1000000"),
        (V3, {"n_group": 3}, "n_group is 3, but must divide n_routed_experts, 8"),
        (V3, {"n_group": 8}, "n_group is 8, but must divide n_routed_experts, 8, into groups of at least 2"),
        (V3, {"topk_group": 5}, "topk_group is 5, but must be at most n_group, 4"),
        (V3, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but must be at most 4, the experts of 2 groups"),
        (V3, {"n_shared_experts": None}, "n_shared_experts is None"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported; supported: sigmoid"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported; supported: noaux_tc"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        (V3, {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        (V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (V2, {"topk_method": "best"}, "topk_method = 'best' is not supported; supported: greedy, group_limited_greedy"),
        (V2, {"topk_method": "group_limited_greedy"}, "n_group is None"),
        (V2, {"norm_topk_prob": 1}, "norm_topk_prob is 1, but must be true or false"),
        (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but must be at most 8"),
        (V3, {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3}}, "rope_scaling.short_factor is .* 4 numbers"),
        (V3, {"rope_scaling": LONGROPE | {"short_factor": 2.0}}, "rope_scaling.short_factor is 2.0"),
        (V3, {"rope_scaling": LONGROPE | {"short_factor": [1, "x", 1, 1]}}, r"short_factor\[1\] is 'x'"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "rope_scaling.mscale_all_dim is 0"),
    ],
)
def test_what_cannot_be_computed_is_refused(base: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--model: config.json: .*{problem}"):
        parse_config(base | change, {})


@pytest.mark.parametrize(
    ("change", "ranks", "problem"),
    [
        ({}, 3, "4 attention heads"),
        ({"moe_intermediate_size": 30}, 4, "30 channels of each expert"),
        ({"intermediate_size": 90}, 4, "90 channels of the feed-forward layers"),
    ],
)
def test_ranks_that_cannot_share_it_are_refused(change: dict[str, Any], ranks: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--tp: {ranks} ranks cannot share the model's {problem} equally"):
        check_ranks(parse_config(V3 | change, {}), ranks)


EXPERT, BIAS = "model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.2.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(EXPERT), f"has no tensor {EXPERT}"),
        (lambda t: t.pop(BIAS), f"has no tensor {BIAS}"),
        (lambda t: t.update({EXPERT: torch.ones(3, 3)}), rf"tensor {EXPERT} has shape \(3, 3\), .* \(32, 64\)"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": torch.ones(1)}),
            "has .*experts.8",
        ),
        (lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(1)}), "has a tensor model.layers.4.eh_proj"),
    ],
)
def test_a_checkpoint_that_is_not_the_config_s_is_named(tmp_path: Path, change: Any, problem: str) -> None:
    write_deepseek(tmp_path, V3 | {"num_nextn_predict_layers": 1})
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"^--model: .*{problem}"):
        resolve_model(str(tmp_path))


def test_an_expert_s_damaged_weights_are_named_though_no_row_may_be_its_own(tmp_path: Path) -> None:
    """The check of the first logits would not see it, and a request in the middle of serving would."""
    write_deepseek(tmp_path, V3)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[EXPERT][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"^--model: tensor {EXPERT} is damaged: "):
        load(tmp_path, blocks=2)


def test_layers_that_only_draft_are_passed_over(tmp_path: Path) -> None:
    """V3's checkpoints hold one behind the last layer."""
    write_deepseek(tmp_path, V3 | {"num_nextn_predict_layers": 1})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}, tmp_path / "model.safetensors")
    loaded = load(tmp_path, blocks=8)
    walk = Walk(loaded, 1, prompt_of(20, VOCAB), [1, 2], [20])
    run(loaded, [walk], 1)
    assert len(walk.tokens) == 1
