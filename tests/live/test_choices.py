"""Several answers to one HTTP request, through P + D."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .conftest import Live

pytestmark = pytest.mark.live


def test_several_answers_are_those_of_single_requests(coded: Live) -> None:
    """`n` answers have seeds of their own; the first has the one that was given."""

    def texts(**fields: Any) -> list[str]:
        body = {"max_tokens": 8, "temperature": 1, **fields}
        answer = httpx.post(f"{coded.decode.http}/v1/completions", json=body, timeout=60).json()
        return [choice["text"] for choice in answer["choices"]]

    several = texts(prompt=["one prompt", "another prompt"], n=2, seed=5)
    alone = [texts(prompt=prompt, seed=seed)[0] for prompt in ("one prompt", "another prompt") for seed in (5, 6)]
    assert several == alone and len(set(several)) == 4
