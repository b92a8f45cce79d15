"""Model folders: what is read from them, and the one clear message for each way they can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from pdbus.bus.errors import ConfigError
from pdbus.nodes.engines.linear import Linear, plain
from pdbus.nodes.models.checkpoint import open_checkpoint
from pdbus.nodes.models.config import ModelConfig, parse_config, resolve_model
from pdbus.nodes.models.fingerprint import weights_fingerprint
from pdbus.nodes.models.loader import load_weights
from pdbus.nodes.models.random_llama import write_random_llama
from pdbus.nodes.models.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 384, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WEIGHTS = "model.safetensors"
NORM, UP = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


# ---------------------------------------------------------------- configuration


def test_sizes_are_read(original: Path) -> None:
    model = resolve_model(str(original))
    c = model.config
    assert (model.name, c.layers, c.heads, c.kv_heads, c.head_dim, c.vocab) == ("tiny", 2, 4, 2, 16, 384)
    assert (c.eos_ids, c.bos_ids, c.max_positions) == ((2,), (1,), 1024)


def test_older_configs_leave_sizes_to_be_derived() -> None:
    config = parse_config(LLAMA, {})
    assert (config.kv_heads, config.head_dim, config.rope) == (4, 16, RopeConfig())


def test_generation_config_knows_more_ends() -> None:
    assert parse_config(LLAMA, {"eos_token_id": [2, 7]}).eos_ids == (2, 7)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
    ],
)
def test_all_spellings_of_rope_mean_the_same(spelling: dict[str, Any]) -> None:
    assert parse_config(LLAMA | spelling, {}).rope == RopeConfig(theta=5e5, kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "architecture none"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 3}, "over 3 KV heads"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "weird"}, "rope_parameters": {"rope_theta": 1e4}}, "type 'weird' is not supported"),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "dynamic"}},
            "rope_parameters.rope_type 'dynamic'",
        ),
        ({"rope_scaling": LINEAR, "rope_parameters": LLAMA3}, "rope type 'linear' and 'llama3'"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta 10000 and 500000"),
        ({"rope_scaling": LINEAR | {"type": "llama3"}}, "rope_type is 'linear', but type is 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor is 1, but must be more"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"sliding_window": 64, "max_position_embeddings": 128}, "sliding_window = 64"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_config(LLAMA | change, {})
    assert caught.value.setting == "--model"


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": LINEAR | {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": {}, "rope_parameters": LINEAR},
        {"rope_scaling": None, "rope_parameters": LINEAR | {"rope_theta": 2e5}, "rope_theta": 3e5},
        {"rope_parameters": None, "rope_theta": 3e5},
        {"rope_scaling": LLAMA3, "max_position_embeddings": 4096},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 512}, "max_position_embeddings": 4096},
    ],
)
def test_rope_is_read_as_transformers_reads_it(change: dict[str, Any]) -> None:
    """A rope_scaling beside rope_parameters was passed over: another model was computed, without a word."""
    theirs = getattr(LlamaConfig.from_dict(LLAMA | change), "rope_parameters", None)
    if theirs is None:
        pytest.skip("this version of transformers has no rope_parameters")
    ours = parse_config(LLAMA | change, {}).rope
    assert (ours.kind, ours.theta) == (theirs["rope_type"], theirs["rope_theta"])
    assert ours.factor == theirs.get("factor", 1.0)
    if ours.kind == "llama3":
        assert ours.original_positions == theirs["original_max_position_embeddings"]


WHOLE = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "num_hidden_layers", "vocab_size", "max_position_embeddings", "sliding_window",
)  # fmt: skip
NOT_WHOLE = ("x", "4", 1.5, True, [1], {}, -1, 0, 10**9 * 8)
NOT_REAL = ("x", "1e-6", True, [1.0], {}, -1, 0, float("nan"), float("inf"), 10**400)
NOT_SWITCH = ("false", 0, 1, [], {})
NOT_IDS = ("x", "2", 1.5, True, {}, [[2]], [2, "x"], -1, 384, 10**9)
WRONG = {
    **dict.fromkeys(WHOLE, NOT_WHOLE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), NOT_REAL),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), NOT_SWITCH),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ("x", 4, [1], True)),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), NOT_IDS),
    "hidden_act": (1, [], {}),
    "architectures": ("LlamaForCausalLM", 5, {"a": 1}, True, [None], [[]]),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_value_of_a_wrong_type_or_range_is_named(key: str) -> None:
    """Each of these was a traceback, or was taken and computed something else."""
    for value in WRONG[key]:
        with pytest.raises(ConfigError, match=f"config.json: {key}|config.json: architecture") as caught:
            parse_config(LLAMA | {key: value}, {})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "rope_theta", "original_max_position_embeddings"])
def test_a_wrong_value_within_the_rope_settings_is_named(key: str) -> None:
    for value in NOT_REAL:
        with pytest.raises(ConfigError, match=f"config.json: rope_scaling.{key} is "):
            parse_config(LLAMA | {"rope_scaling": LLAMA3 | {key: value}}, {})


@pytest.mark.parametrize("value", NOT_IDS)
def test_a_wrong_end_in_generation_config_is_named(value: object) -> None:
    """An end outside of the vocabulary would be an index out of range in every step."""
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: eos_token_id is .* but must be a token id, 0 to 383"
    ):
        parse_config(LLAMA, {"eos_token_id": value})


def test_resolving_a_model_imports_no_torch(original: Path) -> None:
    """Control resolves models and must start in a moment."""
    program = (
        "import sys; from pdbus.nodes.models.config import resolve_model as r;"
        "from pdbus.nodes.models.fingerprint import weights_fingerprint as f;"
        f"r({str(original)!r}), f({str(original)!r}); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ---------------------------------------------------------------- damaged folders


def cut_weights(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:50])


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: shutil.rmtree(folder), "is no folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read .*config.json"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "holds no JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot read .*config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no model.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "is no safetensors file, or is damaged"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 100), "is no safetensors file, or is damaged"),
        (cut_header, "is no safetensors file, or is damaged"),
        (cut_weights, "is truncated"),
        (edit_tensors(lambda t: t.pop(NORM)), f"has no tensor {NORM}"),
        (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "has a tensor extra"),
        (edit_tensors(lambda t: t.update({NORM: torch.ones(63)})), r"shape \(63,\), config.json asks for \(64,\)"),
        (edit_tensors(lambda t: t.update({NORM: torch.ones(64).to(torch.int8)})), "is I8; supported: F32"),
    ],
)
def test_a_damaged_folder_is_named(folder: Path, damage: Callable[[Path], object], problem: str) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=problem) as caught:
        resolve_model(str(folder))
    assert caught.value.setting == "--model"
    assert "\n" not in str(caught.value)


def split(folder: Path) -> None:
    """The same checkpoint in two shards with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


