"""Every setting of a node: one table, one frozen value, built once and passed in.

A setting is an option `--kv-blocks`, a variable `PD_KV_BLOCKS` and a key `kv_blocks` (or `kv-blocks`) in a TOML file,
at the top level or under `[node]`; the first of these that speaks wins. A ConfigError names the setting the way the
user wrote it. What needs the network (is the port free?) is not known here.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from pdbus.bus.errors import ConfigError
from pdbus.bus.generation import DEADLINE_MS
from pdbus.bus.recorder import TOTAL_BYTES_LEAST, TOTAL_BYTES_MAX
from pdbus.bus.wire import Declared

from . import values
from .config_checks import check, is_cpu
from .given import Chosen, Given, option
from .host import Host, this_host
from .limits import DEADLINE_MS_MAX
from .logs import FORMS
from .placing import POLICIES
from .values import DEMO_MODEL, split_address


class NodeConfig(Declared):
    """All that a node is told at its start. `*_asked`: the user chose it, so that a taken port is an error."""

    role: str  # prefill, decode, both
    name: str
    engine: str  # torch, coded
    model: str  # folder, .gguf file or the demo model's name; "coded" for the coded engine
    model_id: str  # "": taken from the weights

    listen: str
    listen_asked: bool
    advertise: str  # what others connect to; port 0 or a moved default port: control fills in
    advertise_asked: bool
    events: str  # PUB; the port after it is kept for a replay of events
    events_asked: bool
    join: tuple[str, ...]
    keys: str  # folder; "": no keys, everything in clear
    insecure: bool

    http_host: str
    http_port: int  # 0: no HTTP process
    http_port_asked: bool
    http_keys: str  # file; "": whoever reaches HTTP may use it
    http_tls_cert: str  # PEM files, both or neither; "": HTTP in clear
    http_tls_key: str
    request_deadline_ns: int  # of a request over HTTP that gives none

    device: str
    tp: int  # ranks, of each stage
    pp: int  # stages
    dtype: str
    weights: str  # auto, float32, fp16
    threads: int
    cpus: tuple[int, ...]  # (): all that the process may use
    deterministic: bool
    skip_sampling: bool
    speculate: int  # drafts a step, at most
    speculate_method: str  # ngram, mtp, draft
    draft_model: str  # folder, .gguf file or the demo model's name; "": none
    max_model_len: int  # tokens; 0: the model's own limit, or what the KV blocks hold

    kv_layout: str  # native, NHD, HND
    kv_buffer_device: str  # device, cpu
    block_size: int  # tokens
    kv_blocks: int  # 0: as many as kv_memory_bytes hold
    kv_memory_bytes: int

    max_running: int  # sequences in one step
    max_batch_tokens: int
    prefill_chunk: int  # tokens
    prefill_policy: str  # placing.POLICIES

    lease_ns: int
    renew_ns: int
    claim_ns: int
    kv_digest: str  # off, on

    coded_layers: int
    coded_kv_heads: int
    coded_head_dim: int
    coded_vocab: int
    coded_step_ms: float
    coded_token_us: float

    log_format: str  # logs.FORMS
    record: str  # folder; "": not recorded
    record_max: int  # bytes
    record_tokens: bool
    run_dir: str
    written: dict[str, str] = {}  # by option, how the user wrote it: PD_MODEL, model (node.toml)

    def as_written(self, error: ConfigError) -> ConfigError:
        """The error of a later check, which knows only the option, blaming what the user wrote."""
        return ConfigError(self.written.get(error.setting, error.setting), error.problem)


KINDS = get_type_hints(NodeConfig)
TOML_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false, without quotes"),
    str: ((str,), "text in quotes"),
    int: ((int, float, str), "a number, or text in quotes"),  # 2048, or "2GiB"
    float: ((int, float, str), "a number"),
    tuple: ((list, int, str), "a list, or text in quotes"),
}  # by the kind of a setting's value: what may say it in a file
EMPTY = "is empty: give a value, or leave it out"
Default = Callable[[Chosen, Host], Any]


@dataclass(frozen=True)
class Setting:
    """One setting. `default` is a value, or made from the settings above it and the host."""

    name: str  # as in a file: kv_blocks
    panel: str
    metavar: str
    parse: values.Parser
    default: Any | Default
    help: str
    shown_default: str | None = None
    field: str = ""  # of NodeConfig, where it is not the name

    @property
    def option(self) -> str:
        return option(self.name)

    @property
    def variable(self) -> str:
        return "PD_" + self.name.upper()

    @property
    def is_switch(self) -> bool:
        return self.parse is values.switch

    @property
    def is_list(self) -> bool:
        return self.parse is values.addresses

    @property
    def kind(self) -> type:
        """Of its value: bool, str, int, float or tuple."""
        hint: type = KINDS[self.field or self.name]
        return get_origin(hint) or hint


def _name(c: Chosen, host: Host) -> str:
    return f"{c['role']}-{host.name_suffix}"


def _model(c: Chosen, host: Host) -> str:
    return "coded" if c["engine"] == "coded" else ""


def _events(c: Chosen, host: Host) -> str:
    listen = split_address(c["listen"])
    return str(listen._replace(port=listen.port and min(listen.port + 1, 65535)))


_ADVERTISED = "tcp://HOST:PORT"
_U32 = (1 << 32) - 1  # block ids travel as u32
_LEASE_NS = 30 * 10**9

node_name = values.text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "up to 64 letters, digits, . _ -")
request_deadline = values.duration(10**6, DEADLINE_MS_MAX * 10**6)

SETTINGS: tuple[Setting, ...] = (
    Setting("role", "Node", "ROLE", values.choice("prefill", "decode", "both"), "both",
            "prefill, decode or both: what this node does."),
    Setting("name", "Node", "NAME", node_name, _name,
            "The node's name, unlike any other's.", "the role and four random hex digits"),
    Setting("run_dir", "Node", "DIR", str, lambda c, host: host.run_dir,
            "Where the node makes a private folder for its sockets.", "$XDG_RUNTIME_DIR or /tmp"),
    Setting("listen", "Bus", _ADVERTISED, values.address(free_port=True), "tcp://127.0.0.1:7400",
            "Where the bus binds. Port 0 takes any free one."),
    Setting("advertise", "Bus", _ADVERTISED, values.address(), lambda c, host: c["listen"],
            "The address that others connect to.", "what it listens on"),
    Setting("events", "Bus", _ADVERTISED, values.address(free_port=True), _events,
            "Where events are published; the port after it is kept free.", "the port after --listen"),
    Setting("join", "Bus", _ADVERTISED, values.addresses, (),
            "Bus address of any member of the cluster; repeat, or separate with commas."),
    Setting("keys", "Bus", "DIR", str, "",
            "Folder of keys (pd keys): only those on its list may connect, and all is encrypted.", "no keys"),
    Setting("insecure", "Bus", "", values.switch, False,
            "Allow other machines to connect although no keys are in use."),
    Setting("http_host", "HTTP", "HOST", values.text(r"[^\s/]+", "a host name or address"), "127.0.0.1",
            "Where HTTP binds."),
    Setting("http_port", "HTTP", "PORT", values.whole(0, 65535), 8080, "HTTP port; 0: no HTTP."),
    Setting("http_keys", "HTTP", "FILE", str, "",
            "File of bearer keys, a line NAME KEY each: HTTP serves only who sends one.", "no keys"),
    Setting("http_tls_cert", "HTTP", "FILE", str, "",
            "Certificate in PEM form, those that vouch for it after it: HTTP is then HTTPS alone.", "no TLS"),
    Setting("http_tls_key", "HTTP", "FILE", str, "", "Its private key, readable by nobody else.", "no TLS"),
    Setting("request_deadline", "HTTP", "TIME", request_deadline, DEADLINE_MS * 10**6,
            "How long an answer over HTTP may take, where the request does not say (deadline_ms).", "5m",
            "request_deadline_ns"),
    Setting("engine", "Model", "ENGINE", values.choice("torch", "coded"), "torch",
            "torch, or coded: made-up KV whose every byte can be checked."),
    Setting("model", "Model", "MODEL", str, _model,
            f"A Hugging Face folder, a GGUF file, or {DEMO_MODEL}."),
    Setting("model_id", "Model", "ID", str, "", "Names the weights instead of their fingerprint."),
    Setting("device", "Model", "DEVICE",
            values.text(r"cpu|fake|(cuda|xpu)(:\d+)?", "cpu, cuda, xpu, cuda:N, xpu:N or fake"), "cpu",
            "cpu, cuda, xpu, or one of several: cuda:1. fake: one that tries host staging."),
    Setting("tp", "Model", "N", values.whole(1, 128), 1,
            "Ranks of tensor parallelism: a worker and a mover for each."),
    Setting("pp", "Model", "N", values.whole(1, 128), 1,
            "Stages of a prefill node, of --tp ranks each: every stage holds a share of the layers."),
    Setting("dtype", "Model", "DTYPE", values.choice("float32", "bfloat16", "float16"),
            lambda c, host: "float32" if is_cpu(c) else "bfloat16",
            "Type of weights and KV: float32, bfloat16, float16.", "float32 on cpu, else bfloat16"),
    Setting("weights", "Model", "FORM", values.choice("auto", "float32", "fp16"), "auto",
            "How a CPU holds matrices: float32, or fp16 in half the memory, up to twice as fast. auto: fp16 where no "
            "weight changes by it."),
    Setting("max_model_len", "Model", "TOKENS", values.whole(1, 1 << 24), 0,
            "Most tokens of a prompt and its answer.", "the model's own limit, or what the KV blocks hold"),
    Setting("deterministic", "Model", "", values.switch, False,
            "A request's tokens do not depend on its neighbours: P and D equal one node bitwise."),
    Setting("skip_sampling", "Model", "", values.switch, False,
            "Prefill without sampler and output head; the decode node recomputes the last position."),
    Setting("speculate", "Model", "N", values.whole(0, 64), 0,
            "Draft up to N tokens a step, and keep those that are right. Tokens stay the same. 0: off."),
    Setting("speculate_method", "Model", "METHOD", values.choice("ngram", "mtp", "draft"), "ngram",
            "ngram: drafts are what followed in prompt and answer before; mtp: the one a step that the model's own "
            "draft layer expects; draft: what --draft-model expects. The last two on both nodes of a pair."),
    Setting("draft_model", "Model", "MODEL", str, "",
            "A small model with the same tokenizer, for --speculate-method draft.", "none"),
    Setting("kv_layout", "Memory", "ORDER", values.choice("native", "NHD", "HND"), "native",
            "How KV lies in memory. native: all of a block together; NHD, HND: by layers, tokens or heads first."),
    Setting("kv_buffer_device", "Memory", "WHERE", values.choice("device", "cpu"),
            lambda c, host: "device" if c["device"] == "cpu" else "cpu",
            "Where NIXL reads and writes KV. device: where it is computed; cpu: in a mirror in host memory, as large.",
            "device on cpu, else cpu"),
    Setting("block_size", "Memory", "TOKENS", values.power_of_two(1024), lambda c, host: 16 if is_cpu(c) else 64,
            "Tokens in a KV block; a power of two.", "16 on cpu, else 64"),
    Setting("kv_blocks", "Memory", "N", values.whole(2, _U32), 0, "KV blocks.", "what --kv-memory holds"),
    Setting("kv_memory", "Memory", "SIZE", values.size(1 << 16), lambda c, host: min(1 << 30, host.memory_bytes // 4),
            "Memory for KV blocks: 2GiB, 512MiB.", "1GiB, or a quarter of what is free", "kv_memory_bytes"),
    Setting("max_batch_tokens", "Scheduling", "TOKENS", values.whole(1, 1 << 20), 1024, "Most tokens in one step."),
    Setting("max_running", "Scheduling", "N", values.whole(1, 1 << 16), lambda c, host: min(64, c["max_batch_tokens"]),
            "Most sequences in one step.", "64"),
    Setting("prefill_chunk", "Scheduling", "TOKENS", values.whole(1, 1 << 20),
            lambda c, host: min(256, c["max_batch_tokens"]), "Most tokens of one prompt in one step.", "256"),
    Setting("prefill_policy", "Scheduling", "WHERE", values.choice(*POLICIES), POLICIES[0],
            "Where a decode node has prompts computed: remote, on prefill nodes; auto, where it is sooner; local."),
    Setting("cpus", "Scheduling", "LIST", values.cores, (), "Cores to use: 0,2-3.", "all"),
    Setting("threads", "Scheduling", "N", values.whole(1, 1024),
            lambda c, host: max(1, len(c["cpus"] or host.cpus) // (c["tp"] * c["pp"])), "Threads of a worker.",
            "one a core, shared by the ranks"),
    Setting("lease", "Hand-off", "TIME", values.duration(10**8, 3600 * 10**9), _LEASE_NS,
            "How long a prefill node keeps blocks that nobody renews.", "30s", "lease_ns"),
    Setting("renew", "Hand-off", "TIME", values.duration(10**7, 600 * 10**9),
            5 * 10**9, "How often a decode node renews.", "5s", "renew_ns"),
    Setting("claim", "Hand-off", "TIME", values.duration(10**7, 600 * 10**9),
            2 * 10**9, "How long a decode node waits for a claim's answer, three times.", "2s", "claim_ns"),
    Setting("kv_digest", "Hand-off", "off|on", values.choice("off", "on"), "off",
            "on: a decode node compares digests of all KV that it has read with what the prefill node computed."),
    Setting("coded_layers", "Coded engine", "N", values.whole(1, 1024), 4, "Layers."),
    Setting("coded_kv_heads", "Coded engine", "N", values.whole(1, 1024), 2, "KV heads."),
    Setting("coded_head_dim", "Coded engine", "N", values.whole(1, 1024), 16, "Channels of a head."),
    Setting("coded_vocab", "Coded engine", "N", values.whole(16, 1 << 24), 256, "Token ids."),
    Setting("coded_step_ms", "Coded engine", "MS", values.real(0, 60_000, "milliseconds"), 0.0, "Time of a step."),
    Setting("coded_token_us", "Coded engine", "US", values.real(0, 1_000_000, "microseconds"), 0.0,
            "Time that each token adds to a step."),
    Setting("log_format", "Trace", "FORM", values.choice(*FORMS), FORMS[0],
            "Of the log on standard error. text: a line for people; json: an object a line."),
    Setting("record", "Trace", "DIR", str, "", "Record every decision into this folder.", "no recording"),
    Setting("record_max", "Trace", "SIZE", values.size(TOTAL_BYTES_LEAST), TOTAL_BYTES_MAX,
            "Keep at most so much of this node's recordings: the newest.", "4GiB"),
    Setting("record_tokens", "Trace", "", values.switch, False, "Record sampled tokens as well."),
)  # fmt: skip
OTHER_VARIABLES = {"PD_CONFIG", "PD_ADDRESS", "PD_CACHE"}
SLIP_LIKENESS = 0.85  # PD_KV_BLOK is PD_KV_BLOCKS; PD_PORT, as Kubernetes sets it for a service, is nobody's slip
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def load(
    flags: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    *,
    file: Path | None = None,
    host: Host | None = None,
) -> NodeConfig:
    """The node's settings from options (text by setting name), environment and file. An empty variable counts as not
    set, an empty option or key is a slip. Raises ConfigError."""
    given = Given()
    given.add({name: (text, option(name)) for name, text in flags.items()})
    environ = environ or {}
    refuse_slips(environ)
    given.add({s.name: (environ[s.variable], s.variable) for s in SETTINGS if environ.get(s.variable)})
    if file:
        given.add(_from_file(file, "PD_CONFIG" if environ.get("PD_CONFIG") == str(file) else "--config"))
    return _resolve(given, host or this_host())


def _resolve(given: Given, host: Host) -> NodeConfig:
    chosen: Chosen = {}
    for setting in SETTINGS:
        chosen[setting.name] = _value(setting, given, chosen, host)
    check(chosen, given, host)
    ports = ("listen", "advertise", "events", "http_port")
    asked: dict[str, Any] = {f"{name}_asked": name in given.text for name in ports}
    fields: dict[str, Any] = {s.field or s.name: chosen[s.name] for s in SETTINGS}
    return NodeConfig(**fields, **asked, written={option(name): how for name, how in given.written.items()})


def _from_file(file: Path, said: str) -> dict[str, tuple[str, str]]:
    table = read_toml(file, said)
    node = table.pop("node", {})
    if not isinstance(node, dict):
        raise ConfigError(f"node ({file.name})", "is a table: write [node], then one key = value a line")
    found: dict[str, tuple[str, str]] = {}
    for key, value in (*node.items(), *table.items()):
        name, written = key.replace("-", "_"), f"{key} ({file.name})"
        if name not in _BY_NAME:
            raise ConfigError(written, f"is no setting of a node{_nearest(name, value)}")
        if name in found:
            raise ConfigError(written, f"says again what {found[name][1]} says: give one of the two")
        if value != []:  # none of them
            found[name] = (_toml_text(_BY_NAME[name], written, value), written)
    return found


def read_toml(file: Path, said: str) -> dict[str, Any]:
    """The whole file. Raises ConfigError naming what said so, `--config` or PD_CONFIG."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(said, f"cannot read {file}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(said, f"{file} is not TOML: {e}") from None
    except RecursionError:
        raise ConfigError(said, f"{file} is no file of settings: it is nested too deeply") from None


