"""What the shell keeps of a request while it lives: its ids and text, which no machine sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdbus.bus.messages import Sampling, Token, TokenLogprob
from pdbus.bus.wire import pack_u32, replace
from pdbus.nodes.text import StopChecker


@dataclass(slots=True)
class Answer:
    """One request's prompt and growing answer, and where it goes."""

    request: bytes
    link: str
    client_name: str
    client_inc: bytes
    client_id: str
    prompt: Sequence[int]
    sampling: Sampling
    checker: StopChecker
    piece: Callable[[int], bytes]  # what a token stands for
    traceparent: str = ""  # what prefill nodes are told
    public: str = ""  # the key with which it was asked; '' without keys
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    text: str = ""  # complete, not yet sent
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of tokens not yet sent
    pieces: list[tuple[bytes, ...]] = field(default_factory=list)  # beside them, of each and its rivals
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the prompt's tokens that are scored

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Append one token. True when it ends the answer."""
        self.tokens.append(token)
        if logprob is not None and self.sampling.logprobs is not None:
            self.logprobs.append(logprob)
            self.pieces.append((self.piece(token), *(self.piece(other) for other, _ in logprob.top)))
        text, reason = self.checker.add(token)
        self.text += text
        return reason is not None

    def scored(self, first: int, logprobs: Sequence[TokenLogprob]) -> None:
        """Of the prompt's tokens from `first` on. What is computed a second time is known already."""
        expected = max(1, self.sampling.prompt_logprobs_from) + len(self.prompt_logprobs)
        self.prompt_logprobs += logprobs[expected - first :]

    def message(self) -> Token:
        """Everything taken and not yet sent; at first what the prompt's tokens were scored."""
        message = self._message()
        if self.sampling.prompt_logprobs is not None and not self.sent:
            message = replace(
                message,
                prompt=pack_u32(self.prompt),
                prompt_logprobs=tuple(self.prompt_logprobs),
                prompt_pieces=self._prompt_pieces(),
            )
        self.sent, self.text, self.logprobs, self.pieces = len(self.tokens), "", [], []
        return message

    def _prompt_pieces(self) -> tuple[tuple[bytes, ...], ...]:
        unscored = max(1, self.sampling.prompt_logprobs_from)
        rivals = [*[()] * unscored, *(one.top for one in self.prompt_logprobs)]
        return tuple(
            (self.piece(token), *(self.piece(other) for other, _ in top))
            for token, top in zip(self.prompt, rivals, strict=False)
        )

    def _message(self) -> Token:
        return Token(
            client_id=self.client_id,
            request=self.request,
            index=self.sent,
            tokens=pack_u32(self.tokens[self.sent :]),
            text=self.text,
            logprobs=tuple(self.logprobs),
            pieces=tuple(self.pieces),
        )
