"""Any layout to any layout, against a mapping that goes through it row by row and knows nothing of runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import replace
from pdbus.connector.apply import direct_runs, pair, scratch_runs
from pdbus.connector.layout import DTYPE_BYTES, PARTS, blocks_for, fault, heads_of, offset, row_bytes
from pdbus.connector.plan import RUN_BYTES_MIN, RankPlan, TransferPlan, plan

from tests.kv_memory import POISON, copy_runs, move

SIZES = (1, 2, 3, 4, 8)
BLOCK_SIZES = (8, 12, 16, 24, 40, 128)
SPARE_BLOCKS = 2


@dataclass
class Case:
    sources: list[KVLayout]
    target: KVLayout
    reader: int
    have: int
    ready: int
    source_table: list[int]
    target_table: list[int]


def arranged(random: Random, base: KVLayout) -> KVLayout:
    """`base` with a random order of dimensions, random padding between them, and layers in random places."""
    counts = {
        "block": base.blocks, "layer": len(base.layers), "part": len(base.parts),
        "head": len(base.heads), "slot": base.block_size,
    }  # fmt: skip
    order = list(counts)
    random.shuffle(order)
    size, stride = row_bytes(base), {}
    for name in order:
        size += random.choice((0, 0, 0, 1, 8))
        stride[name] = size
        size *= max(1, counts[name])
    places = list(range(len(base.layers)))
    if random.random() < 0.3:
        random.shuffle(places)
    first = random.choice((0, 0, 5))
    return replace(
        base, starts=tuple(first + i * stride["layer"] for i in places), block_stride=stride["block"],
        part_stride=stride["part"], head_stride=stride["head"], slot_stride=stride["slot"], region_bytes=first + size,
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = draw(st.randoms(use_true_random=False))
    latent = random.random() < 0.2
    kv_heads = 1 if latent else random.choice((1, 2, 3, 4, 8))
    shares = [n for n in SIZES if kv_heads % n == 0 or n % kv_heads == 0]
    there, here = random.choice(shares), random.choice(shares)
    source_size, target_size = random.choice(BLOCK_SIZES), random.choice(BLOCK_SIZES)
    if random.random() < 0.3:
        target_size = source_size
    ready = random.randint(1, 2 * max(source_size, target_size))
    have = random.choice((0, 0, random.randint(0, ready)))
    layers = [str(i) for i in range(random.randint(1, 3))]
    reader = random.randrange(here)
    dtype, head_dim = random.choice(tuple(DTYPE_BYTES)), random.randint(1, 3)

    def layout(heads: tuple[int, ...], names: list[str], block_size: int) -> KVLayout:
        base = KVLayout(
            dtype=dtype, head_dim=head_dim, kv_heads=kv_heads, heads=heads, layers=tuple(names), starts=(),
            parts=PARTS[1 if latent else 2], block_size=block_size,
            blocks=blocks_for(ready, block_size) + SPARE_BLOCKS,
            block_stride=0, part_stride=0, head_stride=0, slot_stride=0, region_bytes=0,
        )  # fmt: skip
        return arranged(random, base)

    stages = random.choice((1, 1, 2))
    cut = random.randint(0, len(layers))
    held = [layers] if stages == 1 else [layers[:cut], layers[cut:]]
    sources = [
        layout(heads_of(kv_heads, there, rank), random.sample([*names, "only there"], len(names) + 1), source_size)
        for names in held
        for rank in range(there)
    ]
    target = layout(heads_of(kv_heads, here, reader), random.sample(layers, len(layers)), target_size)
    source_table = random.sample(range(sources[0].blocks), blocks_for(ready, source_size))
    target_table = random.sample(range(target.blocks), blocks_for(ready, target_size))
    if random.random() < 0.5:
        source_table.sort()
        target_table.sort()
    return Case(sources, target, reader, have, ready, source_table, target_table)


def mapping(case: Case, chosen: TransferPlan) -> dict[int, list[tuple[int, int, int]]]:
    """Row by row: for each source rank, (from, to, bytes) of every row that the pieces from `have` to `ready` hold."""
    start, end = touched(case)
    target, size = case.target, case.target.block_size
    givers = [rank.rank for rank in chosen.ranks]
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for layer, name in enumerate(target.layers):
        for head, number in enumerate(target.heads):
            (giver,) = {
                rank for rank in givers
                if name in case.sources[rank].layers and number in case.sources[rank].heads
                and takes(case, rank, name, number)
            }  # fmt: skip
            source = case.sources[giver]
            there, held = source.layers.index(name), source.heads.index(number)
            for part in range(len(target.parts)):
                for token in range(start, end):
                    from_block = case.source_table[token // source.block_size]
                    to_block = case.target_table[token // size]
                    at = offset(source, from_block, there, part, held, token % source.block_size)
                    to = offset(target, to_block, layer, part, head, token % size)
                    rows.setdefault(giver, []).append((at, to, row_bytes(target)))
    return rows


def takes(case: Case, rank: int, layer: str, head: int) -> bool:
    """Of the ranks that hold the same, the reader's number chooses one."""
    holders = [r for r, s in enumerate(case.sources) if layer in s.layers and head in s.heads]
    return rank == holders[case.reader % len(holders)]


