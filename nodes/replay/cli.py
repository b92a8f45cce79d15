"""`pd-replay ...`: what each command takes; the modules beside this one do it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from pdbus.bus.errors import ConfigError
from pdbus.bus.keyring import client_keyring

from ..options import AsJson, Keys, group
from ..values import addresses, duration

FACTOR_MAX = 1e6  # of speed and tokens: more is a slip of the finger
LINK_MIN, LINK_MAX = 1e-4, 1e5  # GB/s: a modem's, and more than any machine's memory has

replay = group("Look into recordings, replay workloads, explore what could happen.")


@replay.callback()
def _replay() -> None:
    """Look into recordings, replay workloads, explore what could happen."""


@replay.command()
def show(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            help="Its id (as HTTP shows it, too) or how that begins, or the client's id; with an option not needed: "
            "DIR may stand here.",
        ),
    ],
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="Folders of --record.")] = None,
    *,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the timeline of all.")] = None,
    lease: Annotated[str, typer.Option(metavar="[NODE/[EPOCH/]]N", help="Show the history of this lease.")] = "",
    block: Annotated[str, typer.Option(metavar="[NODE/]N", help="Show the history of this KV block.")] = "",
) -> None:
    """Show what happened to one request, lease or block, on all nodes; or everything, on a page."""
    from .show import show_all, show_history, show_request
    from .tell import named_block, named_lease

    paths = list(folders or [])
    if (html or lease or block) and Path(request).exists():
        request, paths = "", [Path(request), *paths]
    paths = paths or [Path()]
    if lease or block:
        raise typer.Exit(show_history(paths, named_lease(lease), named_block(block)))
    if html is not None and not request:
        raise typer.Exit(show_all(paths, html))
    if Path(request).is_dir():
        raise ConfigError("REQUEST", f"{request} is a folder: say which request, or give --html, --lease or --block")
    raise typer.Exit(show_request(_request_id(request), paths, html))


@replay.command()
def verify(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="Folders of --record.")] = None,
    *,
    lease: Annotated[str, typer.Option(metavar="[NODE/[EPOCH/]]N", help="Show the history of this lease.")] = "",
    request: Annotated[str, typer.Option(metavar="HEX", help="Show the history of this request.")] = "",
    block: Annotated[str, typer.Option(metavar="[NODE/]N", help="Show the history of this KV block.")] = "",
) -> None:
    """Run every node's decisions again and check the whole cluster. Exit status 1: something is wrong, or what is to
    be shown is not there."""
    from .tell import named_block, named_lease
    from .verify import verify

    code = verify(
        folders or [Path()],
        lease=named_lease(lease),
        request=_request_id(request),
        block=named_block(block),
    )
    raise typer.Exit(code)


@replay.command()
def explore(
    *,
    prefill: Annotated[int, typer.Option(min=1, max=3, metavar="N", help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=2, metavar="N", help="Decode nodes.")] = 1,
    requests: Annotated[int, typer.Option(min=1, max=3, metavar="N", help="Requests.")] = 1,
    blocks: Annotated[int, typer.Option(min=1, max=4, metavar="N", help="KV blocks of a prompt, a chunk each.")] = 1,
    faults: Annotated[int, typer.Option(min=0, max=9, metavar="N", help="At most so many things go wrong.")] = 1,
    kinds: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Which: drop, duplicate, expiry, read, step, crash, restart, worker, mover.",
            show_default="all",
        ),
    ] = "",
    cancel: Annotated[bool, typer.Option(help="The first request may be cancelled at any moment.")] = True,
    staged: Annotated[bool, typer.Option("--staged", help="Nodes with --kv-buffer-device cpu.")] = False,
    runs: Annotated[int, typer.Option(min=0, metavar="N", help="Random runs instead of every state.")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first random run.")] = 1,
    states_max: Annotated[int, typer.Option(min=1, metavar="N", help="Stop after so many states.")] = 20_000_000,
    record: Annotated[Path, typer.Option(metavar="DIR", help="Where a violation is recorded.")] = Path("explored"),
) -> None:
    """Go through every order of events of a few nodes and requests. Exit status 1: a rule was broken."""
    from .explore.command import Extent, run_explore
    from .explore.scenario import Scenario, kinds_of

    scenario = Scenario(prefill, decode, requests, blocks, faults, kinds_of(kinds), cancel, staged=staged)
    raise typer.Exit(run_explore(scenario, Extent(states_max, runs, seed), record))


Source = Annotated[
    Path,
    typer.Argument(
        metavar="WORKLOAD",
        help="A trace of Mooncake or Azure, agent sessions of Weka, or a folder of --record; packed with gzip or not.",
    ),
]
Format = Annotated[
    str,
    typer.Option("--format", metavar="NAME", help="mooncake, azure, weka or recording; auto tells by what is in it."),
]


@replay.command()
def load(
    workload: Source,
    *,
    to: Annotated[str, typer.Option(metavar="ADDRESS[,ADDRESS...]", help="Bus addresses of decode nodes.")],
    speed: Annotated[float, typer.Option(metavar="X", help="So many times as fast.")] = 1.0,
    scale_tokens: Annotated[float, typer.Option(metavar="X", help="So many times the tokens.")] = 1.0,
    dequantise: Annotated[
        bool, typer.Option("--dequantise", help="Spread requests that stand on coarse ticks over the tick.")
    ] = False,
    max_requests: Annotated[int, typer.Option(min=0, metavar="N", help="Only the first N; 0: all.")] = 0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of prompts and spread ticks: another one asks what no node has cached.")
    ] = 0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report as one page.")] = None,
    format: Format = "auto",
    keys: Keys = "",
    as_json: AsJson = False,
) -> None:
    """Play a workload against live nodes. Exit status 1: no request completed."""
    from .load import Report, Shape, run_load

    shape = Shape(dequantise, max_requests, _factor("--speed", speed), _factor("--scale-tokens", scale_tokens), seed)
    ring = client_keyring(keys, setting="--keys") if keys else None
    raise typer.Exit(run_load(workload, _addresses(to), shape, Report(as_json, html), _format(format), ring))


@replay.command()
def export(
    workload: Source,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; packed if its name ends in .gz.")],
    *,
    format: Format = "auto",
) -> None:
    """Write a workload or a recording as a Mooncake trace."""
    from .load import run_export

    raise typer.Exit(run_export(workload, file, _format(format)))


@replay.command()
def simulate(
    *,
    workload: Annotated[Path, typer.Option(metavar="WORKLOAD", help="As for load.")],
    prefill: Annotated[
        int | None, typer.Option(metavar="N", help="Prefill nodes; without it as recorded, else 1.", show_default=False)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(metavar="M", help="Decode nodes; without it as recorded, else 1.", show_default=False)
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="FILE|NAME", help="What steps and reads take: pd bench profile measures it.")
    ] = "",
    search: Annotated[
        bool, typer.Option("--search", help="Find the cheapest cluster, of at most N and M nodes, that meets --target.")
    ] = False,
    target: Annotated[
        list[str] | None, typer.Option(metavar="TARGET", help="As ttft.p90=2s or itl.p99=50ms; repeat it.")
    ] = None,
    decode_cost: Annotated[float, typer.Option(metavar="X", help="Of a decode node, in prefill nodes.")] = 1.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="KIND:NODE@TIME, as kill:p0@12.5s or drop:p0-d3@10s+5s=0.1; repeat it."),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Who is asked: least-loaded (the default), round-robin or prefix.")
    ] = "",
    reach: Annotated[int, typer.Option(metavar="N", min=0, help="Prefill nodes a decode node knows; 0: all.")] = 32,
    prefill_chunk: Annotated[
        str, typer.Option(metavar="TOKENS", help="Of one prompt in one step; for a search several: 512,2048.")
    ] = "",
    max_batch_tokens: Annotated[int, typer.Option(metavar="TOKENS", min=0, help="In one step; 0: the profile's.")] = 0,
    max_running: Annotated[int, typer.Option(metavar="N", min=0, help="Sequences in one step; 0: the profile's.")] = 0,
    skip_sampling: Annotated[bool, typer.Option("--skip-sampling", help="Prefill nodes sample nothing.")] = False,
    prefill_policy: Annotated[
        str, typer.Option(metavar="WHERE", help="As a node's: remote (the default), auto or local.")
    ] = "",
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, help="Of a KV block; 0: the workload's, or 512.")
    ] = 0,
    kv_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, help="That a node's KV memory holds; 0: the profile's.")
    ] = 0,
    link: Annotated[float, typer.Option(metavar="GB/S", help="Bandwidth of a node's link; 0: the profile's.")] = 0.0,
    lease: Annotated[str, typer.Option(metavar="TIME", help="As a node's: 30s.")] = "",
    renew: Annotated[str, typer.Option(metavar="TIME", help="As a node's: 5s.")] = "",
    claim: Annotated[str, typer.Option(metavar="TIME", help="As a node's: 2s.")] = "",
    speed: Annotated[float, typer.Option(metavar="X", help="So many times as fast.")] = 1.0,
    scale_tokens: Annotated[float, typer.Option(metavar="X", help="So many times the tokens.")] = 1.0,
    dequantise: Annotated[
        bool, typer.Option("--dequantise", help="Spread requests that stand on coarse ticks over the tick.")
    ] = False,
    max_requests: Annotated[int, typer.Option(min=0, metavar="N", help="Only the first N; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of chances, and of spread ticks.")] = 0,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record the simulated nodes, for show and verify.")
    ] = None,
    format: Format = "auto",
    as_json: AsJson = False,
) -> None:
    """Play a workload, or what was recorded, on a simulated cluster. Exit status 1: no request completed, or no cluster
    meets the targets."""
    from .load import Shape
    from .simulate.command import Report, Wanted, chunks_of, run_search, run_simulate
    from .simulate.faults import parse_fault
    from .simulate.plan import Options
    from .simulate.search import parse_target

    shape = Shape(dequantise, max_requests, _factor("--speed", speed), _factor("--scale-tokens", scale_tokens), seed)
    chunks = chunks_of(prefill_chunk)
    options = Options(
        prefill=prefill,
        decode=decode,
        block_size=block_size,
        kv_tokens=kv_tokens,
        prefill_chunk=0 if search or not chunks else chunks[0],
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        skip_sampling=skip_sampling,
        prefill_policy=prefill_policy,
        link_gb_per_s=_link(link),
        lease_ns=_duration("--lease", lease),
        renew_ns=_duration("--renew", renew),
        claim_ns=_duration("--claim", claim),
        policy=policy,
        reach=reach,
        faults=tuple(parse_fault(text) for text in fault or ()),
        seed=seed,
    )
    wanted = Wanted(tuple(parse_target(text) for text in target or ()), chunks, _factor("--decode-cost", decode_cost))
    if search and record is not None:
        raise ConfigError("--record", "is for one simulation: leave out --search")
    if search and not wanted.targets:
        raise ConfigError("--search", "says nothing to be met: give --target, as ttft.p90=2s")
    if not search and (wanted.targets or len(chunks) > 1):
        raise ConfigError("--target" if wanted.targets else "--prefill-chunk", "is for a search: add --search")
    if search:
        raise typer.Exit(run_search(workload, shape, profile, options, wanted, as_json=as_json, format=_format(format)))
    raise typer.Exit(run_simulate(workload, shape, profile, options, Report(as_json, record), _format(format)))


def _duration(option: str, text: str) -> int:
    """In ns; 0 for ''."""
    try:
        return duration(10**7, 3600 * 10**9)(text) if text else 0
    except ValueError as e:
        raise ConfigError(option, str(e)) from None


def _addresses(text: str) -> tuple[str, ...]:
    try:
        given = addresses(text)
    except ValueError as e:
        raise ConfigError("--to", str(e)) from None
    if not given:
        raise ConfigError("--to", "names no node; give tcp://HOST:PORT of decode nodes")
    return given


def _factor(option: str, value: float) -> float:
    if not 0 < value <= FACTOR_MAX:
        raise ConfigError(option, f"{value:g} will not do; give a number above 0, at most {FACTOR_MAX:g}")
    return value


def _link(value: float) -> float:
    if value and not LINK_MIN <= value <= LINK_MAX:
        raise ConfigError("--link", f"{value:g} will not do; give GB/s from {LINK_MIN:g} to {LINK_MAX:g}, or 0")
    return value


def _format(name: str) -> str:
    from .importers import AUTO, FORMATS

    if name not in (AUTO, *FORMATS):
        raise ConfigError("--format", f"{name!r} is not known; give {', '.join((AUTO, *FORMATS))}")
    return name


def _request_id(text: str) -> str:
    """Without what HTTP puts before it."""
    return re.sub("^(chat)?cmpl-", "", text)
