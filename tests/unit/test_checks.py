"""What a prefill or decode node may say is what this node can act on; anything else is named and answered."""

from __future__ import annotations

from typing import Any

import pytest

from pdbus.bus.endpoint import Received
from pdbus.bus.errors import RemoteProtocolError
from pdbus.bus.hashing import block_hashes, prompt_digest
from pdbus.bus.messages import (
    FirstToken,
    Geometry,
    Heartbeat,
    LeaseId,
    LeaseRenewed,
    PrefillAccepted,
    PrefillDone,
    PrefillRequest,
    RenewedEntry,
    Sampling,
    TokenLogprob,
    TryId,
)
from pdbus.bus.wire import Header, encode, pack_u32, replace
from pdbus.nodes.checks import check_first_tokens, checked_prompt
from pdbus.nodes.setup import Setup

SETUP = Setup(
    model="m",
    folder="",
    geometry=Geometry(block_size=2),
    fingerprint="f",
    max_model_len=64,
    vocab_size=10,
    blocks=32,
    slab_bytes=(0,),
)
TRY = TryId(node="d", incarnation=bytes(16), request=bytes(16), attempt=1)
LEASE = LeaseId(node="p", incarnation=bytes(16), epoch=1, generation=1)
PROMPT = pack_u32([1, 2, 3])
REQUEST = PrefillRequest(
    try_=TRY, sampling=Sampling(), have=0, deadline_ms=1, prompt_tokens=3, prompt_digest=prompt_digest(PROMPT)
)


def received(raw: tuple[bytes, ...] = (PROMPT,), **changes: Any) -> Received:
    return Received("l", Header(from_="d", from_inc=b"i"), replace(REQUEST, **changes), raw)


def test_a_prompt_comes_with_the_hashes_of_its_full_blocks() -> None:
    assert checked_prompt(received(), SETUP) == (PROMPT, block_hashes([1, 2, 3], 2))


@pytest.mark.parametrize(
    ("raw", "changes", "field"),
    [
        ((), {}, "raw"),
        ((b"",), {"prompt_tokens": 0}, "raw"),
        ((PROMPT[:-1],), {}, "raw"),
        ((PROMPT,), {"prompt_tokens": 4}, "raw"),
        ((pack_u32([1, 2, 4]),), {}, "prompt_digest"),
        ((pack_u32([10]),), {"prompt_tokens": 1, "prompt_digest": prompt_digest(pack_u32([10]))}, "raw"),
        ((PROMPT,), {"sampling": Sampling(top_p=float("nan"))}, "sampling.top_p"),
        ((PROMPT,), {"sampling": Sampling(logprobs=10**9)}, "sampling.logprobs"),
    ],
)
def test_a_prompt_that_is_not_what_it_says_is_named(
    raw: tuple[bytes, ...], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        checked_prompt(received(raw, **changes), SETUP)
    assert (raised.value.kind, raised.value.field) == ("prefill.request", field)


GOOD = encode(FirstToken(token=9, logprob=TokenLogprob(logprob=-1.0, top=((0, -1.0),))))
BAD = [
    b"\xc1",
    encode(Heartbeat()),
    encode(FirstToken(token=10)),
    encode(FirstToken(token=-1)),
    encode(FirstToken(token=1, draft=10)),
    encode(FirstToken(token=1, draft=-2)),
    encode(FirstToken(token=1, logprob=TokenLogprob(logprob=-1.0, top=((2**40, -2.0),)))),
]


def saying(payload: bytes | None) -> tuple[PrefillAccepted, PrefillDone, LeaseRenewed]:
    """The three messages that bring a first token."""
    return (
        PrefillAccepted(try_=TRY, lease=LEASE, first_token=payload),
        PrefillDone(try_=TRY, lease=LEASE, ready=3, blocks=b"", first_token=payload),
        LeaseRenewed(
            entries=(RenewedEntry(try_=TRY, held=True), RenewedEntry(try_=TRY, held=True, first_token=payload))
        ),
    )


@pytest.mark.parametrize("payload", [None, GOOD])
def test_a_first_token_that_can_be_said_or_none_passes(payload: bytes | None) -> None:
    for message in (*saying(payload), Heartbeat()):
        check_first_tokens(message, SETUP)


@pytest.mark.parametrize("payload", BAD)
def test_a_first_token_that_no_node_can_say_is_refused(payload: bytes) -> None:
    """It would end the worker of who takes it, and a broken payload its control."""
    for message in saying(payload):
        with pytest.raises(RemoteProtocolError) as raised:
            check_first_tokens(message, SETUP)
        assert raised.value.kind == message.KIND
