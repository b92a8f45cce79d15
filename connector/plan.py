"""How to bring the KV of one node's ranks into one rank of another: computed once per pair of layouts, and cached.

Theory of operation. Tokens are paired by position: cutting the sequence at every block boundary of either side gives
pieces, each inside one block here and one block there, and the cuts repeat after `period` tokens. For each piece, what
the reader needs is a few boxes: runs of equal length at places that step evenly on both sides. An axis whose step is
the run's own length on both sides is folded into the run, so equal layouts end with one long run and no axis.

Where runs are too short to post, source blocks are read into scratch instead: what is needed of them with the small
gaps between (in the best case the whole block) in few long runs, once, however many target blocks it is for; a box for
each piece then says how to permute it from there. Nothing here depends on block ids or prompts; apply.py puts those in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from pdbus.bus.errors import LocalProtocolError, RemoteProtocolError
from pdbus.bus.messages import KVLayout
from pdbus.bus.wire import Declared

from .layout import fault, row_bytes

RUN_BYTES_MIN = 16_384  # a descriptor costs 7 to 12 us to post; in that time as much is copied out of scratch
PIECES_MAX = (
    256  # in a period; block sizes up to 128 tokens always fit, larger unequal ones if they have much in common
)

BOXES_MAX = 16_384  # of one rank; usual pairs have one or two a piece, layers and heads in disorder one for each

Difference = tuple[str, str, str]  # field, theirs, ours


class Axis(Declared):
    """`count` equal steps, in bytes, on both sides."""

    count: int
    source: int
    target: int


class Box(Declared):
    """Runs of `length` bytes, from `source` to `target`, repeated along every axis; counted from the blocks' first."""

    source: int
    target: int
    length: int
    axes: tuple[Axis, ...] = ()

    @property
    def runs(self) -> int:
        return math.prod(axis.count for axis in self.axes)

    @property
    def bytes(self) -> int:
        return self.runs * self.length


class Piece(Declared):
    """Tokens that lie in one source block and one target block; blocks and tokens counted from the period's first."""

    start: int
    tokens: int
    source_block: int
    target_block: int
    direct: tuple[Box, ...] = ()  # from the source's region into the target's
    permutes: tuple[Box, ...] = ()  # from the source block's place in scratch into the target's region


class RankPlan(Declared):
    """What is read from one source rank. `reads` bring any one source block into its place in scratch."""

    rank: int
    source_stride: int  # bytes from block to block
    target_stride: int
    pieces: tuple[Piece, ...]
    reads: tuple[Box, ...] = ()
    scratch_bytes: int = 0  # of one source block; 0 when nothing goes through scratch


class TransferPlan(Declared):
    """`ranks` names only source ranks that have something to give. Sizes in tokens; `blocks` are how many there are."""

    source_size: int
    target_size: int
    source_blocks: int
    target_blocks: int
    target_bytes: int  # of the target's region
    ranks: tuple[RankPlan, ...]

    @property
    def period(self) -> int:
        return math.lcm(self.source_size, self.target_size)


def plan(
    sources: Sequence[KVLayout], target: KVLayout, reader: int = 0, run_bytes_min: int = RUN_BYTES_MIN
) -> TransferPlan:
    """The fewest runs that bring all that `target` holds from `sources`, the owner's ranks in order.

    `reader` is the target's rank: it chooses among ranks that hold the same head, so that readers spread over them.
    Runs shorter than `run_bytes_min` go through scratch if that makes fewer of them; 0 keeps all direct.
    Raises LocalProtocolError for an impossible target, RemoteProtocolError for impossible sources or pairs.
    """
    _check(sources, target)
    return TransferPlan(
        source_size=sources[0].block_size,
        target_size=target.block_size,
        source_blocks=sources[0].blocks,
        target_blocks=target.blocks,
        target_bytes=target.region_bytes,
        ranks=tuple(
            _rank_plan(rank, sources[rank], target, chosen, run_bytes_min)
            for rank, chosen in _choose(sources, target, reader).items()
        ),
    )


# ---------------------------------------------------------------- who may read from whom


