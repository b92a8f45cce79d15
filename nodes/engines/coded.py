"""The coded-KV engine: no model, yet every KV byte is known and the next token depends on every byte that was read.

The code, all arithmetic modulo 2**64, mix() being the finaliser of splitmix64:

    prefix(i)               = mix(sum over j <= i of mix(j * 2**32 + token[j] + G)),  G = 0x9E3779B97F4A7C15
    word(i, l, part, h, w)  = mix(prefix(i) + G * (l * 2**48 + part * 2**40 + h * 2**16 + w + 1))
    cell                    = the words of one (position, layer, part, head) in little-endian order, cut to
                              head_dim * width bytes; bytes mean nothing else, so any dtype width will do

A byte is therefore the same whatever the block size, the chunking, the node, or the geometry around it.

    next token = LOW + xxh3_64(all cells of positions 0 to end, as read from the slab, in order of
                 [position, layer, part, head, channel]; seed) modulo (HIGH - LOW)

where the seed is 0 for greedy and `sampling.seed + 1` otherwise. With the byte vocabulary of 256, LOW and HIGH are 32
and 127, so that answers are printable ASCII; with another vocabulary they are 5 and the vocabulary's size. The end
of sequence, id 0, is outside that range: it comes only where the tokens ask for it, by EOT (byte 4). With k of
them among the tokens, id 0 follows where k - 1 tokens stand after the last EOT, so that the prompt "hi" + 4 EOTs
has three tokens of answer and then the end.

The engine knows nothing of who wrote a block: whatever it reads for a sampled row is compared with the code.

One rank of several holds the cells of its layers and heads alone, and takes those of the others as the code says. So
all ranks choose the token of one that holds all, as long as every cell that any of them reads is right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pdbus.bus.errors import ConfigError, LocalProtocolError
from pdbus.bus.messages import Geometry, KVLayout, Sampling, TokenLogprob
from pdbus.bus.wire import unpack_u32
from pdbus.connector.ipc import RowResult, StepRow, WorkerArgs
from pdbus.connector.layout import DTYPE_BYTES, geometry_for, layers_of, layout_of, row_bytes
from pdbus.nodes.kv_view import Bytes, view_of

U64 = NDArray[np.uint64]

EOS_ID = 0
EOT_ID = 4
VOCAB_MIN = 16  # room for EOS and EOT below LOW, and something to choose from above it
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
CODE_BYTES_MAX = 4 << 20  # cells are computed in slices of this, so that the temporaries stay in cache


def coded_geometry(block_size: int = 16) -> Geometry:
    """The default: 2 layers, 2 KV heads of 8 float32 channels, 256 bytes a token."""
    return geometry_for(layers=2, kv_heads=2, head_dim=8, block_size=block_size, dtype="float32")


# ---------------------------------------------------------------- the code


def mix(x: U64) -> U64:
    """The finaliser of splitmix64, in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def prefix_sums(tokens: Sequence[int], start: int = 0, total: int = 0) -> U64:
    """The sums under prefix(i), [len(tokens)], for tokens at `start` on, `total` being the sum before them."""
    places = np.arange(start, start + len(tokens), dtype=np.uint64) << np.uint64(32)
    terms = mix(places + np.asarray(tokens, dtype=np.uint64) + np.uint64(GOLDEN))
    if len(terms):
        terms[:1] += np.uint64(total)
    return np.cumsum(terms, dtype=np.uint64)


