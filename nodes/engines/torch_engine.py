"""The engine that computes with PyTorch: paged KV or latents, continuous batching, chunked prefill."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdbus.bus.errors import ConfigError, LocalProtocolError
from pdbus.bus.messages import Geometry, KVLayout, Sampling, TokenLogprob
from pdbus.bus.wire import unpack_u32
from pdbus.connector.ipc import RowResult, SampledToken, StepRow, WorkerArgs
from pdbus.connector.layout import layout_of
from pdbus.nodes.models.config import ModelConfig, resolve_model
from pdbus.nodes.models.decoder import Computed, Decoder
from pdbus.nodes.models.draft_model import resolve_draft
from pdbus.nodes.models.loader import load_weights

from .attention import Ids, KVCache, Plan, Span, make_plan, pack_order
from .draft_model import DraftModel
from .drafts import lookup
from .grammar import Grammar, Grammars
from .group import meet
from .invariant import ROWS
from .linear import LinearMaker
from .sampling import Draw, Drawn, sample, scored
from .stage import joined
from .torch_device import KINDS, check_there, check_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What a CPU must have for a type to be worth it; without, PyTorch emulates it (bfloat16 was 24 times slower).
CPU_NEEDS = {"bfloat16": "avx512_bf16", "float16": "amx_fp16"}
WARM_UP_TOKENS = 32


@dataclass
class _Sequence:
    """Known token ids, the first `prompt` of them given, and the block table."""

    tokens: array[int]
    prompt: int
    sampling: Sampling
    grammar: Grammar | None
    blocks: array[int] = field(default_factory=lambda: array("q"))
    draft: int = -1  # what a draft layer expects after its tokens; -1: nothing

    def draw(self, drafts: array[int]) -> Draw:
        """How the token after these is chosen, which follow those that are known."""
        tokens = self.tokens + drafts if drafts else self.tokens
        allowed = self.grammar.allowed() if self.grammar and not self.grammar.problem else None
        return Draw(self.sampling, len(tokens), len(tokens) - self.prompt, tokens, allowed)

    def take(self, drawn: list[Drawn], drafts: array[int]) -> list[Drawn]:
        """Append what was drawn, up to the first token that is not the draft in its place. Returns so many."""
        right = next((i for i, (d, draft) in enumerate(zip(drawn, drafts, strict=False)) if d.token != draft), None)
        taken = drawn if right is None else drawn[: right + 1]
        self.tokens.extend(d.token for d in taken)
        if self.grammar:
            self.grammar.take(d.token for d in taken)
        return taken

    def scores(self, row: StepRow) -> int:
        """How many of the row's positions tell how likely the prompt's next token was, where that is asked for."""
        if self.sampling.prompt_logprobs is None:
            return 0
        return max(0, min(row.start + row.count, self.prompt - 1) - self.scored_at(row))

    def scored(self, row: StepRow, logits: Tensor) -> tuple[TokenLogprob, ...]:
        """Of the prompt's tokens after the row's first positions that are asked for."""
        first = self.scored_at(row) + 1
        return scored(logits, self.tokens[first : first + len(logits)], self.sampling.prompt_logprobs or 0)

    def scored_at(self, row: StepRow) -> int:
        """The first of the row's positions that tells it."""
        return max(row.start, self.sampling.prompt_logprobs_from - 1)


class _Row(NamedTuple):
    """What was drawn for a row, how many drafts were tried, and log-probabilities of the prompt's tokens."""

    drawn: Sequence[Drawn] = ()
    drafted: int = 0
    prompt: tuple[TokenLogprob, ...] = ()


