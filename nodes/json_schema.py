"""Whether an answer can be made to follow a JSON schema, told before any work is done for it."""

from __future__ import annotations

import json
from importlib.util import find_spec

from pdbus.bus.errors import RequestError

from .extras import INSTALL

SCHEMA_BYTES_MAX = 64 << 10  # far beyond what people write; compiling takes time and memory in proportion


def check_schema(schema: str, param: str) -> None:
    """Raises RequestError naming `param`. Where the library is missing, as in a gateway, the node decides."""
    if len(schema.encode()) > SCHEMA_BYTES_MAX:
        raise RequestError(f"{param}: a schema has at most {SCHEMA_BYTES_MAX} bytes", param=param)
    try:
        if not isinstance(json.loads(schema), dict | bool):
            raise ValueError("it must be an object")
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{param}: is no JSON schema: {e}", param=param) from None
    if find_spec("llguidance") is None:
        return
    from llguidance import LLMatcher

    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    if problem:
        raise RequestError(f"{param}: the schema cannot be followed: {problem.partition(chr(10))[0]}", param=param)


def check_can_follow(tokenizer_fits: bool, param: str) -> None:
    """Whether this node can at all. Raises RequestError naming `param`."""
    if not tokenizer_fits:
        problem = "this node's engine or tokenizer cannot follow a JSON schema"
        raise RequestError(f"{param}: {problem}", param=param, code="unsupported_value")
    if find_spec("llguidance") is None:
        problem = f"needs the package llguidance, which is not installed: {INSTALL}"
        raise RequestError(f"{param}: {problem}", param=param, code="unsupported_value")
