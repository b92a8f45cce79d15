"""Whether an answer can be made to follow a JSON schema: looked at before any work is done for it, and with limits."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from pdbus.bus.errors import RequestError

from .extras import INSTALL

SCHEMA_BYTES_MAX = 16 << 10  # beyond what people write; some of 32 KiB took a second to compile
SCHEMAS_KEPT = 256
LIMITS = {  # of llguidance, each a tenth or so of what it grants: a schema may take some 40 ms of a step
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "max_grammar_size": 200_000,
}


def check_form(schema: str, param: str) -> None:
    """Raises RequestError naming `param` for what is no schema, or a very large one. Cheap."""
    if len(schema.encode()) > SCHEMA_BYTES_MAX:
        raise RequestError(f"{param}: a schema has at most {SCHEMA_BYTES_MAX} bytes", param=param)
    try:
        if not isinstance(json.loads(schema), dict | bool):
            raise ValueError("it must be an object")
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{param}: is no JSON schema: {e}", param=param) from None


def check_schema(schema: str, param: str, tokenizer_fits: bool) -> None:
    """Whether this node can make answers follow it. Raises RequestError naming `param`. May take some 0.1 s, in which
    Python's lock is not held: call it in a thread."""
    check_form(schema, param)
    if not tokenizer_fits:
        problem = "this node's engine or tokenizer cannot follow a JSON schema"
        raise RequestError(f"{param}: {problem}", param=param, code="unsupported_value")
    if find_spec("llguidance") is None:
        problem = f"needs the package llguidance, which is not installed: {INSTALL}"
        raise RequestError(f"{param}: {problem}", param=param, code="unsupported_value")
    if problem := _problem(schema):
        raise RequestError(f"{param}: the schema cannot be followed: {problem}", param=param)


def limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS)


@lru_cache(SCHEMAS_KEPT)
def _problem(schema: str) -> str:
    """What is wrong with it, in one line; '' when nothing is."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(schema)
    return str(LLMatcher.validate_grammar(grammar, limits=limits())).partition("\n")[0]
