"""GGUF files: what comes out of the conversion computes what went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Sampling
from pdbus.nodes.models.config import resolve_model
from pdbus.nodes.models.gguf import GLOBAL_NAMES, LAYER_NAMES
from pdbus.nodes.models.random_llama import write_random_llama

from tests.torch_models import Walk, load, prompt_of, run

TOKENS = ["<end>", *"abcdefgh", "ab", "Ġ", "Ġa", *map(str, range(10))]
MERGES = ["a b", "Ġ a"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PD_CACHE", str(tmp_path / "cache"))
    return write_random_llama(tmp_path / "tiny", "tiny")


def write_gguf(source: Path, path: Path, quantize: str = "F32", **metadata: Any) -> Path:
    """The tiny Llama as llama.cpp would store it: its names, and q and k in interleaved rotary order."""
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_block_count(2)
    writer.add_context_length(1024)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(metadata.pop("tokenizer", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    padded = TOKENS + [f"[{i}]" for i in range(384 - len(TOKENS))]
    writer.add_token_list(padded)
    writer.add_token_types([3] + [1] * 383)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    names = {hf: name for name, hf in GLOBAL_NAMES.items()}
    for hf, tensor in load_file(source / "model.safetensors").items():
        name = names.get(hf) or _layer_name(hf)
        values = _interleaved(hf, tensor.numpy())
        kind = gguf.GGMLQuantizationType[quantize if values.ndim == 2 else "F32"]
        writer.add_tensor(metadata.get("rename", {}).get(name, name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer_name(hf: str) -> str:
    _, _, index, rest = hf.split(".", 3)
    name = next(name for name, suffix in LAYER_NAMES.items() if rest == f"{suffix}.weight")
    return f"blk.{index}.{name}.weight"


def _interleaved(hf: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    heads = 4 if hf.endswith("q_proj.weight") else 2 if hf.endswith("k_proj.weight") else 0
    if not heads:
        return values
    return values.reshape(heads, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)


def test_converted_weights_are_the_original_ones(source: Path, tmp_path: Path) -> None:
    model = resolve_model(str(write_gguf(source, tmp_path / "m.gguf")))
    found, wanted = (load_file(Path(folder) / "model.safetensors") for folder in (model.folder, source))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (model.name, model.config.eos_ids, model.config.norm_eps) == ("m", (0,), 1e-6)


def test_quantised_weights_compute_nearly_the_same(source: Path, tmp_path: Path) -> None:
    exact = load(source, blocks=4)
    quantised = load(write_gguf(source, tmp_path / "m.gguf", quantize="Q8_0"), blocks=4)
    values = []
    for loaded in (exact, quantised):
        walk = Walk(loaded, 1, prompt_of(20, 384), [1, 2], [20], Sampling(logprobs=5))
        run(loaded, [walk], 1)
        assert walk.results[0].logprob is not None
        values.append(dict(walk.results[0].logprob.top))
    assert max(values[0], key=values[0].__getitem__) in values[1]


def test_a_conversion_is_made_once_per_content(source: Path, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "m.gguf")
    first = resolve_model(str(path)).folder
    assert resolve_model(str(path)).folder == first
    write_gguf(source, path, quantize="F16")
    assert resolve_model(str(path)).folder != first


def test_tokenizer_and_chat_template_come_along(source: Path, tmp_path: Path) -> None:
    folder = Path(resolve_model(str(write_gguf(source, tmp_path / "m.gguf"))).folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab 12<end>").tokens == ["ab", "Ġ", "1", "2", "<end>"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"architecture": "gemma"}, "'gemma' is not supported; supported: 'llama'"),
        ({"tokenizer": "llama"}, "tokenizer of kind 'llama'"),
        ({"rename": {"output_norm.weight": "blk.0.attn_q_norm.weight"}}, "a tensor blk.0.attn_q_norm.weight"),
        ({"rename": {"output_norm.weight": "rope_freqs.weight"}}, "no tensor model.norm.weight"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    source: Path, tmp_path: Path, metadata: dict[str, Any], problem: str
) -> None:
    path = write_gguf(source, tmp_path / "m.gguf", **metadata)
    with pytest.raises(ConfigError, match=problem) as caught:
        resolve_model(str(path))
    assert caught.value.setting == "--model"


@pytest.mark.parametrize("length", [0, 3, 40, 5000, -1000])
def test_a_cut_file_is_named(source: Path, tmp_path: Path, length: int) -> None:
    path = write_gguf(source, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"m\.gguf is no GGUF file, or is truncated or damaged"):
        resolve_model(str(path))
    assert list((tmp_path / "cache" / "models").iterdir()) == []
