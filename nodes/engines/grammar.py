"""Answers that follow a JSON schema: which tokens may come next, by llguidance (a library; Rust, no state of ours)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdbus.nodes.json_schema import SCHEMAS_KEPT, limits


class Grammars:
    """For one model. The tokenizer is read when the first schema comes: that takes about a second. Schemas are compiled
    once, those at fault too."""

    def __init__(self, folder: Path, vocab: int, eos_ids: Sequence[int]) -> None:
        self._file = folder / "tokenizer.json"
        self._vocab, self._eos_ids = vocab, list(eos_ids)
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()

    @cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(self._file.read_text("utf-8"), n_vocab=self._vocab, eos_token=self._eos_ids)

    def of_schema(self, schema: str) -> Grammar:
        """Where an answer stands in a schema, at its beginning. One that the library does not take, or not with this
        model's tokenizer, is a grammar with a `problem`: the request's, not the worker's."""
        compiled = self._compiled.pop(schema, None) or self._compile(schema)
        self._compiled[schema] = compiled
        if len(self._compiled) > SCHEMAS_KEPT:
            self._compiled.popitem(last=False)
        return compiled.copy()

    def _compile(self, schema: str) -> Grammar:
        matcher, problem = None, ""
        try:
            import llguidance

            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
            matcher.compute_bitmask()  # the first is the slowest: no copy makes it again
            problem = _first_line(matcher.get_error()) or ("nothing follows it" if matcher.is_stopped() else "")
        except Exception as e:  # the library raises what it likes
            problem = _first_line(str(e))
        said = f"no answer can follow the JSON schema: {problem}" if problem else ""
        return Grammar(None if problem else matcher, self._vocab, said)


class Grammar:
    """Where one answer stands. `problem` says why it cannot go on, '' as long as it can."""

    def __init__(self, matcher: Any, vocab: int, problem: str) -> None:
        self._matcher, self._vocab, self.problem = matcher, vocab, problem

    def copy(self) -> Grammar:
        return Grammar(self._matcher.deep_copy() if self._matcher else None, self._vocab, self.problem)

    def take(self, tokens: Iterable[int]) -> None:
        """The answer goes on with these; what comes after its end counts for nothing."""
        for token in tokens:
            if self.problem or self._matcher.is_stopped():
                return
            if not self._matcher.consume_token(token):
                self.problem = _first_line(self._matcher.get_error())

    def allowed(self) -> Tensor:
        """Which tokens may come next, [vocab] bool: only ends of sequence where the answer is complete."""
        return _mask(self._matcher.compute_bitmask(), self._vocab)


def _mask(bits: bytes, vocab: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:vocab]).bool()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
