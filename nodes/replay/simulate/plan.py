"""What is simulated: how many nodes with which settings, on what profile, and what goes wrong when."""

from __future__ import annotations

from typing import NamedTuple

from pdbus.bus.errors import ConfigError
from pdbus.connector.handoff import HandoffConfig

from ...placing import POLICIES
from ..workload import Workload
from .faults import Fault, check_nodes
from .profile import Profile

BLOCK_TOKENS = 512  # where a workload names no block size; a large one costs less to simulate
POLICY = "least-loaded"
REACH = 32  # prefill nodes that a decode node knows: more add links, not choice
DEADLINE_NS = 300_000_000_000
NODES_MAX = 10_000  # of a kind: some minutes only until they know each other
PEERS_MAX = 1024  # that a node knows (bus/members.py)


class Options(NamedTuple):
    """As the user gave them. None, 0 and '': what the recording, the profile or the workload says."""

    prefill: int | None = None
    decode: int | None = None
    block_size: int = 0
    kv_tokens: int = 0
    prefill_chunk: int = 0
    max_batch_tokens: int = 0
    max_running: int = 0
    skip_sampling: bool = False
    link_gb_per_s: float = 0.0
    prefill_policy: str = ""
    lease_ns: int = 0
    renew_ns: int = 0
    claim_ns: int = 0
    policy: str = ""
    sent_to: tuple[int, ...] = ()
    reach: int = REACH
    faults: tuple[Fault, ...] = ()
    seed: int = 0


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
    skip_sampling: bool
    handoff: HandoffConfig
    link_gb_per_s: float  # of a node, to or from all others together
    policy: str  # which decode node a request is sent to
    sent_to: tuple[int, ...]  # its number by request, for those that there are; instead of a policy
    reach: int
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    prefill_policy: str = POLICIES[0]  # where decode nodes have prompts computed

    @property
    def max_model_len(self) -> int:
        return self.profile.max_model_len

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.profile.kv_bytes_per_token


def plan_of(options: Options, profile: Profile, workload: Workload) -> Plan:
    """Raises ConfigError naming the option that cannot work."""
    size = options.block_size or workload.block_tokens or BLOCK_TOKENS
    batch = options.max_batch_tokens or profile.max_batch_tokens
    plan = Plan(
        profile=profile,
        prefill=1 if options.prefill is None else options.prefill,
        decode=1 if options.decode is None else options.decode,
        block_size=size,
        prefill_blocks=(options.kv_tokens or profile.prefill_kv_tokens) // size,
        decode_blocks=(options.kv_tokens or profile.decode_kv_tokens) // size,
        prefill_chunk=options.prefill_chunk or min(profile.prefill_chunk, batch),
        max_batch_tokens=batch,
        max_running=options.max_running or min(profile.max_running, batch),
        skip_sampling=options.skip_sampling or profile.skip_sampling,
        handoff=_handoff(options, size * profile.kv_bytes_per_token),
        link_gb_per_s=options.link_gb_per_s or profile.link_gb_per_s,
        policy=options.policy or POLICY,
        sent_to=options.sent_to,
        reach=options.reach,
        faults=options.faults,
        seed=options.seed,
        prefill_policy=options.prefill_policy or POLICIES[0],
    )
    _check(plan)
    return plan


def _handoff(options: Options, block_bytes: int) -> HandoffConfig:
    """Renewal and claim follow the lease as in a node's settings."""
    default = HandoffConfig()
    lease_ns = options.lease_ns or default.lease_ns
    renew_ns = options.renew_ns or min(default.renew_ns, lease_ns // 6)
    claim_ns = options.claim_ns or min(default.claim_ns, lease_ns // 15)
    if lease_ns < 3 * (renew_ns + claim_ns):
        raise ConfigError(
            "--lease", f"is too short: three renewals and claims take {3 * (renew_ns + claim_ns) / 1e9:g}s"
        )
    return HandoffConfig(lease_ns=lease_ns, renew_ns=renew_ns, claim_ns=claim_ns, block_bytes=block_bytes)


def _check(plan: Plan) -> None:
    if plan.prefill_policy not in POLICIES:
        raise ConfigError("--prefill-policy", f"{plan.prefill_policy!r} is not known; give {', '.join(POLICIES)}")
    for option, count in (("--prefill", plan.prefill), ("--decode", plan.decode)):
        if not 1 <= count <= NODES_MAX:
            raise ConfigError(option, f"{count} nodes; give 1 to {NODES_MAX}")
    readers = -(-plan.decode * min(plan.reach or plan.prefill, plan.prefill) // plan.prefill)
    if readers > PEERS_MAX:
        problem = f"each prefill node would be known to {readers} decode nodes, and it takes {PEERS_MAX}: reach fewer"
        raise ConfigError("--reach", problem)
    for fault in plan.faults:
        check_nodes(fault, plan.prefill, plan.decode)
    for option, value in (("--prefill-chunk", plan.prefill_chunk), ("--max-running", plan.max_running)):
        if value > plan.max_batch_tokens:
            problem = f"{value} is more than a step holds: give at most --max-batch-tokens, {plan.max_batch_tokens}"
            raise ConfigError(option, problem)
    if min(plan.prefill_blocks, plan.decode_blocks) < 2:
        problem = f"the KV memory of a node holds fewer than two blocks of {plan.block_size} tokens: give smaller ones"
        raise ConfigError("--block-size", f"{problem}, or more --kv-tokens")
