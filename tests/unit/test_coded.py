"""The coded-KV engine: every byte known, every wrong byte named, and a token that depends on all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pdbus.bus.errors import ConfigError, LocalProtocolError
from pdbus.bus.messages import Geometry, Sampling
from pdbus.bus.wire import pack_u32
from pdbus.connector.ipc import RowResult, StepRow, WorkerArgs
from pdbus.connector.layout import DTYPE_BYTES, geometry_for, layout_of, offset, row_bytes
from pdbus.nodes.engines.coded import EOT_ID, CodedEngine, check_slab, coded_cells, coded_geometry

BLOCKS = 8
POISON = 0xA5
PROMPT = list(b"the quick brown fox")
GREEDY = Sampling()


class Node:
    """One coded engine over a poisoned slab, and a block table handed out in a scrambled order."""

    def __init__(self, geometry: Geometry, **changes: object) -> None:
        self.geometry = geometry
        self.memory = bytearray([POISON]) * (BLOCKS * geometry.block_bytes)
        args = {"endpoint": "", "slab_path": "", "slab_bytes": len(self.memory), "blocks": BLOCKS, "model": ""}
        self.engine = CodedEngine(WorkerArgs(engine="coded", geometry=geometry, **{**args, **changes}), self.memory)
        self.table = [5, 2, 7, 0, 3, 1, 6, 4]

    def run(self, row: StepRow) -> RowResult:
        return self.engine.step([row])[0]

    def blocks(self) -> bytes:
        return pack_u32(self.table)

    def prefill(self, prompt: Sequence[int] = PROMPT, sampling: Sampling = GREEDY, seq: int = 1) -> RowResult:
        self.engine.open(seq, prompt, sampling)
        return self.run(StepRow(seq=seq, start=0, count=len(prompt), new_blocks=self.blocks(), sample=True))

    def decode(self, start: int, count: int, seq: int = 1) -> list[int]:
        rows = (StepRow(seq=seq, start=at, count=1, sample=True) for at in range(start, start + count))
        return [self.run(row).token for row in rows]

    def wrong(self, tokens: Sequence[int]) -> str:
        return check_slab(self.memory, self.geometry, BLOCKS, self.table, tokens)


@pytest.fixture
def node() -> Node:
    return Node(coded_geometry(4))


GEOMETRIES = [
    coded_geometry(4),
    coded_geometry(16),
    geometry_for(layers=3, kv_heads=1, head_dim=5, block_size=4, dtype="bfloat16"),
    geometry_for(layers=1, kv_heads=3, head_dim=3, block_size=7, dtype="uint8"),
    geometry_for(layers=2, kv_heads=1, head_dim=9, block_size=4, dtype="float32", kv_parts=1),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_prefill_writes_the_code_and_nothing_else(geometry: Geometry) -> None:
    node = Node(geometry)
    assert node.prefill().wrong_kv == ""
    assert node.wrong(PROMPT) == ""
    untouched = node.table[-(-len(PROMPT) // geometry.block_size) :]
    for block in untouched:
        at = block * geometry.block_bytes
        assert node.memory[at : at + geometry.block_bytes] == bytes([POISON]) * geometry.block_bytes


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_code_lies_where_the_layout_says(geometry: Geometry) -> None:
    node = Node(geometry)
    node.prefill()
    cells = coded_cells(geometry, PROMPT)
    for position, layer, part, head in np.ndindex(cells.shape[:4]):
        block, slot = node.table[position // geometry.block_size], position % geometry.block_size
        at = offset(layout_of(geometry, BLOCKS), block, layer, part, head, slot)
        assert node.memory[at : at + cells.shape[4]] == cells[position, layer, part, head].tobytes()


def test_the_code_does_not_depend_on_the_geometry_around_a_cell() -> None:
    small, large = geometry_for(2, 1, 8, 4, "uint8"), geometry_for(5, 4, 16, 16, "uint8")
    inner = coded_cells(large, PROMPT)[:, :2, :, :1, :8]
    assert np.array_equal(inner, coded_cells(small, PROMPT))


def test_every_cell_depends_on_the_whole_prefix() -> None:
    changed = [PROMPT[0] ^ 1, *PROMPT[1:]]
    geometry = coded_geometry()
    ours, theirs = coded_cells(geometry, PROMPT), coded_cells(geometry, changed)
    assert not (ours == theirs).all(axis=-1).any()


@pytest.mark.parametrize("geometry", GEOMETRIES[2:], ids=str)
def test_every_flipped_byte_is_named_and_changes_the_token(geometry: Geometry) -> None:
    """Wrong bytes that another node wrote must show in the very next token, whichever byte it is.

    A token is one of 95, so one flip in 95 leaves it as it was by chance: most must change it, all must be named.
    """
    node = Node(geometry)
    right = node.prefill().token
    changed = total = 0
    for at, place in every_byte(node, positions=len(PROMPT) - 1):
        node.memory[at] ^= 0x40
        node.engine.open(1, PROMPT, GREEDY)
        again = StepRow(seq=1, start=len(PROMPT) - 1, count=1, new_blocks=node.blocks(), sample=True)
        result = node.run(again)
        node.memory[at] ^= 0x40
        assert result.wrong_kv.startswith(place)
        total += 1
        changed += result.token != right
    assert changed > 0.95 * total


def every_byte(node: Node, positions: int) -> Iterator[tuple[int, str]]:
    """Where each byte of the first positions lies in the slab, and how it is named."""
    g = node.geometry
    layout, width = layout_of(g, BLOCKS), DTYPE_BYTES[g.dtype]
    for position, layer, part, head, byte in np.ndindex(positions, g.layers, g.kv_parts, g.kv_heads, row_bytes(g)):
        block, slot = node.table[position // g.block_size], position % g.block_size
        name = "latent" if g.kv_parts == 1 else "KV"[part]
        channel = byte // width
        place = f"block {block} layer {layer} {name} head {head} slot {slot} channel {channel}: position {position} "
        yield offset(layout, block, layer, part, head, slot) + byte, place


def test_the_first_wrong_byte_is_named_with_both_values(node: Node) -> None:
    node.prefill()
    at = offset(layout_of(node.geometry, BLOCKS), node.table[4], layer=1, part=0, head=0, slot=1) + 5 * 4 + 2
    node.memory[at] ^= 0xFF
    node.memory[at + 1] ^= 0xFF
    must = coded_cells(node.geometry, PROMPT)[17, 1, 0, 0, 22]
    expected = "block 3 layer 1 K head 0 slot 1 channel 5: position 17 reads {:#04x}, must be {:#04x}"
    assert node.wrong(PROMPT) == expected.format(must ^ 0xFF, must)


def test_a_byte_overwritten_after_it_was_verified_is_found(node: Node) -> None:
    """Blocks given away too early are overwritten later: nothing once verified may be trusted again."""
    node.prefill()
    assert node.run(StepRow(seq=1, start=len(PROMPT), count=1, sample=True)).wrong_kv == ""
    node.memory[node.table[0] * node.geometry.block_bytes] ^= 1
    wrong = node.run(StepRow(seq=1, start=len(PROMPT) + 1, count=1, sample=True)).wrong_kv
    assert wrong.startswith("block 5 layer 0 K head 0 slot 0 channel 0: position 0 ")


@pytest.mark.parametrize("sizes", [[19], [1] * 19, [4, 4, 4, 4, 3], [3, 16], [18, 1]])
def test_chunking_changes_no_byte_and_no_token(sizes: list[int]) -> None:
    whole, parts = Node(coded_geometry(4)), Node(coded_geometry(4))
    expected = whole.prefill().token
    parts.engine.open(1, PROMPT, GREEDY)
    start = 0
    for count in sizes:
        held = b"" if start else parts.blocks()
        sample = start + count == len(PROMPT)
        result = parts.run(StepRow(seq=1, start=start, count=count, new_blocks=held, sample=sample))
        start += count
        assert (result.token >= 0) == sample
    assert result.token == expected
    assert parts.memory == whole.memory


def test_two_nodes_agree_over_copied_blocks() -> None:
    """What a hand-off does: the prefill node's blocks copied into other blocks, its token forced, decoded there."""
    one, p, d = Node(coded_geometry(4)), Node(coded_geometry(4)), Node(coded_geometry(4))
    alone = [one.prefill().token, *one.decode(len(PROMPT), 6)]
    first = p.prefill().token
    d.table = list(range(BLOCKS))
    size = d.geometry.block_bytes
    for source, target in zip(p.table[:5], d.table[:5], strict=True):
        d.memory[target * size : (target + 1) * size] = p.memory[source * size : (source + 1) * size]
    d.engine.open(1, PROMPT, GREEDY)
    d.engine.force(1, [first])
    second = d.run(StepRow(seq=1, start=len(PROMPT), count=1, new_blocks=d.blocks(), sample=True))
    assert second.wrong_kv == ""
    assert [first, second.token, *d.decode(len(PROMPT) + 1, 5)] == alone