def touched(case: Case) -> tuple[int, int]:
    """Tokens that move: from the block boundary of either side before `have` to the one after `ready`."""
    sizes = case.sources[0].block_size, case.target.block_size
    if case.ready <= case.have:
        return 0, 0
    start = max(case.have // size * size for size in sizes)
    return start, min(blocks_for(case.ready, size) * size for size in sizes)


def fewest(rows: list[tuple[int, int, int]]) -> int:
    """How many runs are left when every row that continues another on both sides has joined it."""
    ordered = sorted(rows)
    follows = [
        a[0] + a[2] == b[0] and a[1] + a[2] == b[1] for a, b in itertools.pairwise(ordered)
    ]  # fmt: skip
    return len(ordered) - sum(follows)


def memories(case: Case) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Random source bytes, a poisoned target, and what the target must be afterwards (still poison)."""
    random = np.random.default_rng(case.ready)
    sources = [random.integers(0, 256, layout.region_bytes, np.uint8) for layout in case.sources]
    return sources, *(np.full(case.target.region_bytes, POISON, np.uint8) for _ in range(2))


def paired(case: Case, chosen: TransferPlan):  # type: ignore[no-untyped-def]
    begin, end = case.have, max(case.have, case.ready)
    theirs, ours = (slice(begin // size, blocks_for(end, size)) for size in (chosen.source_size, chosen.target_size))
    return pair(chosen, begin, end, case.source_table[theirs], case.target_table[ours])


@settings(max_examples=100)
@given(cases(), st.sampled_from([0, 64, RUN_BYTES_MIN]))
def test_every_byte_arrives_once_and_no_other_changes(case: Case, run_bytes_min: int) -> None:
    assert [fault(layout) for layout in (*case.sources, case.target)] == [None] * (len(case.sources) + 1)
    chosen = plan(case.sources, case.target, case.reader, run_bytes_min)
    sources, target, expected = memories(case)
    move(chosen, paired(case, chosen), sources, target)
    for rank, rows in mapping(case, chosen).items():
        for at, to, length in rows:
            expected[to : to + length] = sources[rank][at : at + length]
    assert np.array_equal(target, expected)


@settings(max_examples=60)
@given(cases())
def test_direct_runs_are_the_fewest_and_name_no_byte_twice(case: Case) -> None:
    chosen = plan(case.sources, case.target, case.reader, 0)
    rows = mapping(case, chosen)
    for rank in chosen.ranks:
        runs = direct_runs(rank, paired(case, chosen))
        mine = rows.get(rank.rank, [])
        assert len(runs.source) == (fewest(mine) if mine else 0)
        assert runs.bytes == sum(length for _, _, length in mine)
        ends = sorted(zip(runs.target.tolist(), runs.length.tolist(), strict=True))
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ends))


def runs_of_a_period(rank: RankPlan, whole: TransferPlan) -> int:
    blocks = whole.period // whole.source_size
    direct = sum(box.runs for piece in rank.pieces for box in piece.direct)
    return direct + blocks * sum(box.runs for box in rank.reads)


@settings(max_examples=60)
@given(cases())
def test_scratch_takes_fewer_runs_and_no_block_that_was_not_announced(case: Case) -> None:
    """The bytes between short runs are read along, but only inside the blocks that the owner's lease names."""
    direct, chosen = (plan(case.sources, case.target, case.reader, least) for least in (0, RUN_BYTES_MIN))
    pairing = paired(case, chosen)
    for all_direct, rank in zip(direct.ranks, chosen.ranks, strict=True):
        layout = case.sources[rank.rank]
        assert runs_of_a_period(rank, chosen) <= runs_of_a_period(all_direct, direct)
        others = np.full(layout.region_bytes, 0, np.uint8)
        for block in [b for b in range(layout.blocks) if b not in case.source_table]:
            for layer in range(len(layout.layers)):
                for part in range(len(layout.parts)):
                    for head in range(len(layout.heads)):
                        for slot in range(layout.block_size):
                            at = offset(layout, block, layer, part, head, slot)
                            others[at : at + row_bytes(layout)] = 1
        scratch = np.zeros(len(case.source_table) * rank.scratch_bytes, np.uint8)
        copy_runs(scratch_runs(rank, pairing), others, scratch)
        assert not scratch.any()
