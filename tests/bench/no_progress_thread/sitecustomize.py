"""On the path of a vLLM server: NIXL agents without their progress thread, which polls without a pause by default."""

from __future__ import annotations

import contextlib
from typing import Any

with contextlib.suppress(ImportError):
    from nixl._api import nixl_agent_config

    _as_it_is = nixl_agent_config.__init__

    def _without_thread(self: Any, *args: Any, **settings: Any) -> None:
        _as_it_is(self, *args, **settings)
        self.enable_pthread = False

    nixl_agent_config.__init__ = _without_thread