def differences(sources: Sequence[KVLayout], target: KVLayout) -> tuple[Difference, ...]:
    """Every field that keeps `target` from being read from `sources`, with both values as text. Layouts are sound."""
    found = [
        (name, str(getattr(source, name)), str(getattr(target, name)))
        for source in sources
        for name in ("dtype", "head_dim", "kv_heads")
        if getattr(source, name) != getattr(target, name)
    ]
    found += [("parts", "/".join(s.parts), "/".join(target.parts)) for s in sources if s.parts != target.parts]
    found += _ranks_differ(sources) + _missing(sources, target)
    sizes = sources[0].block_size, target.block_size
    if _pieces(*sizes) > PIECES_MAX:
        found.append(("block_size", str(sizes[0]), str(sizes[1])))
    return tuple(dict.fromkeys(found))


def _ranks_differ(sources: Sequence[KVLayout]) -> list[Difference]:
    """The ranks of one node share their block ids, so their blocks are of one size and one number."""
    return [
        (name, f"{getattr(source, name)} on rank {rank}", f"{getattr(sources[0], name)} on rank 0")
        for rank, source in enumerate(sources)
        for name in ("block_size", "blocks")
        if getattr(source, name) != getattr(sources[0], name)
    ]


def _missing(sources: Sequence[KVLayout], target: KVLayout) -> list[Difference]:
    if not target.heads:
        return []
    held: dict[tuple[int, ...], dict[int, None]] = {}
    for layer, ranks in zip(target.layers, _holding(sources, target), strict=True):
        if not ranks:
            return [("layers", f"none holds {layer}", f"{layer} is needed")]
        if ranks not in held:
            held[ranks] = dict.fromkeys(head for rank in ranks for head in sources[rank].heads)
        if absent := [head for head in target.heads if head not in held[ranks]]:
            return [("heads", f"none holds head {absent[0]} of layer {layer}", f"head {absent[0]} is needed")]
    return []


def _holding(sources: Sequence[KVLayout], target: KVLayout) -> list[tuple[int, ...]]:
    """Which source ranks hold each of the target's layers."""
    held = [dict.fromkeys(source.layers) for source in sources]
    return [tuple(rank for rank, layers in enumerate(held) if layer in layers) for layer in target.layers]


def _check(sources: Sequence[KVLayout], target: KVLayout) -> None:
    if found := fault(target):
        raise LocalProtocolError(f"our KV layout: {found[0]}: {found[1]}")
    if not sources:
        raise RemoteProtocolError("the owner has no KV layout", field="layouts")
    for rank, source in enumerate(sources):
        if found := fault(source):
            raise RemoteProtocolError(f"the KV layout of rank {rank}: {found[0]}: {found[1]}", field=found[0])
    if unlike := differences(sources, target):
        text = ", ".join(f"{name} {theirs} against {ours}" for name, theirs, ours in unlike)
        raise RemoteProtocolError(f"cannot share KV: {text}", field=unlike[0][0])


# ---------------------------------------------------------------- what is read from which rank

Held = list[tuple[int, int]]  # where the same row is: source, target
Chosen = dict[tuple[int, ...], Held]  # layers' starts, by the heads that are read of them


def _choose(sources: Sequence[KVLayout], target: KVLayout, reader: int) -> dict[int, Chosen]:
    """For each rank that gives anything: the layers' starts on both sides, grouped by the heads read of them."""
    chosen: dict[int, Chosen] = {}
    starts = [dict(zip(source.layers, source.starts, strict=True)) for source in sources]
    holders: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for layer, to, holding in zip(target.layers, target.starts, _holding(sources, target), strict=True):
        if holding not in holders:
            holders[holding] = _heads_by_rank(sources, target.heads, holding, reader)
        for rank, heads in holders[holding].items():
            chosen.setdefault(rank, {}).setdefault(heads, []).append((starts[rank][layer], to))
    return dict(sorted(chosen.items()))


