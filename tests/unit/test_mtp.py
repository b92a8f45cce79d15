"""The draft layer of DeepSeek-V3: it computes what its paper says, and what it guesses changes no token.

transformers passes over it. The reference puts it together from the formula (arXiv:2412.19437, section 2.2), with a
transformer of one layer as its block: no cache, no packing, all positions anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3Model

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32
from pdbus.connector.ipc import StepRow
from pdbus.connector.readable import unreadable
from pdbus.nodes.config import load as load_settings
from pdbus.nodes.host import Host
from pdbus.nodes.setup import set_up

from tests.deepseek_models import V2, V3, write_deepseek, write_drafting
from tests.torch_models import Loaded, Walk, cut, load, prompt_of, run
from tests.unit.test_drafts import SAMPLINGS, answer

VOCAB, LENGTH = 384, 70
BLOCKS = [9, 3, 6, 5, 12, 0]
MTP: dict[str, Any] = {"speculate": 1, "speculate_method": "mtp"}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafting(tmp_path_factory.mktemp("models") / "guessing", V3, guessing=True)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafting(tmp_path_factory.mktemp("models") / "wrong", V3, guessing=False)


class Reference:
    def __init__(self, folder: Path) -> None:
        self._main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = json.loads((folder / "config.json").read_text())
        layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"] > config["num_hidden_layers"]
        block = {**config, "num_hidden_layers": 1, "first_k_dense_replace": int(dense)}
        self._block = DeepseekV3Model(DeepseekV3Config(**block)).eval()
        prefix = f"model.layers.{layers}."
        tensors = load_file(folder / "model.safetensors")
        self._own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        state = {f"layers.0.{name}": t for name, t in self._own.items()}
        experts = self._block.state_dict()
        self._block.load_state_dict(
            _fused(state, experts) | {"norm.weight": self._own["shared_head.norm.weight"]}, strict=False
        )

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[n - 1, vocab]: at i what comes after tokens[i + 1], by that token and the hidden state of position i."""
        ids = torch.tensor([tokens])
        hidden = self._main.model(ids).last_hidden_state[:, :-1]
        following = self._main.model.embed_tokens(ids[:, 1:])
        both = [_normed(following, self._own["enorm.weight"]), _normed(hidden, self._own["hnorm.weight"])]
        joined = torch.cat(both, -1) @ self._own["eh_proj.weight"].T
        logits: torch.Tensor = self._main.lm_head(self._block(inputs_embeds=joined).last_hidden_state)[0]
        return logits


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def _fused(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers holds all experts of a layer in two tensors."""
    prefix = "layers.0.mlp.experts."
    if f"{prefix}gate_up_proj" not in wanted:
        return state
    each = range(wanted[f"{prefix}gate_up_proj"].shape[0])
    both = [torch.cat([state[f"{prefix}{i}.{name}_proj.weight"] for name in ("gate", "up")]) for i in each]
    down = [state[f"{prefix}{i}.down_proj.weight"] for i in each]
    return state | {f"{prefix}gate_up_proj": torch.stack(both), f"{prefix}down_proj": torch.stack(down)}


def drafted(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits that the engine drafts by, as it goes on."""
    found: list[torch.Tensor] = []
    made = loaded.engine._draft_logits

    def keep(*args: Any) -> torch.Tensor | None:
        logits = made(*args)
        if logits is not None:
            found.append(logits.clone())
        return logits

    monkeypatch.setattr(loaded.engine, "_draft_logits", keep)
    return found


def speak(walks: list[Walk], loaded: Loaded, steps: int) -> list[tuple[list[int], list[int]]]:
    """All walks together, their prompts and so many decode steps: the tokens of each, and how many they were after each
    step that sampled some."""
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in walks]
    while any(len(ends) < steps for _, ends in found):
        going = [i for i, (_, ends) in enumerate(found) if len(ends) < steps]
        results = loaded.engine.step([walks[i].next_row() for i in going])
        for i, result in zip(going, results, strict=True):
            walks[i].take(result)
            if result.token >= 0:
                walks[i]._at += len(result.more)
                tokens, ends = found[i]
                tokens += [result.token, *(more.token for more in result.more)]
                ends.append(len(tokens))
    return found