def test_block_size_changes_no_token() -> None:
    a, b = Node(coded_geometry(4)), Node(coded_geometry(16))
    assert [a.prefill().token, *a.decode(19, 5)] == [b.prefill().token, *b.decode(19, 5)]


def test_reset_recomputes_into_other_blocks(node: Node) -> None:
    """After a preemption: the table is emptied, prompt and answer recomputed in one row, the next token unchanged."""
    other = Node(coded_geometry(4))
    first, second = other.prefill().token, other.decode(19, 1)[0]
    assert node.prefill().token == first
    row = StepRow(seq=1, start=0, count=20, reset=True, new_blocks=pack_u32([6, 4, 1, 3, 0]), sample=True)
    result = node.run(row)
    assert (result.token, result.wrong_kv) == (second, "")


def test_rows_of_one_step_do_not_touch_each_other(node: Node) -> None:
    node.engine.open(1, PROMPT[:6], GREEDY)
    node.engine.open(2, PROMPT[:7], GREEDY)
    rows = [
        StepRow(seq=1, start=0, count=6, new_blocks=pack_u32([5, 2]), sample=True),
        StepRow(seq=2, start=0, count=7, new_blocks=pack_u32([7, 0]), sample=True),
    ]
    together = [r.token for r in node.engine.step(rows)]
    alone = [Node(coded_geometry(4)).prefill(PROMPT[:n]).token for n in (6, 7)]
    assert together == alone


