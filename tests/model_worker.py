"""What a worker keeps of its sequences, exactly as connector/ipc.py says, without a model: how many tokens each has,
and its block table. A row that no engine could compute is an AssertionError."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdbus.bus.wire import unpack_u32
from pdbus.connector.ipc import StepRow


@dataclass
class Kept:
    tokens: int
    table: list[int] = field(default_factory=list)
    computed: int | None = None  # positions that this table's steps have reached; where the first begins is not known


class ModelWorker:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kept: dict[int, Kept] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._kept

    def open(self, seq: int, tokens: int) -> None:
        assert seq not in self._kept, f"sequence {seq} is open already"
        self._kept[seq] = Kept(tokens)

    def close(self, seq: int) -> None:
        self._kept.pop(seq, None)

    def table(self, seq: int) -> list[int]:
        return self._kept[seq].table

    def step(self, rows: Sequence[StepRow]) -> list[int]:
        """Do a step; the sequences that sampled."""
        written: list[int] = []
        for row in rows:
            written += self._row(row)
        assert len(set(written)) == len(written), "two rows of one step write the same block"
        return self._sampled(rows)

    def _row(self, row: StepRow) -> list[int]:
        kept, size = self._kept[row.seq], self._block_size
        if row.reset:
            kept.table, kept.computed = [], None
        kept.table += unpack_u32(row.new_blocks)
        end = row.start + row.count
        assert row.count >= 1 and kept.computed in (None, row.start), f"{row}: {kept.computed} are computed"
        assert end <= kept.tokens and (not row.sample or end == kept.tokens), f"{row}: {kept.tokens} tokens are known"
        assert end <= len(kept.table) * size, f"{row}: its blocks hold {len(kept.table) * size}"
        assert len(set(kept.table)) == len(kept.table), f"{row}: a block stands twice in its table"
        kept.computed = end
        return kept.table[row.start // size : (end - 1) // size + 1]

    def _sampled(self, rows: Iterable[StepRow]) -> list[int]:
        sampled = [row.seq for row in rows if row.sample]
        for seq in sampled:
            self._kept[seq].tokens += 1
        return sampled
