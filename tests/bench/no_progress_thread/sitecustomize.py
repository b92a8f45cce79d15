"""On the path of a vLLM server: NIXL agents without their progress thread, which polls without a pause by default, and
workers that compute on the core they were given: on a CPU NixlConnector moves each to the last core of its NUMA node,
so that both servers of a pair on one machine compute on the same one."""

from __future__ import annotations

import contextlib
import os
from typing import Any


def _stay(pid: int, cores: Any) -> None:
    pass


os.sched_setaffinity = _stay  # vLLM calls it nowhere else; OpenMP binds threads by itself

with contextlib.suppress(ImportError):
    from nixl._api import nixl_agent_config

    _as_it_is = nixl_agent_config.__init__

    def _without_thread(self: Any, *args: Any, **settings: Any) -> None:
        _as_it_is(self, *args, **settings)
        self.enable_pthread = False

    nixl_agent_config.__init__ = _without_thread