def test_the_seed_counts_only_when_sampling() -> None:
    def answer(sampling: Sampling) -> list[int]:
        node = Node(coded_geometry(4))
        return [node.prefill(sampling=sampling).token, *node.decode(19, 8)]

    assert answer(Sampling(seed=1)) == answer(Sampling(seed=2))
    assert answer(Sampling(seed=1, temperature=1.0)) == answer(Sampling(seed=1, temperature=1.0))
    assert answer(Sampling(seed=1, temperature=1.0)) != answer(Sampling(seed=2, temperature=1.0))
    assert answer(Sampling(seed=0, temperature=1.0)) != answer(Sampling())


def test_the_largest_seed_is_accepted(node: Node) -> None:
    assert node.prefill(sampling=Sampling(temperature=1.0, seed=(1 << 63) - 1)).token >= 0


def test_answers_are_printable_and_do_not_end_by_chance() -> None:
    node = Node(coded_geometry(64))
    answer = [node.prefill().token, *node.decode(19, 400)]
    assert all(32 <= token < 127 for token in answer)
    assert len(set(answer)) > 60


@pytest.mark.parametrize("after", [0, 1, 3])
def test_end_of_sequence_comes_where_the_prompt_asks_for_it(node: Node, after: int) -> None:
    prompt = PROMPT[:4] + [EOT_ID] * (after + 1)
    answer = [node.prefill(prompt).token, *node.decode(len(prompt), after)]
    assert answer[-1] == 0
    assert 0 not in answer[:-1]


def test_another_vocabulary_is_used_in_full() -> None:
    node = Node(coded_geometry(64), coded_vocab=50_000)
    answer = [node.prefill().token, *node.decode(19, 50)]
    assert 256 < max(answer) < 50_000 and min(answer) > EOT_ID


def test_skip_sampling_verifies_but_says_no_token() -> None:
    node = Node(coded_geometry(4), skip_sampling=True)
    assert node.prefill().token == -1
    node.memory[node.table[0] * node.geometry.block_bytes] ^= 1
    last = node.run(StepRow(seq=1, start=18, count=1, sample=True))
    assert last.token == -1 and last.wrong_kv.startswith("block 5 ")


def test_a_row_that_does_not_sample_says_nothing(node: Node) -> None:
    node.engine.open(1, PROMPT, Sampling(logprobs=2))
    result = node.run(StepRow(seq=1, start=0, count=8, new_blocks=node.blocks()))
    assert result == RowResult(seq=1)


