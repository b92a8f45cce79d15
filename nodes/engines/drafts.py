"""Prompt lookup: what followed the last time that the last few tokens came, as a guess at what comes next.

No model is asked. It guesses well where an answer repeats what was said before: quotations, code, structured text.
"""

from __future__ import annotations

from array import array

import numpy as np

NGRAMS = (4, 3, 2)  # tokens that must have come before, the longest first: one alone guesses badly


def lookup(tokens: array[int], most: int) -> list[int]:
    """Up to `most` tokens that may follow `tokens` (int64); [] when their end has not come before."""
    known = np.frombuffer(tokens, dtype=np.int64)
    for size in NGRAMS if most > 0 else ():
        places = len(known) - size  # where an earlier one may start
        if places < 1:
            continue
        same = known[:places] == known[-size]
        for i in range(1, size):
            same &= known[i : places + i] == known[i - size]
        found = np.flatnonzero(same)
        if len(found):
            after = int(found[-1]) + size
            return tokens[after : after + most].tolist()
    return []
