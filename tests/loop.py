"""Running a coroutine test on the loop that nodes use."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import uvloop

TEST_S = 30.0  # a test that hangs fails by itself

P = ParamSpec("P")


def on_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Make an async test a plain one."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(TEST_S):
                await test(*args, **kwargs)

        uvloop.run(bounded())

    return run


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `condition()` holds, looking each time that the loop has done something."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
