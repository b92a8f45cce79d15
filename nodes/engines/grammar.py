"""Answers that follow a JSON schema: which tokens may come next, by llguidance (a library; Rust, no state of ours)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Grammars:
    """For one model. The tokenizer is read when the first schema comes: that takes about a second."""

    def __init__(self, folder: Path, vocab: int, eos_ids: Sequence[int]) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab, self._eos_ids = vocab, list(eos_ids)

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(self._file.read_text("utf-8"), n_vocab=self._vocab, eos_token=self._eos_ids)

    def of_schema(self, schema: str) -> Grammar:
        """Where an answer stands in a schema. One that the library does not take, or not with this model's tokenizer,
        is a grammar with a `problem`: the request's, not the worker's."""
        try:
            import llguidance

            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
            problem = matcher.get_error()
        except Exception as e:  # the library raises what it likes
            matcher, problem = None, str(e)
        return Grammar(matcher, self._vocab, f"no answer can follow the JSON schema: {problem}" if problem else "")


class Grammar:
    """Where one answer stands. `problem` says why it cannot go on, '' as long as it can."""

    def __init__(self, matcher: Any, vocab: int, problem: str) -> None:
        self._matcher, self._vocab, self.problem = matcher, vocab, problem

    def take(self, tokens: Iterable[int]) -> None:
        """The answer goes on with these; what comes after its end counts for nothing."""
        for token in tokens:
            if self.problem or self._matcher.is_stopped():
                return
            if not self._matcher.consume_token(token):
                self.problem = str(self._matcher.get_error()).partition("\n")[0]

    def allowed(self) -> Tensor:
        """Which tokens may come next, [vocab] bool: only ends of sequence where the answer is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab]).bool()