def cell_code(geometry: Geometry, sums: U64) -> Bytes:
    """The cells of the positions whose prefix sums are given: [positions, layers, parts, heads, row bytes]."""
    width = row_bytes(geometry)
    words = -(-width // 8)
    axes = (geometry.layers, geometry.kv_parts, geometry.kv_heads, words)
    layer, part, head, word = np.ogrid[tuple(slice(n) for n in axes)]
    keys = ((layer << 48) + (part << 40) + (head << 16) + word + 1).astype(np.uint64) * np.uint64(GOLDEN)
    prefixes = mix(sums.copy())
    code = np.empty((len(sums), *axes[:3], width), dtype=np.uint8)
    span = max(1, CODE_BYTES_MAX // (8 * keys.size))
    for at in range(0, len(sums), span):
        values = mix(prefixes[at : at + span, None, None, None, None] + keys)
        code[at : at + span] = values.astype("<u8", copy=False).view(np.uint8)[..., :width]
    return code


def coded_cells(geometry: Geometry, tokens: Sequence[int]) -> Bytes:
    """What the KV of `tokens` must be: [positions, layers, parts, heads, row bytes]."""
    return cell_code(geometry, prefix_sums(tokens))


def read_cells(slab: Bytes, table: Sequence[int], positions: int) -> Bytes:
    """A copy of the cells of the first positions, in canonical order: [positions, layer, part, head, row bytes]."""
    size = slab.shape[4]
    used = np.asarray(table[: -(-positions // size)], dtype=np.intp)
    read = np.ascontiguousarray(slab.transpose(0, 4, 1, 2, 3, 5)[used])
    return read.reshape(len(used) * size, *read.shape[2:])[:positions]


def first_wrong(layout: KVLayout, table: Sequence[int], read: Bytes, code: Bytes) -> str:
    """Names the first byte of `read` that differs from `code`, '' if none does.

    Both are [positions, layer, part, head held, row bytes]. The block is the physical one; the channel is the
    element that the byte lies in.
    """
    if np.array_equal(read, code):
        return ""
    where = int(np.argmax((read != code).reshape(-1)))
    position, layer, part, head, byte = (int(i) for i in np.unravel_index(where, read.shape))
    block, slot = table[position // layout.block_size], position % layout.block_size
    name = "latent" if len(layout.parts) == 1 else "KV"[part]
    channel = byte // DTYPE_BYTES[layout.dtype]
    return (
        f"block {block} layer {layout.layers[layer]} {name} head {layout.heads[head]} slot {slot} channel {channel}:"
        f" position {position} reads {read.flat[where]:#04x}, must be {code.flat[where]:#04x}"
    )


def check_slab(memory: Any, geometry: Geometry, blocks: int, table: Sequence[int], tokens: Sequence[int]) -> str:
    """Whether the blocks of `table` of a single rank hold exactly the KV of `tokens`: names the first wrong byte, ''
    if none."""
    layout = layout_of(geometry, blocks)
    read = read_cells(view_of(memory, layout), table, len(tokens))
    return first_wrong(layout, table, read, coded_cells(geometry, tokens))


def choose(read: Bytes, sampling: Sampling, vocab_size: int) -> int:
    """The next token by the cells that were read."""
    seed = (sampling.seed + 1) & MASK if sampling.temperature > 0 else 0
    low, high = (32, 127) if vocab_size == 256 else (EOT_ID + 1, vocab_size)
    return low + int(xxhash.xxh3_64_intdigest(read.data, seed=seed)) % (high - low)


def logprob_of(token: int, vocab_size: int, alternatives: int) -> TokenLogprob:
    """A made-up but fixed function of the token: it is the likeliest, its successors follow one nat apart."""
    best = -0.0625 * (1 + token % 15)
    count = min(alternatives, vocab_size)
    return TokenLogprob(logprob=best, top=tuple(((token + k) % vocab_size, best - k) for k in range(count)))


# ---------------------------------------------------------------- the engine


class _Sequence:
    """Token ids, block table, and the code of the positions so far (grown by doubling)."""

    def __init__(self, geometry: Geometry, prompt: Sequence[int], sampling: Sampling) -> None:
        self.geometry = geometry
        self.tokens = list(prompt)
        self.sampling = sampling
        self.table: list[int] = []
        self._coded = 0
        self._sum = 0
        self._code = cell_code(geometry, np.empty(0, dtype=np.uint64))

    def code(self, end: int) -> Bytes:
        """The code of positions 0 to `end`, [end, layer, part, head, row bytes]."""
        if end > self._coded:
            sums = prefix_sums(self.tokens[self._coded : end], self._coded, self._sum)
            self._reserve(end)
            self._code[self._coded : end] = cell_code(self.geometry, sums)
            self._coded, self._sum = end, int(sums[-1])
        return self._code[:end]

    def _reserve(self, end: int) -> None:
        if end > len(self._code):
            grown = np.empty((max(end, 2 * self._coded), *self._code.shape[1:]), dtype=np.uint8)
            grown[: self._coded] = self._code[: self._coded]
            self._code = grown

    def asks_end(self) -> bool:
        """Whether the tokens ask for the end of sequence now (EOT, module docstring)."""
        asked = self.tokens.count(EOT_ID)
        return asked > 0 and self.tokens[::-1].index(EOT_ID) == asked - 1


class CodedEngine:
    """Engine of nodes/engines over `memory`, a writable buffer."""

    def __init__(self, args: WorkerArgs, memory: Any) -> None:
        self.geometry = _checked(args)
        self._layout = layout_of(self.geometry, args.blocks, args.rank)
        self.vocab_size = args.coded_vocab
        self._skip_sampling = args.skip_sampling
        self._step_ns, self._token_ns = args.coded_step_us * 1000, args.coded_token_us * 1000
        held = memoryview(memory).nbytes
        if held < self._layout.region_bytes:
            problem = f"{args.blocks} blocks take {self._layout.region_bytes} bytes, but the slab has {held}"
            raise ConfigError("--kv-blocks", problem)
        self._slab = view_of(memory, self._layout)
        layers = layers_of(self.geometry.layers, self.geometry.pp, args.rank // self.geometry.tp)
        heads = self._layout.heads
        self._held = np.s_[:, layers.start : layers.stop, :, heads[0] : heads[-1] + 1]
        self._sequences: dict[int, _Sequence] = {}

    def open(self, seq: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self._sequences[seq] = _Sequence(self.geometry, prompt, sampling)

    def force(self, seq: int, tokens: Sequence[int], draft: int = -1) -> None:
        self._sequence(seq).tokens.extend(tokens)

    def close(self, seq: int) -> None:
        self._sequences.pop(seq, None)

    def step(self, rows: Sequence[StepRow]) -> list[RowResult]:
        """All rows are written before any is read, as in a batch. Raises LocalProtocolError on an impossible row."""
        began = time.monotonic_ns()
        for row in rows:
            self._write(row)
        results = [self._result(row) for row in rows]
        prefill_tokens = sum(row.count - row.sample for row in rows)  # a sampled row's last one is the step's own
        self._simulate(began + self._step_ns + self._token_ns * prefill_tokens)
        return results

    def warm_up(self) -> None:
        """Runs the code once, off the slab."""
        choose(coded_cells(self.geometry, range(self.geometry.block_size)), Sampling(), self.vocab_size)

    def touch(self) -> Iterator[None]:
        """It has no weights."""
        return iter(())

    def _sequence(self, seq: int) -> _Sequence:
        sequence = self._sequences.get(seq)
        if sequence is None:
            raise LocalProtocolError(f"sequence {seq} is not open")
        return sequence

    def _write(self, row: StepRow) -> None:
        sequence = self._sequence(row.seq)
        if row.reset:
            sequence.table.clear()
        sequence.table.extend(unpack_u32(row.new_blocks))
        self._check(row, sequence)
        end, size = row.start + row.count, self.geometry.block_size
        positions = np.arange(row.start, end)
        blocks = np.asarray(sequence.table, dtype=np.intp)[positions // size]
        self._slab[blocks, :, :, :, positions % size] = sequence.code(end)[row.start :][self._held]

    def _check(self, row: StepRow, sequence: _Sequence) -> None:
        end, known, table = row.start + row.count, len(sequence.tokens), sequence.table
        room = len(table) * self.geometry.block_size
        problem = ""
        if row.start < 0 or row.count < 1 or end > known:
            problem = f"positions {row.start} to {end}, but {known} tokens are known"
        elif row.sample and end != known:
            problem = f"samples after {end} tokens, but {known} are known"
        elif end > room:
            problem = f"{end} positions, but its blocks hold {room}"
        elif row.new_blocks and max(table) >= len(self._slab):
            problem = f"block {max(table)}, but the slab has {len(self._slab)}"
        if problem:
            raise LocalProtocolError(f"sequence {row.seq}: {problem}")

    def _result(self, row: StepRow) -> RowResult:
        if not row.sample:
            return RowResult(seq=row.seq)
        sequence = self._sequence(row.seq)
        end = row.start + row.count
        read, code = read_cells(self._slab, sequence.table, end), sequence.code(end)
        wrong = first_wrong(self._layout, sequence.table, read, code[self._held])
        if self._skip_sampling:
            return RowResult(seq=row.seq, wrong_kv=wrong)
        token = EOS_ID if sequence.asks_end() else self._choose(read, code, sequence.sampling)
        sequence.tokens.append(token)
        wanted = sequence.sampling.logprobs
        logprob = None if wanted is None else logprob_of(token, self.vocab_size, wanted)
        return RowResult(seq=row.seq, token=token, logprob=logprob, wrong_kv=wrong)

    def _choose(self, read: Bytes, code: Bytes, sampling: Sampling) -> int:
        """By what was read of what we hold, and the code of the rest."""
        if read.shape == code.shape:
            return choose(read, sampling, self.vocab_size)
        whole = code.copy()
        whole[self._held] = read
        return choose(whole, sampling, self.vocab_size)

    def _simulate(self, until_ns: int) -> None:
        left_ns = until_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)


def _checked(args: WorkerArgs) -> Geometry:
    g = args.geometry
    whole = geometry_for(g.layers, g.kv_heads, g.head_dim, g.block_size, g.dtype, g.kv_parts)
    if g.block_bytes != whole.block_bytes or g.kv_parts > 2:
        raise ConfigError("geometry", f"the coded engine needs {whole} with kv_parts 1 or 2, not {g}")
    if args.coded_vocab < VOCAB_MIN:
        raise ConfigError("coded_vocab", f"{args.coded_vocab} is too few tokens; at least {VOCAB_MIN}")
    if args.blocks < 1:
        raise ConfigError("--kv-blocks", f"{args.blocks} blocks; at least 1")
    return g
