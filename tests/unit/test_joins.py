"""What the ranks of a node say, joined: one word for all of theirs, at the right time."""

from __future__ import annotations

from itertools import permutations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdbus.connector.ipc import (
    Copied,
    MoverAlive,
    MoverFailed,
    MoverReady,
    PeerAdded,
    PeerRemove,
    ReadDoubtful,
    ReadEnded,
    RowResult,
    StepDone,
    WorkerAlive,
    WorkerFailed,
    WorkerReady,
)
from pdbus.connector.joins import MoverJoin, MoversReady, WorkerJoin


def ready(rank: int) -> MoverReady:
    return MoverReady(pid=rank, agent_name=f"n/{rank}", metadata=b"", base_address=0, region_bytes=1)


def step(token: int, wrong: str = "", number: int = 1) -> StepDone:
    return StepDone(step=number, rows=(RowResult(seq=1, token=token, wrong_kv=wrong),), compute_ns=token)


# ---------------------------------------------------------------- one rank


@pytest.mark.parametrize(
    "said",
    [
        ReadEnded(read=1, problem="gone", posted=False), ReadEnded(read=1, bytes=7, transfer_ns=3),
        ReadDoubtful(read=1, problem="odd"), PeerAdded(peer="p", problem="no"), MoverAlive(probe=1, reads=2),
        MoverFailed(problem="p", setting="--s"),
    ],
)  # fmt: skip
def test_one_movers_words_are_passed_on(said: ReadEnded) -> None:
    assert MoverJoin(1).hear(0, said) == [said]


@pytest.mark.parametrize(
    "said",
    [
        WorkerReady(pid=1, vocab_size=2, load_ns=3), step(5, "block 1 layer 2"), WorkerAlive(probe=4),
        WorkerFailed(problem="p", setting="--s"),
    ],
)  # fmt: skip
def test_one_workers_words_are_passed_on(said: StepDone) -> None:
    assert WorkerJoin(1).hear(0, said) == [said]


# ---------------------------------------------------------------- workers


def test_a_step_is_done_when_the_last_rank_has_done_it() -> None:
    join = WorkerJoin(3)
    assert [join.hear(rank, step(5)) for rank in (2, 0)] == [[], []]
    assert join.hear(1, step(5)) == [step(5)]


def test_steps_of_two_numbers_do_not_mix() -> None:
    join = WorkerJoin(2)
    assert join.hear(0, step(5)) == join.hear(1, step(6, number=2)) == []
    assert join.hear(1, step(5)) == [step(5)]


def test_wrong_kv_of_any_rank_counts_and_is_named_with_it() -> None:
    join = WorkerJoin(2)
    join.hear(0, step(5))
    (done,) = join.hear(1, step(5, "block 3 layer 0"))
    assert done.rows[0].wrong_kv == "rank 1: block 3 layer 0"  # type: ignore[union-attr]


def test_ranks_that_sample_different_tokens_have_gone_apart() -> None:
    """Silently taking one of them would make garbage of everything that follows."""
    join = WorkerJoin(2)
    join.hear(0, step(5))
    (done,) = join.hear(1, step(6))
    assert done.rows[0].wrong_kv == "rank 1 sampled token 6, rank 0 token 5"  # type: ignore[union-attr]


def test_what_is_sampled_is_what_the_last_stage_samples() -> None:
    join = WorkerJoin(4, stages=(3, 2))
    for rank, token in enumerate((-1, -1, 5)):
        join.hear(rank, step(token))
    (done,) = join.hear(3, step(5))
    assert done.rows[0] == RowResult(seq=1, token=5)  # type: ignore[union-attr]


def test_wrong_kv_of_any_stage_counts() -> None:
    join = WorkerJoin(2, stages=(3, 2))
    join.hear(1, step(5))
    (done,) = join.hear(0, step(-1, "block 3 layer 0"))
    row = done.rows[0]  # type: ignore[union-attr]
    assert (row.token, row.wrong_kv) == (5, "rank 0: block 3 layer 0")


def test_ranks_of_the_last_stage_that_sample_different_tokens_have_gone_apart() -> None:
    join = WorkerJoin(4, stages=(1, 1))
    for rank, token in enumerate((-1, -1, 5)):
        join.hear(rank, step(token))
    (done,) = join.hear(3, step(6))
    assert done.rows[0].wrong_kv == "rank 3 sampled token 6, rank 2 token 5"  # type: ignore[union-attr]


