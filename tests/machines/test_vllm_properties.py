"""Any order of prompts, requests, copies, reads, losses and time between two vLLM servers: KV is called valid only if
it is, each block has its holders, and nothing stays behind."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdbus.bus.messages import LeaseReleased, PrefillAccepted, PrefillDone, PrefillFailed
from pdbus.connector import events as ev
from pdbus.connector.vllm.wants import WantState

from tests.vllm_cores import DIGEST, PROMPT, Two

PAIRS = (b"p" * 16, b"q" * 16)
LOST = (PrefillAccepted, PrefillDone, PrefillFailed, LeaseReleased)


class VllmPair(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()
        self.number = 0
        self.prompts: set[str] = set()  # the prefill server's requests
        self.saved: dict[str, int] = {}
        self.came: dict[str, tuple[bytes, bytes]] = {}  # their pairs and digests
        self.wants: dict[str, bytes] = {}  # the decode server's requests and their pairs
        self.ready: set[str] = set()

    def name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    @rule(pair=st.sampled_from(PAIRS), digest=st.sampled_from((DIGEST, b"x" * 16)))
    def a_prompt_comes(self, pair: bytes, digest: bytes) -> None:
        name = self.name()
        self.two.came(name, digest=digest, pair=pair)
        self.prompts.add(name)
        self.saved[name], self.came[name] = 0, (pair, digest)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), ready=st.sampled_from((3, 5, PROMPT, PROMPT, PROMPT)))
    def a_chunk_is_saved(self, data: st.DataObject, ready: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.saved[name] = max(self.saved[name], ready)
        self.two.saved(self.saved[name], name)

    @rule(pair=st.sampled_from(PAIRS), digest=st.sampled_from((DIGEST, b"x" * 16)), reader_first=st.booleans())
    def a_pair_is_computed_and_read(self, pair: bytes, digest: bytes, reader_first: bool) -> None:
        """What random steps seldom reach."""
        if reader_first:
            self.kv_is_wanted(pair, 0)
        self.a_prompt_comes(pair, digest)
        name = f"r{self.number}"
        self.saved[name] = PROMPT
        self.two.saved(PROMPT, name)
        if not reader_first:
            self.kv_is_wanted(pair, 0)
        self.two.read()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def a_prompt_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.prompts.remove(name)
        self.two.left(self.two.p, name)

    @rule(pair=st.sampled_from(PAIRS), have=st.sampled_from((0, 4, 8)))
    def kv_is_wanted(self, pair: bytes, have: int) -> None:
        name = self.name()
        self.two.wanted(name, have=have, pair=pair)
        self.wants[name] = pair

    @precondition(lambda self: self.wants)
    @rule(data=st.data())
    def a_request_leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wants)))
        del self.wants[name]
        self.two.left(self.two.d, name)

    @precondition(lambda self: self.two.reads)
    @rule(problem=st.sampled_from(("", "", "", "broken")))
    def reads_end(self, problem: str) -> None:
        self.two.read(problem)

    @rule(seconds=st.sampled_from((0.5, 3, 12, 40)))
    def time_passes(self, seconds: float) -> None:
        self.two.wait(seconds)

    @rule(lost=st.sampled_from(LOST))
    def words_are_lost_for_a_while(self, lost: type) -> None:
        self.two.lost = (lost,)

    @rule()
    def words_are_lost_no_more(self) -> None:
        self.two.lost = ()

    @rule(prefill=st.booleans())
    def a_mover_ends(self, prefill: bool) -> None:
        server = self.two.p if prefill else self.two.d
        if not prefill:
            self.two.reads.clear()
        self.two.tell(server, ev.MoverLost(problem="killed", asked=False))
        self.two.tell(server, ev.MoverUp(agents=(server.agent(server.core.mover.epoch),)))

    @invariant()
    def what_is_ready_was_computed(self) -> None:
        """A prompt with this pair and the same tokens has been saved to its end."""
        for name in self.wants:
            if self.two.want(name).state is WantState.READY and name not in self.ready:
                self.ready.add(name)
                assert any(
                    came == (self.wants[name], DIGEST) and self.saved[prompt] == PROMPT
                    for prompt, came in self.came.items()
                )

    @invariant()
    def blocks_have_their_holders(self) -> None:
        self.two.free()

    def teardown(self) -> None:
        """Everyone leaves, reads end, time passes: all blocks are free."""
        self.two.lost = ()
        for name in list(self.wants):
            self.two.left(self.two.d, name)
        for name in list(self.prompts):
            self.two.left(self.two.p, name)
        self.two.read()
        self.two.wait(200)
        assert all(counts.free == counts.total for counts in self.two.free())


TestVllmPair = VllmPair.TestCase
TestVllmPair.settings = settings(max_examples=40, stateful_step_count=25)
