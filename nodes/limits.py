"""What a request may ask of sampling: the same at every door, whoever knocks (HTTP, the SDK, another node)."""

from __future__ import annotations

from pdbus.bus.errors import RequestError
from pdbus.bus.messages import Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")  # of a chat message
STOPS_MAX = 16  # each is looked for in every token's text
STOP_CHARS_MAX = 1024  # text that could be the start of one is held back
STOP_IDS_MAX = 1024
TEMPERATURE_MAX = 2  # OpenAI's
PENALTY_MAX = 2  # OpenAI's
REPETITION_MAX = 10  # far beyond any use; a division by more is noise
BIAS_MAX = 100  # OpenAI's
BIASES_MAX = 1024
SEED_MAX = 2**63 - 1
LOGPROBS_MAX = 20
SCORED_MAX = 1 << 18  # log-probabilities of a prompt; with their texts some 8 MB, half of a message
DEADLINE_MS_MAX = 86_400_000  # a day


def check_sampling(s: Sampling) -> None:
    """Raises RequestError naming the first field that is out of range, NaN included."""
    for name, good, wanted in (
        ("max_tokens", s.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= s.min_tokens <= s.max_tokens, "from 0 to max_tokens"),
        ("temperature", 0 <= s.temperature <= TEMPERATURE_MAX, f"from 0 to {TEMPERATURE_MAX}"),
        ("top_k", 0 <= s.top_k < 2**31, "from 0 to 2147483647"),
        ("top_p", 0 < s.top_p <= 1, "above 0, at most 1"),
        ("min_p", 0 <= s.min_p <= 1, "from 0 to 1"),
        ("presence_penalty", abs(s.presence_penalty) <= PENALTY_MAX, f"from -{PENALTY_MAX} to {PENALTY_MAX}"),
        ("frequency_penalty", abs(s.frequency_penalty) <= PENALTY_MAX, f"from -{PENALTY_MAX} to {PENALTY_MAX}"),
        ("repetition_penalty", 0 < s.repetition_penalty <= REPETITION_MAX, f"above 0, at most {REPETITION_MAX}"),
        ("seed", 0 <= s.seed <= SEED_MAX, f"from 0 to {SEED_MAX}"),
        ("logprobs", s.logprobs is None or 0 <= s.logprobs <= LOGPROBS_MAX, f"from 0 to {LOGPROBS_MAX}"),
        ("prompt_logprobs", 0 <= (s.prompt_logprobs or 0) <= LOGPROBS_MAX, f"from 0 to {LOGPROBS_MAX}"),
    ):
        if not good:
            raise RequestError(f"{name} is {getattr(s, name)}; it must be {wanted}", param=name)
    check_stops(s.stop)
    check_stop_ids(s.stop_token_ids)
    check_bias(s.logit_bias)


def too_long(tokens: int, tokens_max: int, param: str, how: str = "") -> RequestError:
    """A prompt that leaves no room for an answer; `how` says how exactly `tokens` is known."""
    return RequestError(
        f"the prompt has {how}{tokens} tokens; with one for the answer at most {tokens_max + 1} fit (max_model_len): "
        f"shorten it", param=param, code="context_length_exceeded",
    )  # fmt: skip


def check_scored(s: Sampling, prompt_tokens: int) -> None:
    """All log-probabilities of a prompt travel in one message."""
    if not 0 <= s.prompt_logprobs_from < prompt_tokens or (s.prompt_logprobs_from and s.prompt_logprobs is None):
        problem = (
            f"prompt_logprobs_from is {s.prompt_logprobs_from}; it must be from 0 to {prompt_tokens - 1}, the prompt's "
            "last token, and comes with prompt_logprobs"
        )
        raise RequestError(problem, param="prompt_logprobs_from")
    if s.prompt_logprobs is not None and prompt_tokens * (1 + s.prompt_logprobs) > SCORED_MAX:
        problem = (
            f"prompt_logprobs: {prompt_tokens} tokens with {s.prompt_logprobs} alternatives each are more than "
            f"{SCORED_MAX} log-probabilities: ask for fewer alternatives, or a shorter prompt"
        )
        raise RequestError(problem, param="prompt_logprobs")


def check_deadline(deadline_ms: int) -> None:
    if not 1 <= deadline_ms <= DEADLINE_MS_MAX:
        problem = f"deadline_ms is {deadline_ms}; it must be from 1 to {DEADLINE_MS_MAX} (a day)"
        raise RequestError(problem, param="deadline_ms")


def check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > STOPS_MAX:
        raise RequestError(f"stop: at most {STOPS_MAX} strings, got {len(stops)}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= STOP_CHARS_MAX:
            raise RequestError(f"stop: each must have 1 to {STOP_CHARS_MAX} characters, got {len(text)}", param="stop")


def check_stop_ids(ids: tuple[int, ...], vocab_size: int = 2**32) -> None:
    if len(ids) > STOP_IDS_MAX:
        raise RequestError(f"stop_token_ids: at most {STOP_IDS_MAX} ids, got {len(ids)}", param="stop_token_ids")
    for i, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            problem = f"stop_token_ids[{i}]: must be a token id from 0 to {vocab_size - 1}, got {token}"
            raise RequestError(problem, param=f"stop_token_ids[{i}]")


def check_bias(biases: tuple[tuple[int, float], ...], vocab_size: int = 2**32) -> None:
    if len(biases) > BIASES_MAX:
        raise RequestError(f"logit_bias: at most {BIASES_MAX} tokens, got {len(biases)}", param="logit_bias")
    for token, bias in biases:
        if not 0 <= token < vocab_size:
            problem = f"logit_bias: {token} is no token id from 0 to {vocab_size - 1}"
            raise RequestError(problem, param="logit_bias")
        if not abs(bias) <= BIAS_MAX:
            problem = f"logit_bias: token {token} must have a bias from -{BIAS_MAX} to {BIAS_MAX}, got {bias}"
            raise RequestError(problem, param="logit_bias")
