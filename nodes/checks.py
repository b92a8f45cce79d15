"""What other nodes say, checked before the core hears it: a fault of theirs is answered and ends nothing here."""

from __future__ import annotations

from pdbus.bus.endpoint import Received
from pdbus.bus.errors import RemoteProtocolError, RequestError
from pdbus.bus.hashing import block_hashes, prompt_digest
from pdbus.bus.messages import FirstToken, LeaseRenewed, Message, PrefillAccepted, PrefillDone, PrefillRequest
from pdbus.bus.wire import decode, unpack_u32

from .limits import check_sampling
from .setup import Setup


def checked_prompt(received: Received, setup: Setup) -> tuple[bytes, tuple[bytes, ...]]:
    """The prompt of a prefill.request, as its digest and length promise, and the hashes of its full blocks."""
    message = received.message
    assert isinstance(message, PrefillRequest)
    prompt = received.raw[0] if received.raw else b""
    if len(prompt) != 4 * message.prompt_tokens or not prompt:
        raise RemoteProtocolError(
            f"{len(prompt)} bytes of prompt for {message.prompt_tokens} tokens", kind=message.KIND, field="raw"
        )
    if prompt_digest(prompt) != message.prompt_digest:
        raise RemoteProtocolError("the prompt does not match its digest", kind=message.KIND, field="prompt_digest")
    try:
        check_sampling(message.sampling)
    except RequestError as e:
        raise RemoteProtocolError(str(e), kind=message.KIND, field=f"sampling.{e.param}") from None
    if (largest := max(unpack_u32(prompt))) >= setup.vocab_size:
        raise RemoteProtocolError(
            f"token id {largest} is outside the vocabulary of {setup.vocab_size}", kind=message.KIND, field="raw"
        )
    return prompt, block_hashes(prompt, setup.geometry.block_size)


def check_first_tokens(message: Message, setup: Setup) -> None:
    """What a prefill node sampled is opaque to the core; what no node can say must not get that far."""
    payloads: tuple[bytes | None, ...] = ()
    match message:
        case PrefillAccepted() | PrefillDone():
            payloads = (message.first_token,)
        case LeaseRenewed():
            payloads = tuple(entry.first_token for entry in message.entries)
    for payload in payloads:
        if payload is None:
            continue
        first = decode(payload, FirstToken, name=message.KIND)
        named = (first.token, *(token for token, _ in first.logprob.top)) if first.logprob else (first.token,)
        named += () if first.draft == -1 else (first.draft,)
        if not all(0 <= token < setup.vocab_size for token in named):
            problem = f"a first token outside the vocabulary of {setup.vocab_size}"
            raise RemoteProtocolError(problem, kind=message.KIND, field="first_token")
