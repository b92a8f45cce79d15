"""A draft model: its guesses change no token, its KV goes where the model's goes, and what does not fit is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdbus.bus.errors import ConfigError
from pdbus.bus.messages import Sampling
from pdbus.bus.wire import pack_u32
from pdbus.connector.ipc import StepRow
from pdbus.connector.readable import unreadable
from pdbus.nodes.config import load as load_settings
from pdbus.nodes.host import Host
from pdbus.nodes.models.config import resolve_model
from pdbus.nodes.models.draft_model import fit
from pdbus.nodes.models.random_llama import write_random_llama
from pdbus.nodes.setup import set_up

from tests.deepseek_models import V3, write_deepseek
from tests.torch_models import BLOCK_SIZE, Loaded, Walk, cut, load, prompt_of, run
from tests.unit.test_drafts import SAMPLINGS, answer
from tests.unit.test_latent_hand_off import HERE, LENGTH, THERE, Node, read
from tests.unit.test_layout_grid import BLOCKS
from tests.unit.test_mtp_hand_off import Said, take

VOCAB, TOKENS = 384, 20
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_llama(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of heads twice as wide as tiny's, with the same vocabulary."""
    return write_random_llama(tmp_path_factory.mktemp("models") / "wide", "wide")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek(tmp_path_factory.mktemp("models") / "latent", V3 | {"kv_lora_rank": 24})


@pytest.fixture(scope="module")
def spelling(tiny: Path, latent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, with the tokenizer of the latent one."""
    folder = changed(tiny, tmp_path_factory.mktemp("models") / "spelling")
    shutil.copy(latent / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def nearly(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, a little off: it is right often, but not always."""
    return changed(tiny, tmp_path_factory.mktemp("models") / "nearly", noise=0.04)


def changed(folder: Path, into: Path, *, noise: float = 0.0, **config: Any) -> Path:
    shutil.copytree(folder, into)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor += noise * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(known | config))
    return into


def drafting(model: Path, draft: Path, count: int = 4, **options: Any) -> Loaded:
    return load(model, speculate=count, speculate_method="draft", draft_model=str(draft), **options)


# ---------------------------------------------------------------- tokens


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_those_without_drafts(tiny: Path, nearly: Path, sampling: dict[str, Any]) -> None:
    asked = Sampling(max_tokens=50, **sampling)
    for prompt in ([9], prompt_of(50, VOCAB)):
        plain, steps = answer(load(tiny, deterministic=True), prompt, asked)
        found, fewer = answer(drafting(tiny, nearly, deterministic=True), prompt, asked)
        assert found == plain and fewer <= steps == 50


@pytest.mark.parametrize(("count", "most"), [(1, 28), (4, 14), (7, 10)])
def test_a_draft_model_that_is_right_saves_steps(tiny: Path, count: int, most: int) -> None:
    """The model itself: every draft is right, but none goes beyond a block."""
    tokens, steps = answer(drafting(tiny, tiny, count), prompt_of(50, VOCAB), Sampling(max_tokens=50))
    assert tokens == answer(load(tiny), prompt_of(50, VOCAB), Sampling(max_tokens=50))[0]
    assert steps <= most


@pytest.mark.parametrize(
    "pair", ["wide, tiny", "latent, spelling", *(pytest.param(p, marks=LONG) for p in ("tiny, tiny", "latent, latent"))]
)
def test_it_drafts_what_it_says_alone_wherever_its_kv_lies(pair: str, request: pytest.FixtureRequest) -> None:
    """Several of its layers in one of the cache's, or one in several; heads as wide, or a part of that."""
    model, draft = (request.getfixturevalue(name) for name in pair.split(", "))
    loaded, prompt = drafting(model, draft), prompt_of(40, VOCAB)
    made: list[tuple[list[int], list[int]]] = []
    guess = loaded.engine._draft_model.guess  # type: ignore[union-attr]

    def keep(known: Sequence[Any], *rest: Any) -> Any:
        drafts = guess(known, *rest)
        made.extend((known[i].tolist(), some.tolist()) for i, some in enumerate(drafts) if some)
        return drafts

    loaded.engine._draft_model.guess = keep  # type: ignore[union-attr, method-assign]
    answer(loaded, prompt, Sampling(max_tokens=30))
    alone = load(draft)
    for tokens, some in made:
        assert answer(alone, tokens, Sampling(max_tokens=len(some)))[0] == some
    assert len(made) > 5


def test_its_kv_touches_none_of_the_model_s(wide: Path, tiny: Path) -> None:
    both, one = drafting(wide, tiny), load(wide)
    for loaded in (both, one):
        run(loaded, [Walk(loaded, 1, prompt_of(40, VOCAB), range(4), [17, 23])], 1)
    layers = one.args.geometry.layers
    assert torch.equal(both.kv(range(4), 40)[:, :layers], one.kv(range(4), 40))


