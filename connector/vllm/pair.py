"""The pair: what two servers that are given one request know it by. 16 unguessable bytes, minted by the gateway.

It is all that is taken from a request's parameters, since these may come from a client. It is a name, not a right: a
prefill node hands KV only to a decode node with the same prompt (its digest is compared), and only once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

PARAMETER = "pdbus_pair"  # the key in kv_transfer_params
PAIR_BYTES = 16
_FORM = re.compile(r"([0-9a-f]{32})(?:@([A-Za-z0-9][A-Za-z0-9._-]{0,62}))?")


class Pair(NamedTuple):
    """`node`: the prefill node that was given the request, '' where there is but one. It chooses among members that
    said hello, no more."""

    token: bytes
    node: str = ""


def pair_of(parameters: object) -> Pair | None:
    """The pair in a request's `kv_transfer_params`; None for none, and for whatever is not well formed."""
    text: Any = parameters.get(PARAMETER) if isinstance(parameters, Mapping) else None
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    return Pair(bytes.fromhex(found[1]), found[2] or "") if found else None