def _nearest(name: str, value: Any) -> str:
    """A table can only be meant for [node], the one that there is."""
    if isinstance(value, dict):
        return "; the only table is [node]"
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    return f"; the nearest is {close[0]}" if close else "; `pd-node --help` lists them all"


def refuse_slips(environ: Mapping[str, str]) -> None:
    """A variable that is nearly one of ours is a slip of the pen; other programs' may begin with PD_ as well. Raises
    ConfigError naming it."""
    known = {setting.variable for setting in SETTINGS} | OTHER_VARIABLES
    for variable in sorted(environ):
        if variable.startswith("PD_") and variable not in known:
            close = difflib.get_close_matches(variable, sorted(known), n=1, cutoff=SLIP_LIKENESS)
            if close:
                raise ConfigError(variable, f"is no variable of pdbus; the nearest is {close[0]}")


def _toml_text(setting: Setting, written: str, value: Any) -> str:
    """A TOML value of the setting's kind as an option's text, so that one parser serves all three."""
    fits, wanted = TOML_KINDS[setting.kind]
    if type(value) not in fits or (isinstance(value, list) and not {type(v) for v in value} <= {str, int}):
        raise ConfigError(written, f"give {wanted}")
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(str(v) for v in value) if isinstance(value, list) else str(value)


def _value(setting: Setting, given: Given, chosen: Chosen, host: Host) -> Any:
    if setting.name in given.text:
        text = given.text[setting.name]
        if not text.strip(" ,"):
            raise ConfigError(given.written[setting.name], EMPTY)
        try:
            return setting.parse(text)
        except ValueError as e:
            raise ConfigError(given.written[setting.name], str(e)) from None
    return setting.default(chosen, host) if callable(setting.default) else setting.default
