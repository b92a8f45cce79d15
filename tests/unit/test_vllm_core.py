"""Two cores of vLLM servers and the words between them: one behaviour each. No vLLM, no socket, no clock."""

from __future__ import annotations

import pytest

from pdbus.bus.messages import LeaseReleased, PrefillFailed, PrefillRequest, TransferDone
from pdbus.connector import events as ev
from pdbus.connector.vllm.events import PromptSaved
from pdbus.connector.vllm.wants import WantState

from tests.vllm_cores import BLOCKS, DIGEST, PAIR, PROMPT, SIZE, S, Two


@pytest.fixture
def two() -> Two:
    return Two()


def all_free(two: Two) -> bool:
    return all(counts.free == BLOCKS for counts in two.free())


@pytest.mark.parametrize("order", ["prompt first", "request first", "prompt computed first"])
def test_a_pair_meets_in_either_order(two: Two, order: str) -> None:
    if order == "request first":
        two.wanted()
        assert not two.reads
        two.came()
        two.saved()
    else:
        two.came()
        if order == "prompt computed first":
            two.saved()
            two.left(two.p, "P")
        two.wanted()
        two.saved() if order == "prompt first" else None
    two.read()
    assert two.want().state is WantState.READY
    assert not two.p.core.offers.held()
    two.left(two.p, "P")
    two.left(two.d, "D")
    assert all_free(two)


def test_chunks_are_read_while_the_next_is_computed(two: Two) -> None:
    two.came()
    two.wanted()
    two.saved(5)
    assert [(r.begin, r.end) for r in two.reads] == [(0, 4)]
    two.saved()
    assert [(r.begin, r.end) for r in two.reads] == [(0, 4), (4, 10)]
    two.read()
    assert two.want().state is WantState.READY


def test_what_the_decode_server_has_is_not_read(two: Two) -> None:
    two.came()
    two.wanted(have=4)
    two.saved()
    assert [(r.begin, r.end) for r in two.reads] == [(4, 10)]


def test_another_prompt_under_the_same_pair_gets_nothing(two: Two) -> None:
    two.came(digest=b"x" * 16)
    two.saved()
    two.wanted()
    assert two.want().state is WantState.FAILED
    assert two.failed() == ["conflict"]
    assert not two.reads


def test_of_two_readers_of_one_pair_the_first_is_served(two: Two) -> None:
    """As with n > 1, where each answer is a request of its own; or when a pair has leaked."""
    two.came()
    two.wanted("D")
    two.wanted("E")
    two.saved()
    two.read()
    assert (two.want("D").state, two.want("E").state) == (WantState.READY, WantState.FAILED)
    two.wanted("F")
    assert two.want("F").state is WantState.FAILED


def test_a_second_prompt_under_a_pair_is_handed_to_nobody(two: Two) -> None:
    two.came("P")
    two.came("Q")
    assert two.p.core.prompt_blocks("Q") == ()
    two.left(two.p, "Q")
    two.wanted()
    two.saved()
    two.read()
    assert two.want().state is WantState.READY


def test_a_pair_that_never_comes_is_given_up(two: Two) -> None:
    two.wanted()
    two.wait(9)
    assert two.want().state is WantState.FETCHING
    two.wait(2)
    assert two.want().state is WantState.FAILED
    assert two.failed() == ["unpaired"]
    assert two.want().problem == "unpaired"


def test_a_request_that_leaves_is_waited_for_no_more(two: Two) -> None:
    two.wanted()
    two.left(two.d, "D")
    two.came()
    assert not two.p.core.offers.held()
    assert two.d.core.pool.counts().free == BLOCKS


def test_a_computed_prompt_waits_for_its_reader_only_so_long(two: Two) -> None:
    two.came()
    two.saved()
    two.left(two.p, "P")
    two.wait(29)
    assert two.p.core.pool.counts().free < BLOCKS
    two.wait(2)
    assert all_free(two)


