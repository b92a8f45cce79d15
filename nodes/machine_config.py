"""From settings to what a node's machines are made of."""

from __future__ import annotations

from pdbus import __version__
from pdbus.bus.members import MembershipConfig
from pdbus.bus.messages import Hello
from pdbus.connector.handoff import HandoffConfig
from pdbus.connector.layout import node_block_bytes

from .config import NodeConfig
from .core import CoreConfig
from .scheduler import Limits
from .setup import Setup


def core_config(c: NodeConfig, s: Setup, incarnation: bytes) -> CoreConfig:
    block_bytes = node_block_bytes(s.geometry)
    return CoreConfig(
        name=c.name,
        incarnation=incarnation,
        decodes=c.role != "prefill",
        blocks=s.blocks,
        block_size=s.geometry.block_size,
        block_bytes=block_bytes,
        max_model_len=s.max_model_len,
        limits=Limits(max_batch_tokens=c.max_batch_tokens, prefill_chunk=c.prefill_chunk),
        running_max=c.max_running,
        skip_sampling=c.skip_sampling and c.role == "prefill",
        prefill_policy=c.prefill_policy,
        handoff=HandoffConfig(
            lease_ns=c.lease_ns,
            renew_ns=c.renew_ns,
            claim_ns=c.claim_ns,
            block_bytes=block_bytes,
            staged=c.kv_buffer_device == "cpu",
            digest_layers=s.geometry.layers if c.kv_digest == "on" else 0,
        ),
    )


def membership_config(
    c: NodeConfig, s: Setup, incarnation: bytes, *, address: str, http: str, events: str
) -> MembershipConfig:
    hello = Hello(
        role=c.role,
        address=address,
        http=http,
        events=events,
        version=__version__,
        epoch=1,
        geometry=s.geometry,
        fingerprint=s.fingerprint,
        model=s.model,
        max_model_len=s.max_model_len,
        deterministic=c.deterministic,
    )
    return MembershipConfig(name=c.name, incarnation=incarnation, hello=hello)
