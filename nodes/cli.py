"""The command line: `pd`, and `pd-node` and `pd-replay` for two of its groups.

Nothing heavy is imported before a command needs it: `--help` and `pd status` know neither torch nor uvicorn.
Whatever is wrong with what the user gave is one line on standard error and exit status 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from pdbus import __version__
from pdbus.bus.errors import ConfigError, PdError, RequestError
from pdbus.bus.ports import parse_address

from .bench.cli import bench
from .config import EMPTY, SETTINGS, load, refuse_slips
from .extras import EXTRAS, lacks
from .gateway.routing import DEFAULT_POLICY
from .keys_cli import keys
from .options import AsJson, ConfigFile, Keys, group, takes_settings
from .printable import printable
from .replay.cli import replay

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or the copy of click inside typer

NODE_ADDRESS = "tcp://127.0.0.1:7400"
GATEWAY_HTTP = "127.0.0.1:8000"


def _address(context: typer.Context, parameter: typer.CallbackParam, text: str | list[str]) -> str | list[str]:
    source = context.get_parameter_source(parameter.name or "")
    said = "PD_ADDRESS" if source and source.name == "ENVIRONMENT" else str(parameter.metavar).rstrip(".")
    for address in [text] if isinstance(text, str) else text:
        parse_address(address, said)
    return text


Address = Annotated[
    str,
    typer.Argument(metavar="ADDRESS", help="Bus address of a node.", envvar="PD_ADDRESS", callback=_address),
]


app = group("Prefill and decode of a language model on separate nodes, joined by a ZeroMQ bus.")
node_app = group("One node.")
app.add_typer(bench, name="bench")
app.add_typer(replay, name="replay")
app.add_typer(keys, name="keys")


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


DECIDED_BY_UP = ("role", "name", "listen", "advertise", "events", "join", "http_port", "keys", "insecure", "cpus")


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
    gateway_port: Annotated[
        int | None,
        typer.Option("--gateway", min=1, max=65535, metavar="PORT", help="A gateway before all, at this port."),
    ] = None,
    config: ConfigFile = None,
    settings: dict[str, str],
) -> None:
    """Run a cluster on this machine until Ctrl-C."""
    from .up import run_up

    raise typer.Exit(
        run_up(prefill, decode, both, http_port=http_port, gateway_port=gateway_port, settings=settings, config=config)
    )


@app.command()
def gateway(
    context: typer.Context,
    *,
    join: Annotated[
        list[str], typer.Option(metavar="ADDRESS,...", help="Bus addresses of nodes; these lead to all others.")
    ] = [],  # noqa: B006
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to serve the OpenAI API.")] = GATEWAY_HTTP,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="How a node is chosen: round-robin, least-loaded, prefix, cost.")
    ] = DEFAULT_POLICY,
    queue: Annotated[
        int, typer.Option(min=0, max=65536, metavar="N", help="Requests that wait here while all nodes are full.")
    ] = 256,
    decoder_host: Annotated[
        list[str], typer.Option(metavar="HOST,...", help="Decode nodes by host and port instead of --join.")
    ] = [],  # noqa: B006
    decoder_port: Annotated[list[str], typer.Option(metavar="PORT,...", help="Their HTTP or bus ports.")] = [],  # noqa: B006
    prefiller_host: Annotated[
        list[str], typer.Option(metavar="HOST,...", help="Prefill nodes that the decode nodes are to join.")
    ] = [],  # noqa: B006
    prefiller_port: Annotated[list[str], typer.Option(metavar="PORT,...", help="Their HTTP or bus ports.")] = [],  # noqa: B006
    vllm: Annotated[
        bool, typer.Option("--vllm", help="These hosts and ports are vLLM servers' (docs/vllm.md).")
    ] = False,
    prefiller_name: Annotated[
        list[str], typer.Option(metavar="NAME,...", help="Several vLLM prefill servers by their connectors' names.")
    ] = [],  # noqa: B006
    name: Annotated[str, typer.Option(metavar="NAME", help="In logs and recordings.")] = "",
    record: Annotated[str, typer.Option(metavar="DIR", help="Record messages and choices into this folder.")] = "",
    record_tokens: Annotated[
        bool, typer.Option("--record-tokens/--no-record-tokens", help="Prompts and answers as well.")
    ] = False,
    log_format: Annotated[
        str, typer.Option(metavar="FORM", help="Of the log on standard error: text, or json: an object a line.")
    ] = "text",
    keys: Keys = "",
    http_keys: Annotated[
        str, typer.Option(metavar="FILE", help="File of bearer keys, a line NAME KEY each.", envvar="PD_HTTP_KEYS")
    ] = "",
    http_tls_cert: Annotated[
        str, typer.Option(metavar="FILE", help="Certificate in PEM form: HTTPS.", envvar="PD_HTTP_TLS_CERT")
    ] = "",
    http_tls_key: Annotated[str, typer.Option(metavar="FILE", help="Its private key.", envvar="PD_HTTP_TLS_KEY")] = "",
    request_deadline: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long an answer may take, where the request does not say: 5m without.",
            envvar="PD_REQUEST_DEADLINE",
        ),
    ] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve HTTP to other machines without keys.")] = False,
) -> None:
    """Serve the OpenAI API in front of a whole cluster."""
    from .gateway.command import GatewayConfig, run_gateway
    from .gateway.endpoints import paired
    from .http.tls import Tls

    config = GatewayConfig(
        join=_parts(join),
        vllm=vllm,
        prefiller_names=_parts(prefiller_name),
        decoders=paired(decoder_host, decoder_port, "--decoder-host", "--decoder-port"),
        prefillers=paired(prefiller_host, prefiller_port, "--prefiller-host", "--prefiller-port"),
        http=http,
        asked=frozenset(name for name in context.params if _given(context, name)),
        keys=keys,
        http_keys=http_keys,
        tls=Tls(http_tls_cert, http_tls_key),
        insecure=insecure,
        policy=policy,
        queue=queue,
        name=name,
        record=record,
        record_tokens=record_tokens,
        log_format=log_format,
        request_deadline=request_deadline,
    )
    raise typer.Exit(run_gateway(config))


def _given(context: typer.Context, name: str) -> bool:
    """Whether the user gave it: a default may be overruled where a wish is refused."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _parts(texts: list[str]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