def test_what_was_handed_over_holds_no_blocks_while_its_request_goes_on(two: Two) -> None:
    """A gateway may forget to ask the prefill server for one token only."""
    two.came()
    two.wanted()
    two.saved()
    two.read()
    assert two.free()[0].free == BLOCKS
    two.wanted("E")
    assert two.failed() == ["conflict"]


def test_a_prompt_that_is_not_computed_fails_its_reader_at_once(two: Two) -> None:
    two.came()
    two.wanted()
    two.saved(4)
    two.left(two.p, "P")
    assert two.want().state is WantState.FAILED
    assert two.want().problem.startswith("failed")
    two.read()
    two.left(two.d, "D")
    assert all_free(two)


def test_without_room_the_decode_server_computes(two: Two) -> None:
    two.came("big", tokens=SIZE * BLOCKS, pair=b"b" * 16)
    two.came()
    two.wanted()
    assert two.failed() == ["no_room"]
    assert two.want().state is WantState.FAILED


def test_a_lease_that_expired_makes_what_was_read_worthless(two: Two) -> None:
    """Renewals are lost, and P says nothing that arrives: only the claim's answer counts."""
    two.came()
    two.wanted()
    two.saved()
    two.lost = (PrefillFailed,)
    two.now += 40 * S
    two.tell(two.p, ev.Tick())
    two.read()
    claims = [m for m in two.said if isinstance(m, TransferDone)]
    answers = [m for m in two.said if isinstance(m, LeaseReleased)]
    assert claims and not answers[-1].valid
    assert two.want().state is WantState.FAILED


def test_late_bytes_land_where_nobody_is(two: Two) -> None:
    """A read whose request has left keeps its blocks until it is terminal."""
    two.came()
    two.wanted()
    two.saved()
    two.left(two.d, "D")
    assert two.d.core.pool.counts().quarantined == 3
    two.read()
    assert two.d.core.pool.counts().free == BLOCKS


def test_a_failed_read_fails_the_fetch(two: Two) -> None:
    two.came()
    two.wanted()
    two.saved()
    two.read("the peer has gone")
    assert two.want().state is WantState.FAILED
    two.left(two.p, "P")
    two.left(two.d, "D")
    assert all_free(two)


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_mover_that_ends_takes_its_leases_or_reads_with_it(two: Two, side: str) -> None:
    two.came()
    two.wanted()
    two.saved()
    server = two.p if side == "p" else two.d
    two.tell(server, ev.MoverLost(problem="killed", asked=False))
    assert two.want().state is WantState.FAILED
    assert two.restarts[-1].epoch == 2
    two.tell(server, ev.MoverUp(agents=(server.agent(2),)))
    two.came("Q", pair=b"q" * 16)
    two.wanted("E", pair=b"q" * 16)
    two.tell(two.p, PromptSaved(request="Q", ready=PROMPT))
    two.reads = two.reads[-1:]  # those of the mover that ended are reported by nobody
    two.read()
    assert two.want("E").state is WantState.READY


def test_with_no_prefill_server_there_is_nothing_to_wait_for(two: Two) -> None:
    two.wanted(node="other")
    assert two.want().state is WantState.FAILED
    assert two.want().problem == "no prefill node other"


def test_a_prefill_server_that_says_goodbye_fails_what_it_offered(two: Two) -> None:
    two.came()
    two.wanted()
    two.tell(two.p, ev.LeaveAsked())
    assert two.want().state is WantState.FAILED
    two.wanted("E")
    assert two.want("E").state is WantState.FAILED


def test_a_pair_of_another_length_is_refused(two: Two) -> None:
    two.wanted(pair=b"short")
    assert two.failed() == ["invalid: pair of 5 bytes: 16"]


def test_only_pairs_are_asked_for(two: Two) -> None:
    two.came()
    two.wanted()
    (asked,) = [m for m in two.said if isinstance(m, PrefillRequest)]
    assert (asked.pair, asked.prompt_digest) == (PAIR, DIGEST)
