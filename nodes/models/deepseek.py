"""What DeepSeek's config.json says beyond a Llama's: latent attention, and experts in place of a feed-forward layer."""

from __future__ import annotations

from pdbus.bus.wire import Declared

from .fields import Fields

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
EXPERTS_MAX = 1024  # each is a few tensors, looked up one by one; the largest models have some hundreds
TOP_PER_GROUP = 2  # the best experts of a group that V3 judges it by


class LatentConfig(Declared):
    """Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434). Sizes in channels, the last four of a head.

    A token's cache row is its latent, `rank` channels that keys and values of all heads are made of, and the rotated
    part of its key, `rope`, which all heads share.
    """

    q_rank: int  # of the queries' own latent; 0: they have none
    rank: int
    nope: int  # of a key or query, not rotated
    rope: int  # of a key or query, rotated
    value: int
    interleaved: bool  # rotated channels stand in pairs, not in halves
    bias: bool


class ExpertsConfig(Declared):
    """A mixture of experts in every layer from `first_layer` on: `chosen` of `count` for each token, and `shared` ones.

    Experts are chosen among the best `groups_chosen` of `groups` groups alone. `sigmoid` is V3's way: scores by
    themselves, a bias that counts for the choice only, groups judged by their best two; else softmax and the best one.
    """

    first_layer: int
    count: int
    chosen: int
    shared: int
    ffn: int  # of each
    groups: int
    groups_chosen: int
    sigmoid: bool
    normed: bool  # weights of the chosen sum to 1, before they are scaled
    scale: float


def read_latent(fields: Fields, architecture: str, heads: int) -> LatentConfig:
    """Raises ConfigError naming `--model`, the file and the key."""
    if fields.whole("num_key_value_heads", heads) != heads:
        raise fields.wrong("num_key_value_heads", f"must be num_attention_heads, {heads}")
    rope = fields.whole("qk_rope_head_dim")
    if rope % 2:
        raise fields.wrong("qk_rope_head_dim", "must be even")
    return LatentConfig(
        q_rank=fields.whole("q_lora_rank") if "q_lora_rank" in fields else 0,
        rank=fields.whole("kv_lora_rank"),
        nope=fields.whole("qk_nope_head_dim"),
        rope=rope,
        value=fields.whole("v_head_dim"),
        interleaved=architecture == "DeepseekV2ForCausalLM" or fields.switch("rope_interleave", True),
        bias=fields.switch("attention_bias", False),
    )


def read_experts(fields: Fields, architecture: str, layers: int) -> ExpertsConfig | None:
    """None where every layer has a feed-forward layer. Raises ConfigError naming `--model`, the file and the key."""
    first = fields.whole("first_k_dense_replace", least=0)
    if first >= layers:
        return None
    v3 = architecture == "DeepseekV3ForCausalLM"
    grouped = _check_method(fields, v3)
    count = fields.whole("n_routed_experts", most=EXPERTS_MAX)
    groups, groups_chosen = _groups(fields, count, TOP_PER_GROUP if v3 else 1) if grouped else (1, 1)
    chosen = fields.whole("num_experts_per_tok")
    if chosen > (most := count // groups * groups_chosen):
        raise fields.wrong("num_experts_per_tok", f"must be at most {most}, the experts of {groups_chosen} groups")
    normed = fields.switch("norm_topk_prob", v3) and (v3 or chosen > 1)
    scale = fields.real("routed_scaling_factor")
    return ExpertsConfig(
        first_layer=first,
        count=count,
        chosen=chosen,
        shared=fields.whole("n_shared_experts"),
        ffn=fields.whole("moe_intermediate_size"),
        groups=groups,
        groups_chosen=groups_chosen,
        sigmoid=v3,
        normed=normed,
        scale=scale if v3 or not normed else 1.0,  # DeepSeek's own code for V2; transformers passes over the key
    )


def _check_method(fields: Fields, v3: bool) -> bool:
    """Refuses other ways to choose experts. Are they chosen by groups?"""
    scores = "sigmoid" if v3 else "softmax"
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    if fields.text("scoring_func", scores) != scores:
        raise fields.error("scoring_func", f"= {fields.get('scoring_func')!r} is not supported; supported: {scores}")
    method = fields.text("topk_method", methods[0])
    if method not in methods:
        raise fields.error("topk_method", f"= {method!r} is not supported; supported: {', '.join(methods)}")
    if fields.whole("moe_layer_freq", 1) != 1:
        raise fields.error("moe_layer_freq", f"= {fields.get('moe_layer_freq')!r} is not supported")
    return method != "greedy"


def _groups(fields: Fields, count: int, size_min: int) -> tuple[int, int]:
    groups = fields.whole("n_group")
    if count % groups or count // groups < size_min:
        raise fields.wrong("n_group", f"must divide n_routed_experts, {count}, into groups of at least {size_min}")
    chosen = fields.whole("topk_group")
    if chosen > groups:
        raise fields.wrong("topk_group", f"must be at most n_group, {groups}")
    return groups, chosen
