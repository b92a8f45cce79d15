"""What comes from clients and tools: checked, tokenized, answered. Here token values and text live, nowhere else."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdbus.bus.answers import error_of
from pdbus.bus.endpoint import FORBIDDEN, Received
from pdbus.bus.errors import Closed, ConfigError, PdError, RequestError
from pdbus.bus.hashing import block_hashes, prompt_digest
from pdbus.bus.messages import (
    Cancel,
    Cancelled,
    Connect,
    ConnectReply,
    Credit,
    Disconnect,
    DisconnectReply,
    Error,
    EventsSnapshot,
    FetchTokenizer,
    FetchTokenizerReply,
    Finished,
    Generate,
    Ledger,
    LedgerReply,
    Message,
    Outcome,
    Sampling,
    Status,
    StatusReply,
    TokenLogprob,
)
from pdbus.bus.ports import parse_address
from pdbus.bus.wire import pack_u32, replace
from pdbus.connector import ipc

from . import events as ev
from . import report
from .answer import Answer
from .core import OVERLOADED_RETRY_MS
from .json_schema import check_schema
from .limits import check_bias, check_deadline, check_sampling, check_scored, check_stop_ids, too_long
from .prompt_reader import PromptReader
from .text import StopChecker
from .tokenizer import Tokenizer
from .tokenizer_files import tokenizer_part
from .tracing import passed

if TYPE_CHECKING:
    from .control import Control

JOIN_WAIT_S = 6.0  # a handshake's 5 s, and one to dial
JOIN_LOOK_S = 0.02
PROBE_WAIT_S = 4.0  # a step of a large chunk may be under way in the worker; less than a client waits for status
ANSWERS_MAX = 4096  # requests being tokenized or answered; one more is refused before any work
CLIENT_ID_CHARS_MAX = 256
TARGETS_MAX = 1024  # to connect or disconnect: as many as there can be; a million would keep the node from all else
UNTIL_FULL = 2**31 - 1  # max_tokens of a client that wants as many as fit

log = logging.getLogger("pdbus.intake")


@dataclass(slots=True)
class Coming:
    """A request before it has an answer."""

    public: str  # as in Answer
    cancelled: bool = False


class Intake:
    """The answers under way."""

    def __init__(self, control: Control, tokenizer: Tokenizer) -> None:
        self._control = control
        self._tokenizer = tokenizer
        self._reader = PromptReader(tokenizer, control.setup.vocab_size, control.setup.max_model_len - 1)
        self._answers: dict[bytes, Answer] = {}
        self._by_seq: dict[int, Answer] = {}
        self._checking_schema = asyncio.Lock()
        self._tokenizing: dict[str, Coming] = {}  # by client key
        self._tasks: set[asyncio.Task[None]] = set()
        self._probes: dict[tuple[str, int], asyncio.Future[bool]] = {}
        self._probe = 0
        self._handlers: dict[type[Message], Callable[[Received], None]] = {
            Generate: self._generate,
            Cancel: self._cancel,
            Credit: self._credit,
            Status: lambda r: self._answer_later(r, self._status()),
            Ledger: lambda r: self._reply(r, self._ledger()),
            EventsSnapshot: self._snapshot,
            FetchTokenizer: lambda r: self._answer_later(r, self._told_tokenizer(r)),
            Connect: self._connect,
            Disconnect: self._disconnect,
        }

    def takes(self, received: Received) -> bool:
        """Handle a client's or tool's message; False for anything else."""
        handler = self._handlers.get(type(received.message))
        if handler is None:
            return False
        handler(received)
        return True

    def farewell(self) -> None:
        """The node ends. Whoever still waits for an answer is told so; after a drain nobody does."""
        for a in self._answers.values():
            error = Error(message=f"node {self._control.config.name} has failed", code="broken", client_id=a.client_id)
            self._say(a, Finished(client_id=a.client_id, request=a.request, reason="error", error=error))
        self._answers.clear()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._reader.close()

    # ------------------------------------------------------------ generate

    def _generate(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, Generate)
        if self._control.config.role == "prefill":
            name = self._control.config.name
            raise RequestError(
                f"{name} only prefills for other nodes: ask a decode node", code="wrong_role", status=421
            )
        key = client_key(received, message.client_id)
        if key in self._tokenizing or self._control.core.requests.of_client(key) is not None:
            raise RequestError("this client_id is in use by a request of yours", param="client_id")
        if len(self._tokenizing) + len(self._answers) >= ANSWERS_MAX:
            error = Error(
                message="too many requests at once",
                code="overloaded",
                client_id=message.client_id,
                retry_after_ms=OVERLOADED_RETRY_MS,
            )
            self._reply(received, error)
            return
        self._tokenizing[key] = Coming(self._control.endpoint.public_of(received.link))
        self._spawn(self._admit(received, message, key))

    async def _admit(self, received: Received, message: Generate, key: str) -> None:
        """Tokenize in the thread, check, and let the core have it."""
        arrived = time.monotonic_ns()
        try:
            sampling = self._checked_sampling(message)
            if sampling.json_schema:
                async with self._checking_schema:  # one at a time: it takes a core
                    fits = self._tokenizer.spells_text
                    await asyncio.to_thread(check_schema, sampling.json_schema, "json_schema", fits)
            prompt = await self._reader.read(message)
            sampling = self._fitted(sampling, len(prompt), "prompt" if message.messages is None else "messages")
            check_scored(sampling, len(prompt))
            if self._control.ended:
                raise Closed(f"node {self._control.config.name} has ended")
        except PdError as e:
            self._reply(received, error_of(e, kind=message.KIND, client_id=message.client_id))
            return
        finally:
            coming = self._tokenizing.pop(key)
        request = secrets.token_bytes(16)
        if coming.cancelled:
            self._reply(received, Finished(client_id=message.client_id, request=request, reason="cancelled"))
            return
        spans = self._control.spans
        told = spans.began(request, message.traceparent) if spans else passed(message.traceparent)
        packed = pack_u32(prompt)
        self._answers[request] = Answer(
            request=request,
            link=received.link,
            client_name=received.header.from_,
            client_inc=received.header.from_inc,
            client_id=message.client_id,
            prompt=prompt,
            sampling=sampling,
            checker=StopChecker(sampling, self._tokenizer.eos_ids, self._tokenizer.decoder()),
            piece=self._tokenizer.piece,
            traceparent=told,
            public=coming.public,
        )
        self._control.post(
            ev.GenerateAsked(
                request=request,
                link=received.link,
                client=key,
                prompt_tokens=len(prompt),
                prompt_digest=prompt_digest(packed),
                block_hashes=block_hashes(packed, self._control.setup.geometry.block_size),
                sampling=sampling,
                deadline_ns=message.deadline_ms * 1_000_000 - (time.monotonic_ns() - arrived),
                credit=message.credit,
                whole=sampling.prompt_logprobs is not None and sampling.prompt_logprobs_from <= 1,
            )
        )

    def _checked_sampling(self, message: Generate) -> Sampling:
        s = message.sampling
        setup = self._control.setup
        if message.model not in ("", setup.model):
            raise RequestError(
                f"the model {message.model!r} does not exist; this node serves {setup.model!r}",
                param="model", code="model_not_found", status=404,
            )  # fmt: skip
        check_sampling(s)
        if s.prompt_logprobs is not None and self._control.config.engine == "coded":
            problem = "prompt_logprobs: the coded engine has no log-probabilities of prompts"
            raise RequestError(problem, param="prompt_logprobs", code="unsupported_value")
        check_stop_ids(s.stop_token_ids, setup.vocab_size)
        check_bias(s.logit_bias, setup.vocab_size)
        check_deadline(message.deadline_ms)
        if message.credit < 1:
            raise RequestError(f"credit is {message.credit}; at least 1", param="credit")
        return s if s.seed else replace(s, seed=secrets.randbits(63) or 1)

    def _fitted(self, sampling: Sampling, prompt_tokens: int, param: str) -> Sampling:
        """Its `max_tokens` within the context. Raises RequestError when what was asked for does not fit. `param` is
        where the prompt came from."""
        limit = self._control.setup.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            raise too_long(prompt_tokens, limit - 1, param)
        if sampling.max_tokens == UNTIL_FULL:
            return replace(sampling, max_tokens=room)
        if sampling.max_tokens > room:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {sampling.max_tokens}; together at most "
                f"{limit} fit (max_model_len): ask for at most {room}", param="max_tokens",
                code="context_length_exceeded",
            )  # fmt: skip
        return sampling

    def _cancel(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, Cancel)
        key = self._own_key(received, message.client_id)
        if key in self._tokenizing:
            self._tokenizing[key].cancelled = True
        self._control.post(ev.CancelAsked(client=key))
        self._reply(received, Cancelled(client_id=message.client_id))

    def _credit(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, Credit)
        self._control.post(ev.CreditGiven(client=self._own_key(received, message.client_id), index=message.index))

    def _own_key(self, received: Received, client_id: str) -> str:
        """Of a request of its own. Raises RequestError where another key asked: what names it stands in the status, and
        whoever may read that could speak for it."""
        key = client_key(received, client_id)
        known = self._control.core.requests.of_client(key)
        asked = self._tokenizing.get(key) or (self._answers.get(known.request) if known is not None else None)
        if asked is not None and asked.public != self._control.endpoint.public_of(received.link):
            problem = "client_id: this request was asked with another key"
            raise RequestError(problem, param="client_id", code=FORBIDDEN)
        return key

    # ------------------------------------------------------------ answers

    def open(self, request: bytes, seq: int) -> Answer:
        """The request's answer, known by its worker's sequence from now on."""
        answer = self._by_seq[seq] = self._answers[request]
        return answer

    def prompt(self, request: bytes) -> Sequence[int]:
        return self._answers[request].prompt

    def traceparent(self, request: bytes) -> str:
        """What prefill nodes are told of its trace."""
        return self._answers[request].traceparent

    def take(self, seq: int, token: int, logprob: TokenLogprob | None) -> bool:
        """Append a token to a sequence's answer. True when it ends there. False for what has ended already."""
        answer = self._by_seq.get(seq)
        return answer is not None and answer.take(token, logprob)

    def scored(self, seq: int, first: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Log-probabilities of tokens of a sequence's prompt, from the one at `first` on."""
        if (answer := self._by_seq.get(seq)) is not None:
            answer.scored(first, logprobs)

    def emit(self, request: bytes) -> None:
        """Send what has been taken. A client that cannot be reached has gone."""
        answer = self._answers[request]
        if not self._say(answer, answer.message()):
            self._control.post(ev.ClientGone(link=answer.link))

    def finish(self, e: ev.EndRequest) -> None:
        """Send the rest of the text, then the one Finished."""
        self._by_seq.pop(e.seq, None)
        answer = self._answers.pop(e.request)
        answer.text += answer.checker.finish()
        if answer.text:
            self._say(answer, answer.message())
        error = None
        if e.reason == "error":
            error = Error(message=e.problem, code=e.code, client_id=answer.client_id, retry_after_ms=e.retry_after_ms)
        self._say(
            answer,
            Finished(
                client_id=answer.client_id,
                request=e.request,
                reason=e.reason,
                prompt_tokens=e.prompt_tokens,
                cached_tokens=e.cached_tokens,
                completion_tokens=e.completion_tokens,
                error=error,
                timeline=e.timeline,
            ),
        )

    def _say(self, answer: Answer, message: Message) -> bool:
        sent = self._control.endpoint.tell(answer.link, message, to=answer.client_name, to_inc=answer.client_inc)
        return bool(sent)

    # ------------------------------------------------------------ tools

    def _reply(self, received: Received, message: Message) -> None:
        header = received.header
        self._control.endpoint.tell(received.link, message, to=header.from_, to_inc=header.from_inc, cause=header.seq)

    def _answer_later(self, received: Received, work: Coroutine[Any, Any, Message]) -> None:
        async def run() -> None:
            self._reply(received, await work)

        self._spawn(run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._control.fail(task.exception())

    async def _status(self) -> StatusReply:
        worker, mover = await asyncio.gather(self._alive("worker"), self._alive("mover"))
        control, core, now = self._control, self._control.core, time.monotonic_ns()
        reasons = report.not_ready(core)
        reasons += sorted({control.endpoint.door_problem, control.publisher.door_problem} - {""})
        reasons += [f"the {what} does not answer" for what, ok in (("worker", worker), ("mover", mover)) if not ok]
        clean, ledger = report.ledger(core)
        return StatusReply(
            status={
                "name": control.config.name,
                "incarnation": control.incarnation.hex(),
                "role": control.config.role,
                "model": control.setup.model,
                "engine": control.config.engine,
                "max_model_len": control.setup.max_model_len,
                "vocab_size": control.setup.vocab_size,
                "block_size": control.setup.geometry.block_size,
                "block_bytes": control.setup.geometry.block_bytes,
                "prefill_policy": control.config.prefill_policy,
                "address": control.address,
                "http": control.http,
                "epoch": core.mover.epoch,
                "ready": not reasons,
                "not_ready": reasons,
                "pids": {"control": control.pid, "worker": control.worker.pids[0], "mover": control.mover.pids[0]},
                "ranks": [
                    {"worker": worker, "mover": mover}
                    for worker, mover in zip(control.worker.pids, control.mover.pids, strict=True)
                ],
                "peers": report.peers(core, now),
                "leases": core.offers.rows(),
                "reads": core.fetches.rows(),
                "requests": report.requests(core, now),
                "ledger": {"clean": clean, **ledger},
                "metrics": report.metrics(core, control.endpoint.counters.as_dict(), now),
                "measured": [*report.families(core), *control.measures.families()],
            }
        )

    async def _told_tokenizer(self, received: Received) -> FetchTokenizerReply | Error:
        message, setup = received.message, self._control.setup
        assert isinstance(message, FetchTokenizer)
        try:
            return await asyncio.to_thread(tokenizer_part, setup.folder, setup.vocab_size, message.part)
        except PdError as e:
            return error_of(e, kind=message.KIND)

    def _ledger(self) -> LedgerReply:
        clean, ledger = report.ledger(self._control.core)
        return LedgerReply(clean=clean, ledger=ledger)

    def _snapshot(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, EventsSnapshot)
        self._reply(received, self._control.publisher.snapshot(message))

    def _connect(self, received: Received) -> None:
        """All are called at once, before anything else that is asked; only the answer waits."""
        message = received.message
        assert isinstance(message, Connect)
        _check_count("addresses", message.addresses)
        refused = [self._join(address) for address in message.addresses]
        self._answer_later(received, self._connected(message.addresses, refused))

    def _join(self, address: str) -> Outcome | None:
        """Why this address cannot be called; None when it is."""
        try:
            parse_address(address, "address")
        except ConfigError as e:
            return Outcome(target=address, ok=False, detail=e.problem)
        if address == self._control.address:
            return Outcome(target=address, ok=False, detail="this is the node itself")
        self._control.post(ev.JoinAsked(address=address))
        return None

    async def _connected(self, addresses: Sequence[str], refused: Sequence[Outcome | None]) -> ConnectReply:
        """What has become of each when all is decided, or after JOIN_WAIT_S: they are called on all the same. Looked
        at from time to time, not at each event: of a thousand addresses, that would leave no time for events."""
        core, called = self._control.core, [a for a, refusal in zip(addresses, refused, strict=True) if refusal is None]
        due_s = time.monotonic() + JOIN_WAIT_S
        while None in (outcomes := report.joined(core, called)) and time.monotonic() < due_s:  # noqa: ASYNC110
            await asyncio.sleep(JOIN_LOOK_S)
        details = report.waiting(core, called)
        became = iter(
            [o or Outcome(target=a, ok=False, detail=d) for a, o, d in zip(called, outcomes, details, strict=True)]
        )
        return ConnectReply(outcomes=tuple(refusal or next(became) for refusal in refused))

    def _disconnect(self, received: Received) -> None:
        message = received.message
        assert isinstance(message, Disconnect)
        _check_count("targets", message.targets)
        for target in message.targets:
            self._control.post(ev.RemoveAsked(target=target))
        outcomes = report.removed(self._control.core, message.targets)
        self._reply(received, DisconnectReply(outcomes=tuple(outcomes)))

    # ------------------------------------------------------------ probes

    async def _alive(self, what: str) -> bool:
        """A round trip through the worker or the mover; False at once when it is not up."""
        core = self._control.core
        if not (core.worker_up if what == "worker" else core.mover.up):
            return False
        self._probe += 1
        key = (what, self._probe)
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._probes[key] = answered
        if what == "worker":
            self._control.worker.send(ipc.ProbeWorker(probe=self._probe))
        else:
            self._control.mover.send(ipc.ProbeMover(probe=self._probe))
        try:
            async with asyncio.timeout(PROBE_WAIT_S):
                return await answered
        except TimeoutError:
            return False
        finally:
            del self._probes[key]

    def probed(self, what: str, probe: int) -> None:
        answered = self._probes.get((what, probe))
        if answered is not None and not answered.done():
            answered.set_result(True)

    def lost(self, what: str) -> None:
        """The worker or mover has ended: what it was asked will not be answered."""
        for (whom, _), answered in self._probes.items():
            if whom == what and not answered.done():
                answered.set_result(False)


def _check_count(name: str, given: Sequence[str]) -> None:
    if len(given) > TARGETS_MAX:
        raise RequestError(f"{name}: at most {TARGETS_MAX} at once, got {len(given)}", param=name)


def client_key(received: Received, client_id: str) -> str:
    """What names a request of a client: its life and the id it chose. Raises RequestError for a long one: each token's
    message has it."""
    if len(client_id) > CLIENT_ID_CHARS_MAX:
        problem = f"client_id: at most {CLIENT_ID_CHARS_MAX} characters, got {len(client_id)}"
        raise RequestError(problem, param="client_id")
    return f"{received.header.from_inc.hex()}:{client_id}"
