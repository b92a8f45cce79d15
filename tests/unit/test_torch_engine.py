"""The torch engine computes what transformers computes, however the work is cut and whoever else is in the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pdbus.bus.errors import ConfigError, LocalProtocolError
from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector.ipc import StepRow
from pdbus.connector.slab import Slab
from pdbus.nodes.engines.torch_engine import TorchEngine
from pdbus.nodes.models.random_llama import write_random_llama

from tests.torch_models import Loaded, Walk, cut, load, prompt_of, run

VOCAB = 384
LENGTH = 70
ALL_LOGPROBS = Sampling(logprobs=VOCAB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture
def tiny(folder: Path) -> Loaded:
    return load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


def expected(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """The reference's log-probabilities after the last token, [vocab]."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)


def logprobs(walk: Walk) -> torch.Tensor:
    """All log-probabilities behind the first sampled token, [vocab]."""
    found = walk.results[0].logprob
    assert found is not None
    values = torch.empty(VOCAB)
    for token, value in found.top:
        values[token] = value
    return values


@pytest.mark.parametrize("chunks", [[LENGTH], cut(LENGTH, 16), cut(LENGTH, 33), [1] * LENGTH, [69, 1]])
def test_logits_equal_transformers(tiny: Loaded, reference: LlamaForCausalLM, chunks: list[int]) -> None:
    prompt = prompt_of(LENGTH, VOCAB)
    walk = Walk(tiny, 1, prompt, [9, 3, 60, 5, 12, 0], chunks, ALL_LOGPROBS)
    run(tiny, [walk], 1)
    torch.testing.assert_close(logprobs(walk), expected(reference, prompt), atol=1e-4, rtol=0)


def test_greedy_tokens_equal_transformers(tiny: Loaded, reference: LlamaForCausalLM) -> None:
    prompt = prompt_of(20, VOCAB, seed=3)
    walk = Walk(tiny, 1, prompt, [4, 2, 7], [20])
    run(tiny, [walk], 16)
    wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert walk.tokens == wanted[0, 20:].tolist()


def test_a_step_mixes_prefill_chunks_and_decodes(tiny: Loaded, reference: LlamaForCausalLM) -> None:
    """Short and long contexts, first chunks and later ones, all packed into the same steps."""
    lengths = [1, 15, 40, 300, 16, 270]
    walks, free = [], iter(range(64))
    for seq, length in enumerate(lengths):
        blocks = [next(free) for _ in range(0, length + 5, 16)]
        prompt = prompt_of(length, VOCAB, seed=seq)
        walks.append(Walk(tiny, seq, prompt, blocks, cut(length, 7 + 40 * (seq % 3)), ALL_LOGPROBS))
    run(tiny, walks, 5)
    for seq, length in enumerate(lengths):
        wanted = expected(reference, prompt_of(length, VOCAB, seed=seq))
        torch.testing.assert_close(logprobs(walks[seq]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", [1, 17, 20, LENGTH - 1])
@pytest.mark.parametrize("chunks", [[LENGTH], cut(LENGTH, 16), [69, 1]])
def test_scores_of_the_prompt_equal_transformers(
    tiny: Loaded, reference: LlamaForCausalLM, chunks: list[int], first: int
) -> None:
    """In the same steps another sequence is decoded, which must not notice."""
    prompt = prompt_of(LENGTH, VOCAB)
    alone = Walk(tiny, 3, prompt_of(5, VOCAB, seed=9), [20], [5])
    run(tiny, [alone], 6)
    walk = Walk(tiny, 1, prompt, [9, 3, 60, 5, 12, 0], chunks, Sampling(prompt_logprobs=2, prompt_logprobs_from=first))
    beside = Walk(tiny, 2, prompt_of(5, VOCAB, seed=9), [21], [5])
    run(tiny, [walk, beside], 6)
    assert beside.tokens == alone.tokens
    with torch.inference_mode():
        wanted = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1)
    assert len(walk.scores) == LENGTH - first
    for i, score in enumerate(walk.scores, first - 1):
        assert score.logprob == pytest.approx(float(wanted[i, prompt[i + 1]]), abs=1e-4)
        assert [value for _, value in score.top] == pytest.approx(wanted[i].topk(2).values.tolist(), abs=1e-4)


ROPES: dict[str, dict[str, float]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn of DeepSeek": {
        "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 20.0,
    },
    "yarn, whole": {
        "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False, "attention_factor": 1.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", *ROPES])