def _heads_by_rank(
    sources: Sequence[KVLayout], heads: tuple[int, ...], ranks: tuple[int, ...], reader: int
) -> dict[int, tuple[int, ...]]:
    """Which heads to read from which of `ranks`: each from exactly one."""
    held: dict[int, list[int]] = {}
    for rank in ranks:
        for head in sources[rank].heads:
            held.setdefault(head, []).append(rank)
    by_rank: dict[int, list[int]] = {}
    for head in heads:
        holders = held[head]
        by_rank.setdefault(holders[reader % len(holders)], []).append(head)
    return {rank: tuple(some) for rank, some in by_rank.items()}


# ---------------------------------------------------------------- pieces

Cut = tuple[int, int]  # first token, end


class Grid(Declared):
    """Rows that both sides hold, at even steps: from `source` and `target` in slot 0 of a block, along three axes."""

    source: int
    target: int
    axes: tuple[Axis, ...]  # heads, parts, layers


def _rank_plan(rank: int, source: KVLayout, target: KVLayout, chosen: Chosen, run_bytes_min: int) -> RankPlan:
    cuts = list(pairwise(_cuts(source.block_size, target.block_size)))
    direct: list[list[Box]] = [[] for _ in cuts]
    permutes: list[list[Box]] = [[] for _ in cuts]
    reads: list[Box] = []
    size = 0
    for grid in _grids(source, target, chosen, BOXES_MAX // len(cuts)):
        boxes = [_direct(source, target, grid, cut) for cut in cuts]
        read, packed = _through_scratch(source, grid, size, _gap_max(source, run_bytes_min))
        if not _worth_it(boxes, read, cuts[-1][1] // source.block_size, run_bytes_min):
            _append(direct, boxes)
            continue
        reads.append(read)
        size += read.bytes
        _append(permutes, [_permute(source, target, packed, cut) for cut in cuts])
    return RankPlan(
        rank=rank, source_stride=source.block_stride, target_stride=target.block_stride,
        reads=tuple(reads), scratch_bytes=size,
        pieces=tuple(
            Piece(
                start=cut[0], tokens=cut[1] - cut[0],
                source_block=cut[0] // source.block_size, target_block=cut[0] // target.block_size,
                direct=tuple(direct[number]), permutes=tuple(permutes[number]),
            )
            for number, cut in enumerate(cuts)
        ),
    )  # fmt: skip


def _append(lists: list[list[Box]], boxes: list[Box]) -> None:
    for some, box in zip(lists, boxes, strict=True):
        some.append(box)


def _worth_it(direct: list[Box], read: Box, source_blocks: int, run_bytes_min: int) -> bool:
    """Whether to go through scratch: direct runs of a period are short, and its blocks are read in fewer."""
    short = min(box.length for box in direct) < run_bytes_min
    return short and source_blocks * read.runs < sum(box.runs for box in direct)


def _pieces(source_size: int, target_size: int) -> int:
    period = math.lcm(source_size, target_size)
    return period // source_size + period // target_size - 1


def _cuts(source_size: int, target_size: int) -> list[int]:
    """Block boundaries of either side within a period, in tokens, its end included."""
    period = math.lcm(source_size, target_size)
    return sorted(dict.fromkeys([*range(0, period, source_size), *range(0, period, target_size), period]))


def _grids(source: KVLayout, target: KVLayout, chosen: Chosen, grids_max: int) -> list[Grid]:
    """Raises RemoteProtocolError when the rows lie in too much disorder."""
    parts = Axis(count=len(source.parts), source=source.part_stride, target=target.part_stride)
    grids: list[Grid] = []
    for heads, layers in chosen.items():
        columns, levels = _even_steps(_places(source, target, heads)), _even_steps(layers)
        if len(grids) + len(columns) * len(levels) > grids_max:
            raise RemoteProtocolError("layers and heads lie in too much disorder to read from", field="starts")
        grids += [
            Grid(source=layer_from + head_from, target=layer_to + head_to, axes=(head_axis, parts, layer_axis))
            for layer_from, layer_to, layer_axis in levels
            for head_from, head_to, head_axis in columns
        ]
    return grids


def _places(source: KVLayout, target: KVLayout, heads: tuple[int, ...]) -> Held:
    there, here = ({head: place for place, head in enumerate(side.heads)} for side in (source, target))
    return [(there[head] * source.head_stride, here[head] * target.head_stride) for head in heads]


def _even_steps(places: Held) -> list[tuple[int, int, Axis]]:
    """Places on both sides as few (first source, first target, steps between), steps rising on both."""
    found: list[tuple[int, int, Axis]] = []
    for source, target in sorted(places):
        if found:
            first, to, axis = found[-1]
            steps = source - first - axis.source * (axis.count - 1), target - to - axis.target * (axis.count - 1)
            if steps[1] > 0 and (axis.count == 1 or steps == (axis.source, axis.target)):
                found[-1] = first, to, Axis(count=axis.count + 1, source=steps[0], target=steps[1])
                continue
        found.append((source, target, Axis(count=1, source=0, target=0)))
    return found


def _direct(source: KVLayout, target: KVLayout, grid: Grid, cut: Cut) -> Box:
    """Where the source lies is as good as packed: with the layout's own strides."""
    lying = Packed(source=grid.source, target=grid.target, slot_stride=source.slot_stride, axes=grid.axes)
    return _permute(source, target, lying, cut)


def _folded(source: int, target: int, length: int, axes: Sequence[Axis]) -> Box:
    """The box with the longest runs: axes that continue the run become part of it, axes that continue another join."""
    left = sorted((axis for axis in axes if axis.count > 1), key=lambda axis: axis.source)
    while inner := next((axis for axis in left if axis.source == axis.target == length), None):
        left.remove(inner)
        length *= inner.count
    joined: list[Axis] = []
    for axis in left:
        last = joined[-1] if joined else None
        if last and (axis.source, axis.target) == (last.source * last.count, last.target * last.count):
            joined[-1] = Axis(count=last.count * axis.count, source=last.source, target=last.target)
        else:
            joined.append(axis)
    return Box(source=source, target=target, length=length, axes=tuple(joined))


# ---------------------------------------------------------------- through scratch


class Packed(Declared):
    """A grid as it lies in scratch after the read: from `source` on, slots first among the axes."""

    source: int
    target: int
    slot_stride: int
    axes: tuple[Axis, ...]


def _gap_max(source: KVLayout, run_bytes_min: int) -> int:
    """The longest gap that is read along. A longer one could hold other blocks, and those are not ours to read."""
    return min(run_bytes_min, source.block_stride) if source.blocks > 1 else run_bytes_min


def _through_scratch(source: KVLayout, grid: Grid, at: int, gap_max: int) -> tuple[Box, Packed]:
    """How a source block's part of the grid is read to `at` in scratch, and how it lies there.

    Along axes with small gaps a run goes on, gaps and all, and steps stay what they were; along the others
    runs are packed.
    """
    slots = Axis(count=source.block_size, source=source.slot_stride, target=0)
    axes = (slots, *grid.axes)
    span, packed = row_bytes(source), [0] * len(axes)
    far: list[Axis] = []
    for number, axis in sorted(enumerate(axes), key=lambda item: item[1].source):
        if axis.count == 1:
            continue
        if not far and axis.source - span < gap_max:
            packed[number] = axis.source
            span += (axis.count - 1) * axis.source
        else:
            packed[number] = far[-1].target * far[-1].count if far else span
            far.append(Axis(count=axis.count, source=axis.source, target=packed[number]))
    lying = tuple(Axis(count=a.count, source=step, target=a.target) for a, step in zip(axes, packed, strict=True))
    read = _folded(grid.source, at, span, far)
    return read, Packed(source=at, target=grid.target, slot_stride=packed[0], axes=lying[1:])


def _permute(source: KVLayout, target: KVLayout, packed: Packed, cut: Cut) -> Box:
    from_slot, to_slot = cut[0] % source.block_size, cut[0] % target.block_size
    slots = Axis(count=cut[1] - cut[0], source=packed.slot_stride, target=target.slot_stride)
    return _folded(
        packed.source + from_slot * packed.slot_stride,
        packed.target + to_slot * target.slot_stride,
        row_bytes(source),
        (slots, *packed.axes),
    )