def test_logprobs_are_a_function_of_the_token(node: Node) -> None:
    result = node.prefill(sampling=Sampling(logprobs=3))
    assert result.logprob is not None
    ids, values = zip(*result.logprob.top, strict=True)
    assert len(ids) == 3 and ids[0] == result.token
    assert values[0] == result.logprob.logprob < 0
    assert list(values) == sorted(values, reverse=True)
    assert node.prefill(sampling=Sampling(logprobs=0)).logprob.top == ()  # type: ignore[union-attr]
    assert node.prefill().logprob is None


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (StepRow(seq=9, start=0, count=1), "sequence 9 is not open"),
        (StepRow(seq=1, start=0, count=20), "positions 0 to 20, but 19 tokens are known"),
        (StepRow(seq=1, start=0, count=0), "positions 0 to 0, but 19 tokens are known"),
        (StepRow(seq=1, start=0, count=8, sample=True), "samples after 8 tokens, but 19 are known"),
        (StepRow(seq=1, start=0, count=8, new_blocks=pack_u32([1])), "8 positions, but its blocks hold 4"),
        (StepRow(seq=1, start=0, count=4, new_blocks=pack_u32([8])), "block 8, but the slab has 8"),
    ],
)
def test_an_impossible_row_is_refused(node: Node, row: StepRow, problem: str) -> None:
    node.engine.open(1, PROMPT, GREEDY)
    with pytest.raises(LocalProtocolError, match=problem):
        node.engine.step([row])


def test_a_closed_sequence_is_gone(node: Node) -> None:
    node.prefill()
    node.engine.close(1)
    node.engine.close(1)
    with pytest.raises(LocalProtocolError, match="sequence 1 is not open"):
        node.engine.force(1, [1])


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"blocks": BLOCKS + 1}, "--kv-blocks"),
        ({"coded_vocab": 5}, "coded_vocab"),
        ({"geometry": Geometry(layers=1, kv_heads=1, head_dim=1, kv_parts=3, block_bytes=48 * 4)}, "geometry"),
        ({"geometry": Geometry(layers=1, kv_heads=1, head_dim=1, block_bytes=7)}, "geometry"),
    ],
)
def test_a_setting_that_cannot_work_is_named(changes: dict[str, object], setting: str) -> None:
    geometry = changes.pop("geometry", coded_geometry(4))
    node = Node(coded_geometry(4))
    args = {"endpoint": "", "slab_path": "", "slab_bytes": 0, "blocks": BLOCKS, "engine": "coded", "model": ""}
    with pytest.raises(ConfigError) as e:
        CodedEngine(WorkerArgs(geometry=geometry, **{**args, **changes}), node.memory)
    assert e.value.setting == setting


def test_a_step_takes_at_least_the_time_that_was_set() -> None:
    """The step's own time covers the token that a sampled row always computes; every other one is prefill."""
    node = Node(coded_geometry(4), coded_step_us=3_000, coded_token_us=1_000)
    began = time.monotonic_ns()
    node.prefill(PROMPT[:5])
    prefilled = time.monotonic_ns()
    node.decode(5, 1)
    assert prefilled - began >= 7_000_000
    assert time.monotonic_ns() - prefilled >= 3_000_000


def test_warm_up_leaves_nothing_behind(node: Node) -> None:
    node.engine.warm_up()
    assert set(node.memory) == {POISON}


def test_random_schedules_agree() -> None:
    """Any chunking, any interleaving of eight sequences: the tokens of each are what it gets alone."""
    rng = random.Random(0)
    prompts = {seq: [rng.randrange(1, 256) for _ in range(rng.randrange(1, 8))] for seq in range(4)}
    crowd = Node(coded_geometry(4))
    answers: dict[int, list[int]] = {seq: [] for seq in prompts}
    done = dict.fromkeys(prompts, 0)
    for seq, prompt in prompts.items():
        crowd.engine.open(seq, prompt, GREEDY)
    while any(done[seq] < 8 for seq in prompts):
        seq = rng.choice([s for s in prompts if done[s] < 8])
        known = len(prompts[seq]) + len(answers[seq])
        count = rng.randrange(1, min(8, known) - done[seq] + 1)
        held = pack_u32([2 * seq, 2 * seq + 1]) if done[seq] == 0 else b""
        sample = done[seq] + count == known
        result = crowd.run(StepRow(seq=seq, start=done[seq], count=count, new_blocks=held, sample=sample))
        assert result.wrong_kv == ""
        answers[seq] += [result.token] if sample else []
        done[seq] += count
    for seq, prompt in prompts.items():
        alone = Node(coded_geometry(4))
        assert answers[seq] == [alone.prefill(prompt).token, *alone.decode(len(prompt), len(answers[seq]) - 1)]