def test_variants_equal_transformers(tmp_path: Path, folder: Path, kind: str) -> None:
    """Biases of Qwen2's projections, Qwen3's norms of heads, tied embeddings; scaled rotary frequencies."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "qwen2":
        model: torch.nn.Module = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True))
    else:
        scaling = {"rope_type": kind.split()[0].strip(","), "rope_theta": 10_000.0, **ROPES[kind]}
        model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=scaling))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter)
    model.eval().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    loaded, prompt = load(tmp_path, blocks=16), prompt_of(LENGTH, VOCAB)
    walk = Walk(loaded, 1, prompt, [9, 3, 6, 5, 12, 0], [30, 40], ALL_LOGPROBS)
    run(loaded, [walk], 1)
    torch.testing.assert_close(logprobs(walk), expected(model, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", ["auto", "float32"])
def test_a_bfloat16_checkpoint_loses_nothing_in_fp16(tmp_path: Path, folder: Path, weights: str) -> None:
    """Both ways of holding it compute what transformers does with its weights in float32."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded, prompt = load(tmp_path, blocks=16, weights=weights), prompt_of(LENGTH, VOCAB)
    walk = Walk(loaded, 1, prompt, [9, 3, 6, 5, 12, 0], [30, 40], ALL_LOGPROBS)
    run(loaded, [walk], 1)
    torch.testing.assert_close(logprobs(walk), expected(model, prompt), atol=1e-4, rtol=0)


def test_a_prefix_that_another_sequence_computed_is_used(tiny: Loaded, reference: LlamaForCausalLM) -> None:
    prompt = prompt_of(40, VOCAB)
    run(tiny, [Walk(tiny, 1, prompt, [5, 6, 7], [40])], 1)
    tiny.engine.open(2, prompt, ALL_LOGPROBS)
    row = StepRow(seq=2, start=32, count=8, new_blocks=pack_u32([5, 6, 20]), sample=True)
    [result] = tiny.engine.step([row])
    tiny.engine.close(2)
    assert result.token == int(expected(reference, prompt).argmax())


def test_a_preempted_sequence_starts_over_in_other_blocks(tiny: Loaded) -> None:
    """`reset` empties the block table; the tokens sampled so far stay known and are computed like a prompt."""
    prompt = prompt_of(20, VOCAB)
    straight = Walk(tiny, 1, prompt, [1, 2, 3], [20])
    run(tiny, [straight], 6)
    preempted = Walk(tiny, 2, prompt, [4, 5], [20])
    for _ in range(3):
        preempted.take(tiny.engine.step([preempted.next_row()])[0])
    again = StepRow(seq=2, start=0, count=23, new_blocks=pack_u32([8, 9, 10]), reset=True, sample=True)
    preempted.take(tiny.engine.step([again])[0])
    tiny.engine.close(2)
    assert preempted.tokens == straight.tokens[:4]


def test_a_forced_token_is_continued_from(tiny: Loaded) -> None:
    """The decode node: KV of the prompt is there, the first token comes from elsewhere."""
    prompt = prompt_of(20, VOCAB)
    walk = Walk(tiny, 1, prompt, [1, 2, 3], [20])
    run(tiny, [walk], 3)
    tiny.engine.open(2, prompt, Sampling())
    tiny.engine.force(2, walk.tokens[:1])
    [result] = tiny.engine.step([StepRow(seq=2, start=20, count=1, new_blocks=pack_u32([1, 2]), sample=True)])
    tiny.engine.close(2)
    assert result.token == walk.tokens[1]


def test_skip_sampling_computes_the_same_kv_and_no_token(folder: Path, tiny: Loaded) -> None:
    prompt, blocks = prompt_of(20, VOCAB), [1, 2]
    run(tiny, [Walk(tiny, 1, prompt, blocks, [20])], 1)
    skipping = load(folder, blocks=8, skip_sampling=True)
    skipping.engine.open(1, prompt, Sampling())
    [result] = skipping.engine.step([StepRow(seq=1, start=0, count=20, new_blocks=pack_u32(blocks), sample=True)])
    assert result.token == -1
    assert torch.equal(skipping.kv(blocks, 20), tiny.kv(blocks, 20))


