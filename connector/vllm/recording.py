"""A vLLM server's recording, for `pd-replay verify`. No tokens are in it: prompts are told by their digests."""

from __future__ import annotations

from pathlib import Path

from pdbus import __version__
from pdbus.bus.members import MembershipConfig
from pdbus.bus.recorder import Recorder
from pdbus.bus.wire import Declared

from ..recording import TurnRecorder
from .core import PairConfig


class PairBegan(Declared, tag_field="t", tag=True):
    """At the head: what the core was made of, by which version."""

    core: PairConfig
    membership: MembershipConfig
    version: str


def recorder(directory: Path, core: PairConfig, membership: MembershipConfig, *, setting: str) -> TurnRecorder:
    """Raises ConfigError naming `setting` when the file cannot be made."""
    began = PairBegan(core=core, membership=membership, version=__version__)
    return TurnRecorder(Recorder(directory, core.name, core.incarnation, began, setting=setting))
