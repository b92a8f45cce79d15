"""The command line: `pd`, and `pd-node` and `pd-replay` for two of its groups.

Nothing heavy is imported before a command needs it: `--help` and `pd status` know neither torch nor uvicorn.
Whatever is wrong with what the user gave is one line on standard error and exit status 2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pdbus.bus.errors import ConfigError, PdError, RequestError
from pdbus.bus.ports import parse_address

from .config import SETTINGS, load
from .options import AsJson, ConfigFile, takes_settings

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or the copy of click inside typer

NODE_ADDRESS = "tcp://127.0.0.1:7400"


def _address(text: str | list[str]) -> str | list[str]:
    for address in [text] if isinstance(text, str) else text:
        parse_address(address, "ADDRESS")
    return text


Address = Annotated[
    str,
    typer.Argument(metavar="ADDRESS", help="Bus address of a node.", envvar="PD_ADDRESS", callback=_address),
]


def _app(help: str) -> typer.Typer:
    return typer.Typer(help=help, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


app = _app("Prefill and decode of a language model on separate nodes, joined by a ZeroMQ bus.")
bench = _app("Measure: bytes, messages, requests.")
replay = _app("Look into recordings.")
node_app = _app("One node.")
app.add_typer(bench, name="bench")
app.add_typer(replay, name="replay")


@replay.callback()
def _replay() -> None:
    """Look into recordings."""


@node_app.command(no_args_is_help=False)
@app.command("node")
@takes_settings()
def node(*, config: ConfigFile = None, settings: dict[str, str]) -> None:
    """Run one node.

    Every option is also a variable (--kv-blocks is PD_KV_BLOCKS) and a key (kv_blocks) in the file of --config; an
    option wins over a variable, a variable over the file.
    """
    chosen = load(settings, os.environ, file=config)
    from .control import run_node

    try:
        raise typer.Exit(run_node(chosen))
    except ConfigError as e:
        raise chosen.as_written(e) from None


DECIDED_BY_UP = ("role", "name", "listen", "advertise", "events", "join", "http_port", "insecure", "cpus")


@app.command()
@takes_settings([setting for setting in SETTINGS if setting.name not in DECIDED_BY_UP])
def up(
    *,
    prefill: Annotated[int, typer.Option(min=0, max=64, metavar="N", help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(min=0, max=64, metavar="M", help="Decode nodes.")] = 1,
    both: Annotated[int, typer.Option(min=0, max=64, metavar="N", help="Nodes that do both.")] = 0,
    http_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of the first node; the next free ones after it.")
    ] = 8080,
    config: ConfigFile = None,
    settings: dict[str, str],
) -> None:
    """Run a cluster on this machine until Ctrl-C."""
    from .up import run_up

    raise typer.Exit(run_up(prefill, decode, both, http_port=http_port, settings=settings, config=config))


@app.command()
def status(
    address: Address = NODE_ADDRESS,
    *,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Every block and lease; exit status 1 if any is left over.")
    ] = False,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second until Ctrl-C.")] = False,
) -> None:
    """Show a node: links, leases, blocks, requests."""
    from .status_view import show_status

    raise typer.Exit(show_status(address, ledger=ledger, as_json=as_json, watch=watch))


@app.command()
def connect(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Bus address of the node that is to join.", callback=_address)
    ],
    members: Annotated[
        list[str], typer.Argument(metavar="MEMBER...", help="Bus addresses that it is to join.", callback=_address)
    ],
) -> None:
    """Make a node join others."""
    from .status_view import connect_nodes

    raise typer.Exit(connect_nodes(node, members))


@app.command()
def drain(address: Address) -> None:
    """Stop a node from admitting requests; it ends when its leases have."""
    from .status_view import drain_node

    raise typer.Exit(drain_node(address))


@app.command()
def demo() -> None:
    """Prefill here, decode there, and compare with one node doing both."""
    from .demo import run_demo

    raise typer.Exit(run_demo())


@bench.command()
def transfer(
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="Bytes of a read.")] = "1MiB,8MiB,32MiB",
    repeat: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Reads of each size.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Reads between two processes, beside one raw NIXL read and memcpy of the same bytes."""
    from .values import size

    try:
        parsed = [size(1)(part) for part in sizes.split(",")]
    except ValueError as e:
        raise ConfigError("--sizes", str(e)) from None
    _bench("transfer", as_json, sizes_bytes=parsed, rounds=repeat)