def test_warm_up_leaves_the_slab_alone(folder: Path) -> None:
    loaded = load(folder, blocks=4)
    loaded.engine.warm_up()
    assert bool(loaded.memory.isnan().all())


def test_the_slab_of_a_worker_is_written_in_place(folder: Path, tiny: Loaded) -> None:
    slab = Slab.create(tiny.args.geometry.block_bytes * 4)
    engine = TorchEngine(replace(tiny.args, blocks=4), slab.memory)
    engine.open(1, prompt_of(5, VOCAB), Sampling())
    engine.step([StepRow(seq=1, start=0, count=5, new_blocks=pack_u32([2]), sample=True)])
    block = tiny.args.geometry.block_bytes
    written = [any(slab.memory[i * block : (i + 1) * block]) for i in range(4)]
    assert written == [False, False, True, False]
    del engine
    slab.close()


BLOCKS = pack_u32([1, 2])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (StepRow(seq=1, start=0, count=21, new_blocks=BLOCKS), "has 20 tokens"),
        (StepRow(seq=1, start=-1, count=2, new_blocks=BLOCKS), "positions -1 to 1"),
        (StepRow(seq=1, start=0, count=0, new_blocks=BLOCKS), "positions 0 to 0"),
        (StepRow(seq=1, start=0, count=10, new_blocks=BLOCKS, sample=True), "would sample at 10"),
        (StepRow(seq=1, start=0, count=20, new_blocks=pack_u32([1])), "1 blocks"),
        (StepRow(seq=1, start=0, count=20, new_blocks=pack_u32([1, 64])), "block 64"),
        (StepRow(seq=7, start=0, count=1), "sequence 7 is not open"),
    ],
)
def test_a_wrong_row_is_refused_and_changes_nothing(tiny: Loaded, row: StepRow, problem: str) -> None:
    """A block table that points outside the slab must never reach the copy that writes there."""
    tiny.engine.open(1, prompt_of(20, VOCAB), Sampling())
    tiny.memory.fill_(float("nan"))
    with pytest.raises(LocalProtocolError, match=problem):
        tiny.engine.step([row])
    assert bool(tiny.memory.isnan().all())
    [result] = tiny.engine.step([StepRow(seq=1, start=0, count=20, new_blocks=BLOCKS, sample=True)])
    assert result.token >= 0
    tiny.engine.close(1)


def test_a_token_outside_the_vocabulary_is_refused(tiny: Loaded) -> None:
    with pytest.raises(LocalProtocolError, match="0 to 383"):
        tiny.engine.open(1, [5, VOCAB], Sampling())


def test_min_tokens_keeps_the_end_away(folder: Path, tiny: Loaded) -> None:
    """A stop token that greedy decoding would choose first cannot come before min_tokens."""
    prompt = prompt_of(20, VOCAB)
    free = Walk(tiny, 1, prompt, [1, 2, 3], [20])
    run(tiny, [free], 1)
    held = Walk(tiny, 1, prompt, [1, 2, 3], [20], Sampling(min_tokens=3, stop_token_ids=(free.tokens[0],)))
    run(tiny, [held], 3)
    assert free.tokens[0] not in held.tokens


def test_damaged_weights_are_named(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"--model: .*weights are damaged"):
        load(tmp_path, blocks=2).engine.warm_up()


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"dtype": "int8"}, "--dtype"),
        ({"device": "tpu"}, "--device"),
        ({"max_model_len": 5000}, "--max-model-len"),
        ({"deterministic": True, "dtype": "bfloat16"}, "--deterministic"),
        ({"weights": "int4"}, "--weights"),
    ],
)
def test_settings_that_cannot_work_are_named(tiny: Loaded, options: dict[str, object], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TorchEngine(replace(tiny.args, **options), tiny.memory)
    assert caught.value.setting == setting


def test_bfloat16_is_close_where_the_processor_has_it(folder: Path, tiny: Loaded) -> None:
    try:
        half = load(folder, dtype="bfloat16")
    except ConfigError as e:
        pytest.skip(str(e))
    half.engine.warm_up()
    prompt, values = prompt_of(40, VOCAB), []
    for loaded in (tiny, half):
        walk = Walk(loaded, 1, prompt, [1, 2, 3], [30, 10], ALL_LOGPROBS)
        run(loaded, [walk], 2)
        values.append(logprobs(walk))
    assert torch.corrcoef(torch.stack(values))[0, 1] > 0.99
