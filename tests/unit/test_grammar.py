"""Answers that follow a JSON schema, whatever the model would rather say."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pdbus.bus.errors import RequestError
from pdbus.bus.messages import Sampling
from pdbus.nodes.engines.grammar import Grammar, Grammars
from pdbus.nodes.json_schema import check_schema

from tests.tokenizers_made import byte_level
from tests.torch_models import Walk, load, run, write_spelling_llama

SCHEMA = json.dumps(
    {
        "type": "object",
        "additionalProperties": False,
        "required": ["ok", "n"],
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    }
)
VOCAB = 384  # of the model; the tokenizer has fewer
EOS = (1,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spelling_llama(tmp_path_factory.mktemp("models"), eos=EOS[0])


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, VOCAB, EOS)


def spelled(tokens: list[int]) -> str:
    return str(byte_level().decode([t for t in tokens if t not in EOS]))


def follow(grammar: Grammar, rng: random.Random) -> list[int]:
    """Anything that is allowed, to the end."""
    tokens: list[int] = []
    while not tokens or tokens[-1] not in EOS:
        tokens.append(rng.choice(grammar.allowed().nonzero().flatten().tolist()))
        grammar.take(tokens[-1:])
    assert not grammar.problem
    return tokens


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_allowed_follows_the_schema(grammars: Grammars, seed: int) -> None:
    answer = json.loads(spelled(follow(grammars.of_schema(SCHEMA), random.Random(seed))))
    assert set(answer) == {"ok", "n"} and answer["ok"] in (True, False) and answer["n"] in (1, 22, 333)


def test_a_grammar_goes_on_from_tokens_that_were_sampled_elsewhere(grammars: Grammars) -> None:
    tokens = follow(grammars.of_schema(SCHEMA), random.Random(0))
    here, there = grammars.of_schema(SCHEMA), grammars.of_schema(SCHEMA)
    for token in tokens[:-3]:
        here.take((token,))
    there.take(tokens[:-3])
    assert here.allowed().tolist() == there.allowed().tolist()


def test_a_complete_answer_can_only_end(grammars: Grammars) -> None:
    grammar = grammars.of_schema(SCHEMA)
    grammar.take([*follow(grammars.of_schema(SCHEMA), random.Random(0)), 7])
    assert grammar.allowed().nonzero().flatten().tolist() == list(EOS) and not grammar.problem


@pytest.mark.parametrize("sampling", [{}, {"temperature": 2.0, "seed": 5}, {"min_tokens": 200}])
def test_the_engine_s_answer_follows_the_schema(folder: Path, sampling: dict[str, float]) -> None:
    loaded = load(folder, blocks=32)
    walk = Walk(loaded, 1, [9, 8, 7], range(20), [3], Sampling(json_schema=SCHEMA, **sampling))  # type: ignore[arg-type]
    run(loaded, [walk], 120)
    answer = walk.tokens[: walk.tokens.index(EOS[0])]
    assert set(json.loads(spelled(answer))) == {"ok", "n"}
    assert not any(result.problem for result in walk.results)


def test_a_schema_that_the_library_does_not_take_ends_the_request_alone(folder: Path) -> None:
    loaded = load(folder, blocks=32)
    bad = Walk(loaded, 1, [9, 8, 7], [0], [3], Sampling(json_schema='{"type": "objec"}'))
    good = Walk(loaded, 2, [9, 8, 7], [1], [3])
    run(loaded, [bad, good], 1)
    assert bad.results[0].problem == "no answer can follow the JSON schema: Invalid type: objec"
    assert not good.results[0].problem


def test_a_schema_is_compiled_once_whoever_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is at fault, too: `n` answers must not cost `n` times."""
    grammars, compiled = Grammars(folder, VOCAB, EOS), []
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda schema: compiled.append(schema) or compile_(schema))
    one, other = grammars.of_schema(SCHEMA), grammars.of_schema(SCHEMA)
    one.take(follow(grammars.of_schema(SCHEMA), random.Random(0))[:2])
    assert one.allowed().tolist() != other.allowed().tolist()
    assert grammars.of_schema('{"type": "objec"}').problem and grammars.of_schema('{"type": "objec"}').problem
    assert compiled == [SCHEMA, '{"type": "objec"}']


@pytest.mark.parametrize("schema", ['{"$ref": "#"}', '{"type": "string", "pattern": "^((((a{50}){50}){50}){50})$"}'])
def test_a_schema_that_is_endless_or_costs_too_much_has_a_problem_sooner_or_later(folder: Path, schema: str) -> None:
    grammar = Grammars(folder, VOCAB, EOS).of_schema(schema)
    for _ in range(40):
        if grammar.problem:
            break
        grammar.take([int(grammar.allowed().nonzero()[0])])
    assert grammar.problem or not grammar.allowed()[list(EOS)].any()


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("{", "is no JSON schema"),
        ("[]", "must be an object"),
        ('{"type": "objec"}', "cannot be followed: Invalid type: objec"),
        ('{"$ref": "http://x/y"}', "cannot be followed: Resource"),
        ('{"description": "' + "x" * 17_000 + '"}', "at most 16384 bytes"),
    ],
)
def test_what_cannot_be_followed_is_told_before_any_work(schema: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as e:
        check_schema(schema, "json_schema", True)
    assert e.value.param == "json_schema"


def test_a_tokenizer_that_spells_no_text_is_told() -> None:
    with pytest.raises(RequestError, match="tokenizer cannot follow a JSON schema") as e:
        check_schema("{}", "json_schema", False)
    assert e.value.code == "unsupported_value"