@bench.command("bus")
def bench_bus(
    messages: Annotated[int, typer.Option(min=1, max=10_000_000, metavar="N", help="Round trips.")] = 2000,
    as_json: AsJson = False,
) -> None:
    """Round trips between two processes, beside bare pyzmq carrying the same bytes."""
    _bench("bus", as_json, messages=messages)


@bench.command()
def serve(
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="Tokens of a prompt.")] = 512,
    requests: Annotated[int, typer.Option(min=1, max=100_000, metavar="K", help="Requests, one after the other.")] = 20,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Instead of a random Llama of 58M parameters.")] = "",
    as_json: AsJson = False,
) -> None:
    """Requests through a prefill and a decode node, beside one node doing both."""
    _bench("serve", as_json, prompt_tokens=prompt_tokens, requests=requests, model=model)


@bench.command()
def plan(as_json: AsJson = False) -> None:
    """What it costs to plan reads between unlike KV layouts, and to apply a plan to 1,000 and 4,000 blocks."""
    _bench("plan", as_json)


@bench.command("engine")
def bench_engine(
    rounds: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Passes of each kind.")] = 9,
    chunk: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="TOKENS", help="Of a prompt in one step.")] = 256,
    model: Annotated[str, typer.Option(metavar="MODEL", help="Instead of a random Llama of 58M parameters.")] = "",
    as_json: AsJson = False,
) -> None:
    """Forward passes in float32 and fp16 weights, beside bare linears of the same shapes."""
    _bench("engine", as_json, rounds=rounds, chunk=chunk, model=model)


def _bench(name: str, as_json: bool, **options: Any) -> None:
    """`pdbus.nodes.bench.<name>.run(**options) -> dict` measures; this shows it."""
    import importlib

    result = importlib.import_module(f"pdbus.nodes.bench.{name}").run(**options)
    from .tables import print_json, print_result

    print_json(result) if as_json else print_result(f"pd bench {name}", result)


@replay.command()
def show(
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="Its id (as HTTP shows it, too) or how that begins, or the client's id."
        ),
    ],
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="Folders of --record.")] = None,
) -> None:
    """Show what happened to one request, on all nodes."""
    from .replay.show import show_request

    raise typer.Exit(show_request(_request_id(request), folders or [Path()]))


@replay.command()
def verify(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="Folders of --record.")] = None,
    *,
    lease: Annotated[str, typer.Option(metavar="[NODE/]N", help="Show the history of this lease.")] = "",
    request: Annotated[str, typer.Option(metavar="HEX", help="Show the history of this request.")] = "",
    block: Annotated[str, typer.Option(metavar="[NODE/]N", help="Show the history of this KV block.")] = "",
) -> None:
    """Run every node's decisions again and check the whole cluster. Exit status 1: something is wrong."""
    from .replay.verify import named, verify

    code = verify(
        folders or [Path()],
        lease=named("--lease", lease),
        request=_request_id(request),
        block=named("--block", block),
    )
    raise typer.Exit(code)


def _request_id(text: str) -> str:
    """Without what HTTP puts before it."""
    return re.sub("^(chat)?cmpl-", "", text)


def main() -> None:
    """`pd`."""
    _run(app, "pd")


def node_main() -> None:
    """`pd-node`."""
    _run(node_app, "pd-node")


def replay_main() -> None:
    """`pd-replay`."""
    _run(replay, "pd-replay")


def _run(chosen: typer.Typer, program: str) -> None:
    command: Callable[..., Any] = typer.main.get_command(chosen).main
    try:
        code = command(prog_name=program, standalone_mode=False)
    except (UsageError, ConfigError, RequestError) as e:
        code = _complain(program, e, EXIT_BAD_INPUT)
    except PdError as e:
        code = _complain(program, e, EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _complain(program: str, error: Exception, code: int) -> int:
    message = error.format_message() if isinstance(error, UsageError) else str(error)  # type: ignore[attr-defined]
    if message:  # none after a group's help
        print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return code
