"""The demo model, a trained one: does the engine read it as its makers meant it? A random model cannot tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pdbus.bus.errors import ConfigError
from pdbus.nodes.engines.attention import FreshAttend, Plan
from pdbus.nodes.evaluation.tasks import FILE
from pdbus.nodes.models.demo import demo_folder, fetch_demo_model

from tests.torch_models import Loaded, Walk, load, run

pytestmark = pytest.mark.model
EXPECTED: dict[str, Any] = json.loads(FILE.read_text())


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.long), "fp16"])
def demo(request: pytest.FixtureRequest) -> Loaded:
    """In fp16, which rounds this checkpoint's weights, it must know and say the same."""
    try:
        return load(fetch_demo_model(), weights=request.param)
    except ConfigError as e:
        if "cannot fetch" in str(e):
            pytest.skip(str(e))
        raise


@pytest.fixture(scope="module")
def tokenizer(demo: Loaded) -> Tokenizer:
    return Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_it_answers_a_chat_and_ends(demo: Loaded, tokenizer: Tokenizer) -> None:
    template = json.loads((demo_folder() / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    environment = ImmutableSandboxedEnvironment()
    text = environment.from_string(template).render(messages=messages, add_generation_prompt=True)
    prompt = encode(tokenizer, text)
    walk = Walk(demo, 1, prompt, range(10), [len(prompt)])
    run(demo, [walk], 8)
    end = tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.decode(walk.tokens[: walk.tokens.index(end)]) == "The capital of France is Paris."


def test_it_knows_as_many_capitals_as_it_should(demo: Loaded, tokenizer: Tokenizer) -> None:
    capitals = EXPECTED["capitals"]
    walks, wanted = [], []
    for seq, (country, capital) in enumerate(capitals["pairs"].items()):
        prompt = encode(tokenizer, capitals["prompt"].format(country=country))
        blocks = range(8 * (seq % 8), 8 * (seq % 8) + 8)
        walks.append(Walk(demo, seq, prompt, blocks, [len(prompt)]))
        wanted.append(encode(tokenizer, " " + capital)[0])
    for first in range(0, len(walks), 8):
        run(demo, walks[first : first + 8], 1)
    hits = sum(walk.tokens[0] == token for walk, token in zip(walks, wanted, strict=True))
    assert hits == capitals["expected_hits"]


@torch.inference_mode()
@pytest.mark.long
def test_it_finds_a_text_as_likely_as_it_should(demo: Loaded, tokenizer: Tokenizer) -> None:
    ids = torch.tensor(encode(tokenizer, EXPECTED["perplexity"]["texts"]["constitution"])[:1024])
    every = torch.arange(len(ids))
    cache = demo.engine._cache
    rows = torch.from_numpy(cache.rows(every.numpy(), every.numpy()))
    attend = (FreshAttend(slice(0, len(ids))),)
    logits = demo.engine._decoder.forward(ids, every, Plan(len(ids), rows, attend, attend, every), cache).logits
    assert logits is not None
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert float(loss.exp()) == pytest.approx(EXPECTED["perplexity"]["expected"]["constitution"], rel=1e-3)
