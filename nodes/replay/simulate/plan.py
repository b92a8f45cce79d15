"""What is simulated: how many nodes with which settings, on what profile, and what goes wrong when."""

from __future__ import annotations

from typing import NamedTuple

from pdbus.connector.handoff import HandoffConfig

from .faults import Fault
from .profile import Profile

REACH = 32  # prefill nodes that a decode node asks: more add links, not choice



class Plan(NamedTuple):
    """The settings in the place of a node's options."""

    profile: Profile
    prefill: int
    decode: int
    block_size: int
    prefill_blocks: int
    decode_blocks: int
    prefill_chunk: int
    max_batch_tokens: int
    max_running: int
    skip_sampling: bool = False
    handoff: HandoffConfig = HandoffConfig()
    policy: str = "least-loaded"  # which decode node a request is sent to
    reach: int = REACH
    deadline_ns: int = 300_000_000_000  # of a request
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def max_model_len(self) -> int:
        return self.profile.max_model_len

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.profile.kv_bytes_per_token


def plan_of(profile: Profile, prefill: int, decode: int, block_size: int = 0) -> Plan:
    """The profile's own settings. `block_size` 0: the profile's."""
    size = block_size or profile.block_size
    return Plan(
        profile=profile,
        prefill=prefill,
        decode=decode,
        block_size=size,
        prefill_blocks=max(1, profile.prefill_kv_tokens // size),
        decode_blocks=max(1, profile.decode_kv_tokens // size),
        prefill_chunk=profile.prefill_chunk,
        max_batch_tokens=profile.max_batch_tokens,
        max_running=min(profile.max_running, profile.max_batch_tokens),
        skip_sampling=profile.skip_sampling,
    )