class TorchEngine:
    """An Engine over one model and one KV slab.

    Its threads are `args.threads`, but one under `--deterministic`: where a matrix or vector is split between threads
    depends on its size, and with it a row's bits.
    """

    def __init__(self, args: WorkerArgs, memory: Tensor | memoryview) -> None:
        """`memory` is the slab: bytes of host memory, or a tensor on `args.device`, at least blocks * block_bytes.

        Raises ConfigError naming the setting at fault, `--model` for damaged or foreign checkpoints.
        """
        torch.set_num_threads(1 if args.deterministic else args.threads)
        self._device, self._dtype = check_device(args)
        packs = self._device.type == "cpu" and self._dtype is torch.float32
        self._make = make = LinearMaker(args.weights, packs=packs, deterministic=args.deterministic)
        model = resolve_model(args.model)
        self._config, self._rank = model.config, args.rank
        self._deterministic, self._pad_to = args.deterministic, ROWS if args.deterministic else 1
        group, self._stage = meet(args)
        self._max_positions = _check_lengths(args, model.config)
        self._speculate, self._drafting = args.speculate, args.speculate_method == "mtp"
        draft, fit = resolve_draft(args.draft_model, model) if args.draft_model else (None, None)
        added = fit.layers if fit else int(self._drafting)
        _check_geometry(args.geometry, model.config, args.dtype, added)
        self._geometry, self._layout = args.geometry, layout_of(args.geometry, args.blocks, args.rank)
        with torch.inference_mode():
            flat = _as_tensor(memory, self._layout, self._device, self._dtype)
            self._cache = KVCache(flat, self._layout)
            weights = load_weights(
                model.folder, model.config, self._dtype, str(self._device), make, group, self._stage,
                pad_to=self._pad_to, drafting=self._drafting,
            )  # fmt: skip
            self._decoder = Decoder(model.config, weights, self._max_positions, self._stage)
            self._draft_model = None
            if draft and fit:
                weights = load_weights(
                    draft.folder, draft.config, self._dtype, str(self._device), make, pad_to=self._pad_to
                )
                decoder = Decoder(draft.config, weights, self._max_positions)
                self._draft_model = DraftModel(draft.config, fit, decoder, model.config.vocab, model.config.layers)
                self._draft_caches = self._draft_model.caches(flat, self._layout)
        self._skip_sampling = args.skip_sampling
        self._grammars = Grammars(Path(model.folder), model.config.vocab, model.config.eos_ids)
        self._sequences: dict[int, _Sequence] = {}
        self._finite_checked = False
        self.vocab_size = model.config.vocab

    def open(self, seq: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """A new sequence. Raises LocalProtocolError for a number in use or a token outside the vocabulary."""
        if seq in self._sequences:
            raise LocalProtocolError(f"sequence {seq} is already open")
        self._check_tokens(prompt)
        grammar = self._grammars.of_schema(sampling.json_schema) if sampling.json_schema else None
        self._sequences[seq] = _Sequence(array("q", prompt), len(prompt), sampling, grammar)

    def force(self, seq: int, tokens: Sequence[int], draft: int = -1) -> None:
        """Append tokens that were decided elsewhere; they count as sampled."""
        self._check_tokens(tokens)
        sequence = self._sequence(seq)
        sequence.tokens.extend(array("q", tokens))
        sequence.draft = draft
        if sequence.grammar:
            sequence.grammar.take(tokens)

    def close(self, seq: int) -> None:
        """Forget a sequence; one that is not open is no error."""
        self._sequences.pop(seq, None)

    @torch.inference_mode()
    def step(self, rows: Sequence[StepRow]) -> list[RowResult]:
        """Compute all rows in one pass. A row that is refused (LocalProtocolError) leaves every sequence as it was."""
        if not rows:
            return []
        spans = self._spans(rows)
        order = pack_order(spans)
        sampled = self._sampled([rows[i] for i in order], [spans[i] for i in order])
        results = {i: self._result(rows[i], some) for i, some in zip(order, sampled, strict=True)}
        return [results[i] for i in range(len(rows))]

    def _result(self, row: StepRow, some: _Row) -> RowResult:
        sequence = self._sequences[row.seq]
        grammar = sequence.grammar
        first = some.drawn[0] if some.drawn else Drawn(-1, None)
        return RowResult(
            seq=row.seq,
            token=first.token,
            logprob=first.logprob,
            more=tuple(SampledToken(token=d.token, logprob=d.logprob) for d in some.drawn[1:]),
            drafted=some.drafted,
            draft=sequence.draft,
            problem=grammar.problem if grammar else "",
            prompt_from=sequence.scored_at(row) + 1 if some.prompt else 0,
            prompt_logprobs=some.prompt,
        )

    def _sampled(self, rows: Sequence[StepRow], spans: Sequence[Span]) -> list[_Row]:
        """Run the model over the packed spans, then draw and append the tokens of those that sample. In packed order.

        A row's drafts are computed with it. What is drawn is what would be drawn without: a draft that is another token
        ends it, and the KV behind that one is computed again. The random number of a token belongs to its position.
        """
        sequences = [self._sequences[row.seq] for row in rows]
        drafts = self._drafts(sequences, spans)
        draws = [span.wanted + len(some) for span, some in zip(spans, drafts, strict=True)]
        scores = [s.scores(row) for s, row in zip(sequences, rows, strict=True)]
        tails = [p.end - s.scored_at(r) if n else 0 for s, r, p, n in zip(sequences, rows, spans, scores, strict=True)]
        spans = [_wanting(*some) for some in zip(spans, map(len, drafts), tails, strict=True)]
        known = [s.tokens + some if some else s.tokens for s, some in zip(sequences, drafts, strict=True)]
        logits, hidden = self._forward(known, spans, self._cache)
        if logits is None:
            self._draft_next(sequences, spans, hidden, [0] * len(rows))
            return [_Row() for _ in rows]
        logits = logits[: sum(span.wanted for span in spans)]
        self._check_finite(logits)
        prompts: Sequence[tuple[TokenLogprob, ...]] = [()] * len(rows)
        if any(scores):
            parts = torch.split(logits, [span.wanted for span in spans])
            prompts = [s.scored(row, part[:n]) for s, row, part, n in zip(sequences, rows, parts, scores, strict=True)]
            logits = torch.cat([part[len(part) - n :] for part, n in zip(parts, draws, strict=True)])
        wanted = [s.draw(d[:i]) for s, d, n in zip(sequences, drafts, draws, strict=True) for i in range(n)]
        drawn = iter(sample(logits, wanted, self._config.eos_ids) if wanted else ())
        made = [
            _Row(sequence.take(list(islice(drawn, n)), some), len(some), prompt)
            for sequence, n, some, prompt in zip(sequences, draws, drafts, prompts, strict=True)
        ]
        self._draft_next(sequences, spans, hidden, [len(row.drawn) for row in made])
        self._follow_all_right(sequences, spans, drafts, made)
        return made

    def _drafts(self, sequences: Sequence[_Sequence], spans: Sequence[Span]) -> list[array[int]]:
        """Guesses at what follows each row that decodes. A draft model computes all rows for it."""
        most = [self._drafts_most(s, span) for s, span in zip(sequences, spans, strict=True)]
        if self._draft_model:
            known = [s.tokens for s in sequences]
            return self._draft_model.guess(known, spans, most, self._draft_caches, self._plan, self._ids)
        if self._drafting:
            both = zip(sequences, most, strict=True)
            return [array("q", [s.draft] if count > 0 <= s.draft else []) for s, count in both]
        return [array("q", lookup(s.tokens, count)) for s, count in zip(sequences, most, strict=True)]

    def _drafts_most(self, sequence: _Sequence, span: Span) -> int:
        """How many there may be: what the last block, the answer and the context hold."""
        sampled = len(sequence.tokens) - sequence.prompt
        if not (self._speculate and sampled and span.wanted and span.count == 1) or sequence.grammar:
            return 0
        room = min(-span.end % self._geometry.block_size, self._max_positions - span.end - 1)
        return min(self._speculate, room, sequence.sampling.max_tokens - sampled - 1)

    def _follow_all_right(
        self, sequences: Sequence[_Sequence], spans: Sequence[Span], drafts: Sequence[array[int]], made: Sequence[_Row]
    ) -> None:
        """The last draft is one that the draft model has not computed itself. Where it was right, it is now: its KV is
        as old as the model's after every step."""
        if not self._draft_model:
            return
        right = [i for i, some in enumerate(drafts) if some and len(made[i].drawn) > len(some)]
        if right:
            known = [sequences[i].tokens for i in right]
            lasts = [Span(spans[i].end - 1, 1, spans[i].blocks) for i in right]
            order = pack_order(lasts)
            self._draft_model.forward(
                [known[at] for at in order], [lasts[at] for at in order], self._draft_caches, self._plan, self._ids
            )

    def _forward(self, known: Sequence[array[int]], spans: Sequence[Span], cache: KVCache) -> Computed:
        """Of the packed spans. `known`: the token ids of each one's sequence."""
        parts = self._stage.parts(spans)
        if len(parts) == 1:
            return self._part(known, spans, cache)
        logits = [self._part([known[i] for i, _ in part], [s for _, s in part], cache).logits for part in parts]
        return Computed(joined(logits, parts))

    def _part(self, known: Sequence[array[int]], spans: Sequence[Span], cache: KVCache) -> Computed:
        tokens = [ids[p.start : p.end] for ids, p in zip(known, spans, strict=True)]
        return self._decoder.forward(self._ids(tokens), self._positions(spans), self._plan(spans, cache), cache)

    def _plan(self, spans: Sequence[Span], cache: KVCache) -> Plan:
        return make_plan(spans, cache, self._device, tiled=self._deterministic, pad_to=self._pad_to)

    def _draft_next(
        self, sequences: Sequence[_Sequence], spans: Sequence[Span], hidden: Tensor | None, drawn: Sequence[int]
    ) -> None:
        """What may come after the tokens of sequences that have drawn some, as the draft layer has it, if there is one.

        `hidden` are the step's packed rows. Of them the draft layer takes those whose next token is known by now, which
        are none behind a draft that was wrong. The last row of a cached block is as its first owner's next token made
        it: where another one follows, a draft may be worse for it.
        """
        if hidden is None:
            return
        made, at = list[tuple[_Sequence, Span, range]](), 0
        for sequence, span, tokens in zip(sequences, spans, drawn, strict=True):
            count = min(len(sequence.tokens) - 1, span.end) - span.start
            if count > 0:
                wanted = int(tokens > 0 and not sequence.grammar)
                made.append((sequence, Span(span.start, count, span.blocks, wanted), range(at, at + count)))
            at += span.count
            sequence.draft = -1
        if not made:
            return
        made = [made[i] for i in pack_order([span for _, span, _ in made])]
        picked = hidden.index_select(0, self._ids([array("q", rows) for _, _, rows in made]))
        logits = self._draft_logits([s.tokens for s, _, _ in made], [span for _, span, _ in made], picked, self._cache)
        drafts = iter(logits.argmax(-1).tolist() if logits is not None else ())
        for sequence, span, _ in made:
            if span.wanted:
                sequence.draft = next(drafts)

    def _draft_logits(
        self, known: Sequence[array[int]], spans: Sequence[Span], hidden: Tensor, cache: KVCache
    ) -> Tensor | None:
        """Of the packed spans' wanted rows; `hidden` are all rows', with padding."""
        following = [ids[p.start + 1 : p.end + 1] for ids, p in zip(known, spans, strict=True)]
        positions, plan = self._positions(spans), self._plan(spans, cache)
        return self._decoder.draft(hidden, self._ids(following), positions, plan, cache)

    def _ids(self, parts: Sequence[array[int]]) -> Tensor:
        """One after the other, and padding."""
        return self._padded([np.frombuffer(part, dtype=np.int64) for part in parts])

    def _positions(self, spans: Sequence[Span]) -> Tensor:
        return self._padded([np.arange(span.start, span.end) for span in spans])

    def _padded(self, parts: Sequence[Ids]) -> Tensor:
        padding = np.zeros(-sum(map(len, parts)) % self._pad_to, dtype=np.int64)
        return torch.from_numpy(np.concatenate([*parts, padding])).to(self._device)

    def _spans(self, rows: Sequence[StepRow]) -> list[Span]:
        """Check every row first; then apply the changes of the block tables."""
        tables = [self._table(row) for row in rows]
        for row, table in zip(rows, tables, strict=True):
            self._check_row(row, table)
        if len({row.seq for row in rows}) != len(rows):
            raise LocalProtocolError("a step names a sequence twice")
        for row, table in zip(rows, tables, strict=True):
            self._sequences[row.seq].blocks = table
        sample = not self._skip_sampling
        return [
            Span(row.start, row.count, np.frombuffer(table, dtype=np.int64), int(row.sample and sample))
            for row, table in zip(rows, tables, strict=True)
        ]

    def _table(self, row: StepRow) -> array[int]:
        known = self._sequence(row.seq).blocks
        if not row.new_blocks and not row.reset:
            return known
        new = array("q", unpack_u32(row.new_blocks))
        return new if row.reset else known + new  # never in place: the last step's arrays look into `known`

    def _check_row(self, row: StepRow, table: array[int]) -> None:
        known, end = len(self._sequences[row.seq].tokens), row.start + row.count
        if row.start < 0 or row.count < 1 or end > known:
            raise LocalProtocolError(f"positions {row.start} to {end} of sequence {row.seq}, which has {known} tokens")
        if row.sample and end != known:
            raise LocalProtocolError(f"sequence {row.seq} would sample at {end}, but has {known} tokens")
        if end > self._max_positions:
            raise LocalProtocolError(f"position {end - 1} of sequence {row.seq} is beyond {self._max_positions} tokens")
        if end > len(table) * self._geometry.block_size:
            raise LocalProtocolError(f"{len(table)} blocks of sequence {row.seq} do not hold {end} tokens")
        if max(table) >= self._cache.blocks:
            raise LocalProtocolError(f"block {max(table)} of sequence {row.seq}: the slab has {self._cache.blocks}")

    def _sequence(self, seq: int) -> _Sequence:
        try:
            return self._sequences[seq]
        except KeyError:
            raise LocalProtocolError(f"sequence {seq} is not open") from None

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise LocalProtocolError(f"a token id is outside 0 to {self.vocab_size - 1}")

    def _check_finite(self, logits: Tensor) -> None:
        """Once: damaged weights show in the first logits."""
        if not self._finite_checked:
            _require_finite(logits, "--model")
        self._finite_checked = True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One prefill and one decode step on memory of their own: every weight is touched, the logits checked."""
        count = min(WARM_UP_TOKENS, self._max_positions - 1)
        blocks = -(-(count + 1) // self._geometry.block_size)
        layout = layout_of(self._geometry, blocks, self._rank)
        memory = torch.zeros(layout.region_bytes // self._dtype.itemsize, dtype=self._dtype, device=self._device)
        cache = KVCache(memory, layout)
        tokens = array("q", [i % self.vocab_size for i in range(count + 2)])
        for start, end in ((0, count), (count, count + 1)):
            span = Span(start, end - start, np.arange(blocks, dtype=np.int64), wanted=1)
            logits, hidden = self._forward([tokens], [span], cache)
            if self._stage.is_last:
                assert logits is not None
                self._check_finite(logits)
            if hidden is not None:
                drafts = self._draft_logits([tokens], [span], hidden, cache)
                assert drafts is not None
                _require_finite(drafts, "--model")
            if self._draft_model:
                caches = self._draft_model.caches(memory, layout)
                drafts = self._draft_model.forward([tokens], [span], caches, self._plan, self._ids)
                assert drafts is not None
                _require_finite(drafts, "--draft-model")

    @torch.inference_mode()
    def touch(self) -> Iterator[None]:
        """The weights. A device's memory does not cool down."""
        if self._device.type == "cpu":
            yield from self._make.touch()


def _wanting(span: Span, drafts: int, tail: int) -> Span:
    """With drafts behind it, and the logits of its last `tail` positions where some of these are scored."""
    wanted = tail or span.wanted
    return Span(span.start, span.count + drafts, span.blocks, wanted + drafts) if drafts or tail else span


def _require_finite(logits: Tensor, setting: str) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise ConfigError(setting, "the logits are no finite numbers: the weights are damaged (NaN or infinity)")


def check_device(args: WorkerArgs) -> tuple[torch.device, torch.dtype]:
    """The device and type to compute with. Raises ConfigError naming `--device`, `--dtype` or `--deterministic`."""
    if args.dtype not in DTYPES:
        raise ConfigError("--dtype", f"{args.dtype!r} is none of {', '.join(DTYPES)}")
    kind = "cpu" if args.device == "fake" else args.device.partition(":")[0]
    if kind in KINDS:
        check_there(args.device, getattr(torch, kind))
        check_type(args.device, getattr(torch, kind), args.dtype)
    elif kind != "cpu":
        raise ConfigError("--device", f"{args.device!r} is not supported; use cpu, {' or '.join(KINDS)}")
    if args.deterministic and (kind, args.dtype) != ("cpu", "float32"):
        raise ConfigError("--deterministic", "needs --device cpu and --dtype float32")
    if kind == "cpu" and not _cpu_has(CPU_NEEDS.get(args.dtype)):
        raise ConfigError("--dtype", f"this processor computes no {args.dtype}; use float32")
    return torch.device("cpu" if kind == "cpu" else args.device), DTYPES[args.dtype]


def _cpu_has(feature: str | None) -> bool:
    if feature is None:
        return True
    ask = getattr(torch.cpu, "get_capabilities", None)  # older PyTorch cannot tell
    return ask is not None and bool(ask().get(feature))


def _check_lengths(args: WorkerArgs, config: ModelConfig) -> int:
    if args.max_model_len > config.max_positions:
        raise ConfigError(
            "--max-model-len", f"{args.max_model_len} tokens, but the model was made for {config.max_positions}"
        )
    return args.max_model_len or config.max_positions


def _check_geometry(geometry: Geometry, config: ModelConfig, dtype: str, added: int) -> None:
    """`added`: layers for drafts."""
    found = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.kv_parts, geometry.dtype)
    wanted = (config.layers + added, config.kv_heads, config.head_dim, config.kv_parts, dtype)
    if found != wanted:
        raise LocalProtocolError(f"the KV geometry is {found}, the model needs {wanted}")


def _as_tensor(memory: Tensor | memoryview, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The layout's region as a one-dimensional tensor, without a copy."""
    tensor = memory if isinstance(memory, Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
    if tensor.device.type != device.type:
        raise ConfigError("--device", f"the KV slab lies on {tensor.device.type}: {device.type} needs one of its own")
    flat = tensor.reshape(-1).view(torch.uint8)
    if len(flat) < layout.region_bytes:
        raise LocalProtocolError(
            f"the KV slab has {len(flat)} bytes, {layout.blocks} blocks need {layout.region_bytes}"
        )
    return flat[: layout.region_bytes].view(dtype)