def test_shards_load_like_one_file(original: Path, folder: Path) -> None:
    split(folder)
    config = resolve_model(str(folder)).config
    one, two = (loaded(f, config) for f in (original, folder))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def loaded(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The matrices that linears are made of, by the name of their first tensor."""
    found: dict[str, torch.Tensor] = {}

    def make(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        found[name] = weight
        return plain(weight, bias)

    load_weights(folder, config, torch.float32, "cpu", make)
    return found


def test_a_missing_shard_is_named(folder: Path) -> None:
    split(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"b\.safetensors is missing"):
        resolve_model(str(folder))


# ---------------------------------------------------------------- fingerprint


def test_fingerprint_is_stable(original: Path, folder: Path) -> None:
    """Not a matter of path, nor of how the checkpoint is sharded."""
    assert weights_fingerprint(folder) == weights_fingerprint(original)
    split(folder)
    assert weights_fingerprint(folder) == weights_fingerprint(original)


@pytest.mark.parametrize(
    "change",
    [
        edit_tensors(lambda t: t[NORM].add_(1e-3)),
        edit_tensors(lambda t: t[UP].add_(1e-3)),
        edit_tensors(lambda t: t.update({UP: t[UP].to(torch.bfloat16)})),
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("1e-06", "1e-05")),
    ],
)
def test_fingerprint_tells_other_weights(original: Path, folder: Path, change: Callable[[Path], object]) -> None:
    change(folder)
    assert weights_fingerprint(folder) != weights_fingerprint(original)


def test_fingerprint_tells_another_dtype_at_load(original: Path) -> None:
    assert weights_fingerprint(original, "bfloat16") != weights_fingerprint(original)


def test_fingerprint_tells_weights_that_are_rounded(original: Path) -> None:
    assert weights_fingerprint(original, weights="float32") == weights_fingerprint(original)
    assert weights_fingerprint(original, weights="fp16") != weights_fingerprint(original)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_fingerprint_does_not_tell_how_weights_are_held_without_loss(folder: Path, stored: torch.dtype) -> None:
    """A node with FBGEMM may serve with one that has none; bitwise they would not be equal."""
    edit_tensors(lambda t: t.update({name: w.bfloat16().to(stored) for name, w in t.items()}))(folder)
    assert weights_fingerprint(folder, weights="fp16") == weights_fingerprint(folder)
    one, other = (weights_fingerprint(folder, weights=kind, bitwise=True) for kind in ("fp16", "float32"))
    assert one != other


# ---------------------------------------------------------------- random models


def test_random_models_are_written_once_and_alike(original: Path, tmp_path: Path) -> None:
    again = write_random_llama(tmp_path / "again", "tiny")
    assert (again / WEIGHTS).read_bytes() == (original / WEIGHTS).read_bytes()
    written = (again / WEIGHTS).stat().st_mtime_ns
    write_random_llama(again, "tiny")
    assert (again / WEIGHTS).stat().st_mtime_ns == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["again"]


def test_checkpoint_lists_what_is_stored(original: Path) -> None:
    stored = open_checkpoint(original)[UP]
    assert (stored.dtype, stored.shape, stored.size) == ("F32", (128, 64), 128 * 64 * 4)