def test_a_copy_has_ended_when_the_last_rank_has_passed_its_fence() -> None:
    join = WorkerJoin(2)
    assert list(join.hear(0, Copied(copy=3, bytes=64, copy_ns=5, in_step=True))) == []
    assert list(join.hear(1, Copied(copy=3, bytes=64, copy_ns=9, in_step=False))) == [
        Copied(copy=3, bytes=128, copy_ns=9, in_step=False)
    ]


def test_workers_are_ready_with_the_last() -> None:
    join = WorkerJoin(2)
    assert join.hear(1, WorkerReady(pid=11, vocab_size=9, load_ns=5)) == []
    first = WorkerReady(pid=10, vocab_size=9, load_ns=3)
    assert join.hear(0, first) == [WorkerReady(pid=10, vocab_size=9, load_ns=5)]


def test_the_first_failure_is_told_with_its_rank() -> None:
    assert WorkerJoin(2).hear(1, WorkerFailed(problem="no memory")) == [WorkerFailed(problem="rank 1: no memory")]
    assert MoverJoin(2).hear(1, MoverFailed(problem="no NIXL")) == [MoverFailed(problem="rank 1: no NIXL")]


# ---------------------------------------------------------------- movers


def test_movers_are_ready_in_order_of_rank() -> None:
    join = MoverJoin(2)
    assert join.hear(1, ready(1)) == []
    assert join.hear(0, ready(0)) == [MoversReady(ranks=(ready(0), ready(1)))]


def test_a_peer_is_added_when_every_rank_can_read_it() -> None:
    join = MoverJoin(2)
    assert join.hear(0, PeerAdded(peer="p")) == []
    assert join.hear(1, PeerAdded(peer="p", problem="unreachable")) == [PeerAdded(peer="p", problem="unreachable")]


def test_a_peer_that_is_removed_while_it_is_added_is_forgotten() -> None:
    """It may come back under the same name: what was said of it before is not said of it now."""
    join = MoverJoin(2)
    join.hear(0, PeerAdded(peer="p"))
    join.tell(PeerRemove(peer="p"))
    assert join.hear(1, PeerAdded(peer="p")) == []
    assert join.hear(0, PeerAdded(peer="p")) == [PeerAdded(peer="p")]


def test_a_read_ends_with_its_last_part_and_the_bytes_of_all() -> None:
    join = MoverJoin(2)
    assert join.hear(1, ReadEnded(read=7, bytes=10, transfer_ns=5, posts=1, runs=4, post_ns=2)) == []
    assert join.hear(0, ReadEnded(read=7, bytes=20, transfer_ns=3, posts=2, runs=8, post_ns=1)) == [
        ReadEnded(read=7, bytes=30, transfer_ns=5, posts=3, runs=12, post_ns=2)
    ]


def test_a_part_that_fails_is_told_at_once_and_the_read_ends_with_the_last() -> None:
    """The request may try elsewhere; its blocks stay until the other rank's part may write no more."""
    join = MoverJoin(2)
    assert join.hear(1, ReadEnded(read=7, problem="the peer has gone")) == [
        ReadDoubtful(read=7, problem="the peer has gone")
    ]
    assert join.hear(0, ReadEnded(read=7, bytes=20)) == [ReadEnded(read=7, problem="the peer has gone", bytes=20)]


PARTS = st.sampled_from(("done", "failed", "doubtful then done", "doubtful then failed"))


@given(st.lists(PARTS, min_size=1, max_size=4), st.randoms())
def test_the_request_hears_of_a_read_once_before_its_end_and_once_at_it(parts: list[str], random: object) -> None:
    said = [(rank, word) for rank, part in enumerate(parts) for word in part.split(" then ")]
    random.shuffle(said)  # type: ignore[attr-defined]
    said.sort(key=lambda item: item[1] != "doubtful")  # each rank's doubt comes before its end
    join, heard = MoverJoin(len(parts)), []
    for rank, word in said:
        ended = ReadEnded(read=1, problem="gone" if word == "failed" else "")
        heard += join.hear(rank, ReadDoubtful(read=1, problem="odd") if word == "doubtful" else ended)
    assert isinstance(heard[-1], ReadEnded)
    assert bool(heard[-1].problem) == any(part.endswith("failed") for part in parts)
    assert len(heard) <= 2 and all(isinstance(word, ReadDoubtful) for word in heard[:-1])


def test_orders_of_two_reads_do_not_matter() -> None:
    said = [(rank, ReadEnded(read=read, bytes=1)) for rank in (0, 1) for read in (1, 2)]
    for order in permutations(said):
        join = MoverJoin(2)
        ends = [word.read for rank, ended in order for word in join.hear(rank, ended) if isinstance(word, ReadEnded)]
        assert sorted(ends) == [1, 2]