@app.command()
def status(
    address: Address = NODE_ADDRESS,
    *,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Every block and lease; exit status 1 if any is left over.")
    ] = False,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second until Ctrl-C.")] = False,
    keys: Keys = "",
) -> None:
    """Show a node: links, leases, blocks, requests."""
    from .status_view import show_status

    raise typer.Exit(show_status(address, ledger=ledger, as_json=as_json, watch=watch, keys=keys))


@app.command()
def connect(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Bus address of the node that is to join.", callback=_address)
    ],
    members: Annotated[
        list[str], typer.Argument(metavar="MEMBER...", help="Bus addresses that it is to join.", callback=_address)
    ],
    *,
    keys: Keys = "",
) -> None:
    """Make a node join others."""
    from .status_view import connect_nodes

    raise typer.Exit(connect_nodes(node, members, keys))


@app.command()
def disconnect(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Bus address of the node that is to part.", callback=_address)
    ],
    members: Annotated[
        list[str], typer.Argument(metavar="MEMBER...", help="Names or bus addresses that it is to part from.")
    ],
    *,
    keys: Keys = "",
) -> None:
    """Make a node part from others, each after its last lease, until it is made to join them again."""
    from .status_view import disconnect_nodes

    raise typer.Exit(disconnect_nodes(node, members, keys))


@app.command()
def drain(address: Address, *, keys: Keys = "") -> None:
    """Stop a node from admitting requests; it ends when its leases have."""
    from .status_view import drain_node

    raise typer.Exit(drain_node(address, keys))


@app.command("eval")
@takes_settings([setting for setting in SETTINGS if setting.name not in DECIDED_BY_UP])
def evaluate(
    address: Annotated[
        str, typer.Argument(metavar="[ADDRESS]", help="Bus address of a node; else nodes are started.")
    ] = "",
    *,
    prefill: Annotated[
        int | None, typer.Option(min=0, max=64, metavar="N", help="Prefill nodes to start before the decode node.")
    ] = None,
    as_json: AsJson = False,
    keys: Keys = "",
    settings: dict[str, str],
) -> None:
    """What a model knows: 35 capitals, and the perplexity of two texts and of questions of GSM8K."""
    from .evaluation.command import run_eval

    raise typer.Exit(run_eval(address, prefill, settings, keys, as_json=as_json))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Look at this machine: libraries, limits, transports, and one real read. Exit status 1: a node cannot work."""
    from .doctor.examine import examine

    raise typer.Exit(examine(as_json=as_json))


@app.command()
def demo() -> None:
    """Prefill here, decode there, and compare with one node doing both."""
    from .demo import run_demo

    raise typer.Exit(run_demo())


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
    if sys.argv[1:] == ["--version"]:
        print(f"{program} {__version__}")
        return
    command: Callable[..., Any] = typer.main.get_command(chosen).main
    try:
        if "--help" not in sys.argv:  # which may be what helps
            refuse_slips(os.environ)
            _refuse_empty(sys.argv[1:])
        code = command(prog_name=program, standalone_mode=False)
    except (UsageError, ConfigError, RequestError) as e:
        code = _complain(program, e, EXIT_BAD_INPUT)
    except PdError as e:
        code = _complain(program, e, EXIT_FAILED)
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        code = _complain(program, ConfigError("this", lacks(package)), EXIT_BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Nothing here means something when it is empty: a shell's variable was, as in --record "$DIR". Raises
    ConfigError."""
    for before, argument in pairwise(("", *arguments)):
        option, equals, value = argument.partition("=")
        if not argument.strip(" ,"):
            raise ConfigError(before if before.startswith("-") else "an argument", EMPTY)
        if option.startswith("--") and equals and not value.strip(" ,"):
            raise ConfigError(option, EMPTY)


def _complain(program: str, error: Exception, code: int) -> int:
    message = error.format_message() if isinstance(error, UsageError) else str(error)  # type: ignore[attr-defined]
    if message:  # none after a group's help
        print(f"{program}: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
