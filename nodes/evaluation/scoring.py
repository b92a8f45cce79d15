"""Figures of a model by requests to a node: prompts whose tokens it is asked to score, no answers.

A text is scored from its end to its beginning, a window of tokens at a time: each is computed upon the KV of what comes
before it, which the node has from a prefill node the first time and in its cache from then on. So a wrong byte of KV
that was read shows in the figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdbus.bus.client import Client
from pdbus.bus.errors import Broken
from pdbus.bus.messages import TokenLogprob
from pdbus.nodes.tokenizer import Tokenizer

from .tasks import Tasks

TOKENS_MAX = 1024  # of a text, as the expected figures have it
FIRST_WINDOW = 16  # tokens that follow nothing but each other: whatever goes on behind them needs KV
WINDOW = 128  # a multiple of common block sizes


@dataclass
class Figures:
    """`capitals`: how many were right. Of so many `prompts`, `remote` were prefilled on a prefill node."""

    capitals: int
    perplexity: dict[str, float]
    prompts: int
    remote: int


class Scorer:
    def __init__(self, client: Client, tokenizer: Tokenizer) -> None:
        self._client, self._tokenizer = client, tokenizer
        self.prompts = self.remote = 0

    async def knows(self, text: str, rest: str) -> bool:
        """Whether the token that `rest` begins with is the likeliest after `text`."""
        prompt, right = self._ids(text), self._ids(rest)[0]
        [one] = await self._scored([*prompt, right], len(prompt), alternatives=1)
        return one.top[0][0] == right

    async def losses(self, text: str) -> list[float]:
        """The negative log likelihood of the text's tokens but the first, from the last one on."""
        ids = self._ids(text)[:TOKENS_MAX]
        found: list[float] = []
        for first, end in windows(len(ids)):
            found += [-one.logprob for one in reversed(await self._scored(ids[:end], first))]
        return found

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False)

    async def _scored(self, prompt: Sequence[int], first: int, alternatives: int = 0) -> list[TokenLogprob]:
        """Of the prompt's tokens from `first` on."""
        generation = self._client.generate(
            prompt, max_tokens=1, prompt_logprobs=alternatives, prompt_logprobs_from=first
        )
        found = [one async for token in generation for one in token.prompt_logprobs]
        assert generation.finished is not None
        self.prompts += 1
        self.remote += generation.finished.timeline.remote
        if len(found) != len(prompt) - first:
            raise Broken(f"{len(prompt) - first} tokens were to be scored, {len(found)} were")
        return found


def windows(tokens: int) -> Iterator[tuple[int, int]]:
    """(first, end) of stretches of a text's tokens but the first, the last stretch first."""
    starts = [1, *(1 + at for at in (FIRST_WINDOW, *range(WINDOW, tokens, WINDOW)))]
    starts = [start for start in starts if start < tokens]
    return zip(reversed(starts), reversed([*starts[1:], tokens][: len(starts)]), strict=True)


async def evaluate(client: Client, tokenizer: Tokenizer, tasks: Tasks, advance: Callable[[], None]) -> Figures:
    """All tasks, one prompt after the other. `advance` is told of each task."""
    scorer, hits, perplexity = Scorer(client, tokenizer), 0, {}
    for text, rest in tasks.capitals:
        hits += await scorer.knows(text, rest)
        advance()
    for name, texts in tasks.texts.items():
        losses: list[float] = []
        for text in texts:
            losses += await scorer.losses(text)
            advance()
        perplexity[name] = math.exp(math.fsum(losses) / len(losses))
    return Figures(hits, perplexity, scorer.prompts, scorer.remote)