KINDS: dict[str, dict[str, Any]] = {
    "V3, yarn, biases": V3 | {"rope_scaling": YARN, "attention_bias": True},
    "V3, no experts, queries straight": V3 | {"first_k_dense_replace": 4, "q_lora_rank": None},
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS] + ["V3"])
def test_it_computes_what_its_paper_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunks: after the prompt, and after each token that follows."""
    folder = write_drafting(tmp_path / "made", KINDS.get(kind, V3), guessing=False)
    reference, prompt = Reference(folder), prompt_of(LENGTH, VOCAB)
    for chunks in ([LENGTH], cut(LENGTH, 16), [69, 1]):
        loaded = load(folder, blocks=32, **MTP)
        walk = Walk(loaded, 1, prompt, BLOCKS, chunks)
        found = drafted(loaded, monkeypatch)
        tokens, ends = speak([walk], loaded, 6)[0]
        with torch.inference_mode():
            wanted = reference.logits([*prompt, *tokens])[[LENGTH + end - 2 for end in ends]]
        torch.testing.assert_close(torch.cat(found), wanted, atol=1e-4, rtol=0)
        assert [result.draft for result in walk.results] == wanted.argmax(-1).tolist()


@pytest.mark.long
def test_neighbours_of_all_kinds_change_no_draft(wrong: Path) -> None:
    lengths = [3, 15, 40, 100, 300]
    alone, together = [], load(wrong, blocks=64, **MTP)
    for seq, n in enumerate(lengths):
        one = load(wrong, blocks=64, **MTP)
        alone.append(Walk(one, seq, prompt_of(n, VOCAB, seq), range(20), [n]))
        speak(alone[-1:], one, 5)
    free = iter(range(64))
    walks = [
        Walk(together, seq, prompt_of(n, VOCAB, seq), [next(free) for _ in range(0, n + 8, 16)], cut(n, 7 + 20 * seq))
        for seq, n in enumerate(lengths)
    ]
    speak(walks, together, 5)
    for walk, one in zip(walks, alone, strict=True):
        assert [(r.token, r.draft) for r in walk.results] == [(r.token, r.draft) for r in one.results]


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_those_without_drafts(guessing: Path, wrong: Path, sampling: dict[str, Any]) -> None:
    asked = Sampling(max_tokens=40, **sampling)
    for folder in (guessing, wrong):
        for prompt in ([9], prompt_of(50, VOCAB)):
            plain, steps = answer(load(folder, deterministic=True), prompt, asked)
            found, fewer = answer(load(folder, deterministic=True, **MTP), prompt, asked)
            assert found == plain and fewer <= steps == 40


def test_a_layer_that_guesses_well_saves_steps(guessing: Path) -> None:
    tokens, steps = answer(load(guessing, **MTP), prompt_of(50, VOCAB), Sampling(max_tokens=60))
    assert len(tokens) == 60 and steps < 48


def test_what_is_shared_from_the_cache_drafts_too(guessing: Path) -> None:
    """Two blocks were computed for another request, whose third one was another."""
    loaded, prompt = load(guessing, blocks=16, **MTP), prompt_of(40, VOCAB)
    run(loaded, [Walk(loaded, 1, [*prompt[:32], *prompt_of(8, VOCAB, 5)], range(4), [40])], 3)
    loaded.engine.open(2, prompt, Sampling())
    tokens, known, steps = [], 40, 0
    row = StepRow(seq=2, start=32, count=8, new_blocks=pack_u32([0, 1, 7, 8, 9]), sample=True)
    while known < 64:
        [result] = loaded.engine.step([row])
        tokens += [result.token, *(more.token for more in result.more)]
        known, steps = 40 + len(tokens), steps + 1
        row = StepRow(seq=2, start=known - 1, count=1, sample=True)
    plain, _ = answer(load(guessing), prompt, Sampling(max_tokens=len(tokens)))
    assert tokens == plain and steps < len(tokens)


def test_a_node_that_samples_nothing_leaves_the_last_position_to_draft(guessing: Path) -> None:
    """It is computed again where it is sampled."""
    prefill, prompt = load(guessing, blocks=8, skip_sampling=True, **MTP), prompt_of(20, VOCAB)
    prefill.engine.open(1, prompt, Sampling())
    [result] = prefill.engine.step([StepRow(seq=1, start=0, count=20, new_blocks=pack_u32([0, 1]), sample=True)])
    assert (result.token, result.draft) == (-1, -1)
    decode = load(guessing, blocks=8, **MTP)
    decode.memory.copy_(prefill.memory)
    decode.engine.open(1, prompt, Sampling())
    [again] = decode.engine.step([StepRow(seq=1, start=19, count=1, new_blocks=pack_u32([0, 1]), sample=True)])
    alone = load(guessing, blocks=8, **MTP)
    whole = Walk(alone, 1, prompt, range(2), [20])
    run(alone, [whole], 1)
    assert (again.token, again.draft) == (whole.results[0].token, whole.results[0].draft)


def test_what_was_preempted_drafts_again(guessing: Path) -> None:
    """In other blocks, which hold nothing of it."""
    loaded, prompt = load(guessing, blocks=16, **MTP), prompt_of(20, VOCAB)
    walk = Walk(loaded, 1, prompt, [0, 1, 2], [20])
    tokens, _ = speak([walk], loaded, 6)[0]
    known = 20 + len(tokens)
    row = StepRow(seq=1, start=0, count=known, new_blocks=pack_u32([5, 9, 7]), reset=True, sample=True)
    [result] = loaded.engine.step([row])
    whole, _ = answer(load(guessing), prompt, Sampling(max_tokens=len(tokens) + 1))
    assert [*tokens, result.token] == whole
    fresh = load(guessing, blocks=16, **MTP)
    fresh.engine.open(1, [*prompt, *tokens], Sampling())
    again = StepRow(seq=1, start=0, count=known, new_blocks=pack_u32([0, 1, 2]), sample=True)
    assert fresh.engine.step([again])[0].draft == result.draft


def test_a_prompt_s_scores_are_those_without_a_draft_layer(guessing: Path) -> None:
    found = []
    for options in ({}, MTP):
        loaded = load(guessing, blocks=16, **options)
        sampling = Sampling(prompt_logprobs=1, prompt_logprobs_from=10)
        walk = Walk(loaded, 1, prompt_of(40, VOCAB), range(4), [17, 23], sampling)
        run(loaded, [walk], 1)
        found.append([(score.top[0][0], pytest.approx(score.logprob, abs=1e-5)) for score in walk.scores])
    assert found[0] == [(top, value.expected) for top, value in found[1]] and len(found[0]) == 30


# ---------------------------------------------------------------- bad input


def settings(model: Path, **fields: Any) -> Any:
    host = Host(cpus=(0,), memory_bytes=1 << 30, run_dir="/tmp", name_suffix="3f2a")
    given = {"role": "decode", "model": str(model), "speculate": "1", "speculate_method": "mtp", **fields}
    return load_settings({name: str(value) for name, value in given.items()}, {}, host=host)


def test_a_node_s_cache_has_a_layer_more(guessing: Path) -> None:
    assert set_up(settings(guessing)).geometry.layers == 4
    assert set_up(settings(guessing, speculate_method="ngram")).geometry.layers == 3


def test_a_pair_of_which_only_the_reader_drafts_is_refused_by_name(guessing: Path) -> None:
    drafting, plain = (set_up(settings(guessing, speculate_method=how)).geometry for how in ("mtp", "ngram"))
    assert [name for name, *_ in unreadable(plain, drafting)] == ["layers"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"speculate": 0}, "--speculate-method: mtp drafts one token a step: give --speculate 1"),
        ({"speculate": 2}, "--speculate-method: mtp drafts one token a step: give --speculate 1"),
        ({"engine": "coded"}, "--speculate: the coded engine does not speculate"),
        ({"speculate_method": "medusa"}, "--speculate-method: 'medusa' is not known; give ngram, mtp or draft"),
    ],
)
def test_settings_that_do_not_go_together_are_named(guessing: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(guessing, **fields)


@pytest.mark.parametrize("config", [V2, V3], ids=["V2", "V3"])
def test_a_model_without_a_draft_layer_is_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    folder = write_deepseek(tmp_path / "none", config)
    with pytest.raises(ConfigError, match=r"--speculate-method: .* none has none \(num_nextn_predict_layers\)"):
        set_up(settings(folder))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop("model.layers.3.eh_proj.weight"), "has no tensor model.layers.3.eh_proj.weight"),
        (
            lambda t: t.update({"model.layers.3.enorm.weight": torch.ones(3)}),
            r"tensor model.layers.3.enorm.weight has shape \(3,\), config.json asks for \(64,\)",
        ),
    ],
)
def test_a_draft_layer_that_is_not_whole_is_named(guessing: Path, tmp_path: Path, change: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^--model: .*{problem}"):
        set_up(settings(changed(guessing, tmp_path, change)))


def test_damaged_weights_of_it_are_found_at_the_start(guessing: Path, tmp_path: Path) -> None:
    folder = changed(guessing, tmp_path, lambda t: t["model.layers.3.eh_proj.weight"].fill_(torch.nan))
    with pytest.raises(ConfigError, match="--model: the logits are no finite numbers"):
        load(folder, blocks=4, **MTP).engine.warm_up()


def changed(folder: Path, into: Path, change: Any) -> Path:
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    tensors = load_file(into / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into