@pytest.mark.long
def test_neighbours_of_all_kinds_change_no_draft(tiny: Path, nearly: Path) -> None:
    lengths = [3, 15, 40, 100, 300]
    alone, together = [], drafting(tiny, nearly, blocks=64)
    for seq, n in enumerate(lengths):
        one = drafting(tiny, nearly, blocks=64)
        alone.append(answer_of(one, {seq: prompt_of(n, VOCAB, seq)}, {seq: [n]})[seq])
    prompts = {seq: prompt_of(n, VOCAB, seq) for seq, n in enumerate(lengths)}
    chunks = {seq: cut(n, 7 + 20 * seq) for seq, n in enumerate(lengths)}
    found = answer_of(together, prompts, chunks)
    assert [found[seq] for seq in range(len(lengths))] == alone


def answer_of(loaded: Loaded, prompts: dict[int, list[int]], chunks: dict[int, list[int]]) -> dict[int, Any]:
    """All sequences together: each one's tokens and, of each of its steps, how many drafts were tried and right."""
    free, at, found = iter(range(64)), dict.fromkeys(prompts, 0), {seq: ([], []) for seq in prompts}  # type: ignore[var-annotated]
    tables = {seq: [next(free) for _ in range(-(-(len(p) + 24) // BLOCK_SIZE))] for seq, p in prompts.items()}
    for seq, prompt in prompts.items():
        loaded.engine.open(seq, prompt, Sampling(max_tokens=20))
    while going := [seq for seq in prompts if len(found[seq][0]) < 20]:
        rows = []
        for seq in going:
            known = len(prompts[seq]) + len(found[seq][0])
            count = chunks[seq].pop(0) if chunks[seq] else 1
            new = b"" if at[seq] else pack_u32(tables[seq])
            rows.append(StepRow(seq=seq, start=at[seq], count=count, new_blocks=new, sample=at[seq] + count == known))
            at[seq] += count
        for seq, result in zip(going, loaded.engine.step(rows), strict=True):
            if result.token >= 0:
                tokens, drafts = found[seq]
                tokens += [result.token, *(more.token for more in result.more)]
                at[seq] += len(result.more)
                drafts.append((result.drafted, len(result.more)))
    return found


def test_what_was_preempted_drafts_again(tiny: Path, nearly: Path) -> None:
    """In other blocks, which hold nothing of it."""
    loaded, prompt = drafting(tiny, nearly, blocks=16), prompt_of(20, VOCAB)
    loaded.engine.open(1, prompt, Sampling(max_tokens=40))
    [first] = loaded.engine.step([StepRow(seq=1, start=0, count=20, new_blocks=pack_u32([0, 1, 2]), sample=True)])
    again = StepRow(seq=1, start=0, count=21, new_blocks=pack_u32([5, 9, 7]), reset=True, sample=True)
    [second] = loaded.engine.step([again])
    [third] = loaded.engine.step([StepRow(seq=1, start=21, count=1, sample=True)])
    tokens = [first.token, second.token, third.token, *(more.token for more in third.more)]
    plain, _ = answer(load(tiny), prompt, Sampling(max_tokens=len(tokens)))
    assert tokens == plain and third.drafted == 4


# ---------------------------------------------------------------- hand-off


@pytest.mark.parametrize(
    "kind", ["wide, tiny", *(pytest.param(k, marks=LONG) for k in ("tiny, nearly", "latent, spelling"))]
)
@pytest.mark.parametrize(
    "seeded", [pytest.param({}, marks=LONG), {"temperature": 0.4, "seed": 5}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("chunk", [16, pytest.param(512, marks=LONG)])
def test_tokens_and_acceptance_through_a_pair_are_those_of_one_node(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int, seeded: dict[str, Any]
) -> None:
    """The first step after the hand-off speculates: the draft model's KV came with it."""
    model, draft = (request.getfixturevalue(name) for name in kind.split(", "))
    sampling = Sampling(max_tokens=TOKENS, **seeded)
    args = drafting(model, draft, 3, blocks=BLOCKS).args
    alone = Node(args, 1, monkeypatch)
    whole = decoded(alone, prefilled(alone, LENGTH, HERE, sampling))

    prefill, decode = Node(args, 1, monkeypatch), Node(args, 1, monkeypatch)
    first = prefilled(prefill, chunk, THERE, sampling)
    read(prefill, decode)
    decode.open(prompt_of(LENGTH, VOCAB, seed=3), first.tokens, first.drafts[0][2], sampling)
    take(first, decode.step(LENGTH, 1, HERE))
    assert first.drafts[1][0] == 3
    assert decoded(decode, first) == whole


def prefilled(node: Node, chunk: int, blocks: list[int], sampling: Sampling) -> Said:
    at, said = 0, Said([], [])
    node.open(prompt_of(LENGTH, VOCAB, seed=3), sampling=sampling)
    for count in cut(LENGTH, chunk):
        result = node.step(at, count, [] if at else blocks, sample=at + count == LENGTH)
        at += count
    take(said, result)
    return said


def decoded(node: Node, said: Said) -> Said:
    while len(said.tokens) < TOKENS:
        take(said, node.step(LENGTH + len(said.tokens) - 1, 1, []))
    return said


# ---------------------------------------------------------------- settings


def settings(model: Path, **fields: Any) -> Any:
    host = Host(cpus=(0,), memory_bytes=1 << 30, run_dir="/tmp", name_suffix="3f2a")
    given = {"model": str(model), "kv_blocks": "16", "speculate": "4", "speculate_method": "draft", **fields}
    return load_settings({name: str(value) for name, value in given.items()}, host=host)


def test_its_layers_are_named_after_its_weights(tiny: Path, nearly: Path, wide: Path) -> None:
    """So a pair whose draft models differ is refused at hello, by the layers' names."""
    one, other = (set_up(settings(wide, draft_model=draft)).geometry for draft in (tiny, nearly))
    assert one.layers == 3 + 1 and one.layer_names[:3] == ("0", "1", "2")
    assert one.layer_names[3].startswith("draft-") and one.layer_names[3:] != other.layer_names[3:]
    assert unreadable(one, one) == () and [name for name, *_ in unreadable(one, other)] == ["layers"]


def test_who_does_not_draft_reads_from_who_does(tiny: Path, wide: Path) -> None:
    plain = set_up(settings(wide, speculate_method="ngram")).geometry
    both = set_up(settings(wide, draft_model=tiny)).geometry
    assert unreadable(both, plain) == () and [name for name, *_ in unreadable(plain, both)] == ["layers"]


@pytest.mark.parametrize(
    ("model", "draft", "found"),
    [("wide", "tiny", (1, 2, 1)), ("tiny", "tiny", (2, 1, 1)), ("latent", "spelling", (4, 1, 2))],
)
def test_as_many_layers_as_fit_lie_together(
    model: str, draft: str, found: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    made = fit(*(resolve_model(str(request.getfixturevalue(name))).config for name in (model, draft)))
    assert (made.layers, made.together, made.apart) == found


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "--speculate-method: draft needs --draft-model MODEL and --speculate N"),
        ({"draft_model": "/", "speculate": 0}, "--speculate-method: draft needs --draft-model MODEL and --speculate N"),
        ({"draft_model": "/", "speculate_method": "ngram"}, "--draft-model: goes with --speculate-method draft"),
        ({"draft_model": "/", "tp": 2}, "--speculate-method: a draft model does not go with several ranks"),
        ({"draft_model": "/", "engine": "coded"}, "--speculate: the coded engine does not speculate"),
    ],
)
def test_settings_that_do_not_go_together_are_named(tiny: Path, fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^{problem}"):
        settings(tiny, **fields)


def test_one_that_is_not_there_is_named(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--draft-model: .*/nowhere"):
        set_up(settings(tiny, draft_model="/nowhere"))


def test_another_vocabulary_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny, tmp_path / "other"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    token = next(token for token, number in vocab.items() if number == 100)
    del vocab[token]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = r"^--draft-model: other has \d+ tokens, tiny has \d+: a draft model must have the same vocabulary"
    with pytest.raises(ConfigError, match=said):
        set_up(settings(tiny, draft_model=draft))
    vocab["quite another"] = 100
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"^--draft-model: token 100 of other is 'quite another', token 100 of tiny"):
        set_up(settings(tiny, draft_model=draft))


def test_heads_that_do_not_fit_are_refused_by_name(tiny: Path, wide: Path) -> None:
    said = "^--draft-model: its heads have 32 channels, which do not divide the model's 16"
    with pytest.raises(ConfigError, match=said):
        set_up(settings(tiny, draft_model=wide))


def test_damaged_weights_of_it_are_found_at_the_start(tiny: Path, tmp_path: Path) -> None:
    draft = changed(tiny, tmp_path / "damaged", noise=float("nan"))
    with pytest.raises(ConfigError, match="--draft-model: the logits are no finite numbers"):
        drafting(tiny, draft, blocks=4).engine.warm_up()


def test_a_vocabulary_rounded_up_elsewhere_is_the_same(tiny: Path, tmp_path: Path) -> None:
    """Families of checkpoints pad theirs to different sizes: what the draft model has no row for counts as its last."""
    draft = Path(shutil.copytree(tiny, tmp_path / "short"))
    tensors = load_file(draft / "model.safetensors")
    short = {n: t[:380].clone() if t.shape[0] == VOCAB and t.dim() == 2 else t for n, t in tensors.items()}
    save_file(short, draft / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 380}))
    prompt = [*prompt_of(30, 380), 383]
    tokens, _ = answer(drafting(tiny, draft), prompt, Sampling(max_tokens=30))
    assert tokens == answer(load(tiny), prompt, Sampling(max_tokens=30))[0]
