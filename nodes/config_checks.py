"""What no setting can be judged by alone."""

from __future__ import annotations

import os

from pdbus.bus.ports import is_loopback, is_wildcard, unknown_host
from pdbus.connector.readable import RANKS_MAX

from .given import Chosen, Given
from .host import RUN_DIR_CHARS_MAX, Host
from .values import DEMO_MODEL, show_duration, split_address


def check(c: Chosen, given: Given, host: Host) -> None:
    """Raises ConfigError blaming one of the settings that do not go together."""
    _check_bus(c, given)
    _check_http(c, given)
    _check_device(c, given)
    _check_stages(c, given)
    _check_model(c, given)
    _check_sizes(c, given)
    _check_timers(c, given)
    _check_host(c, given, host)


def _check_bus(c: Chosen, given: Given) -> None:
    listen, events, advertise = (split_address(c[name]) for name in ("listen", "events", "advertise"))
    for name, bound in (("listen", listen), ("events", events)):
        if not is_loopback(bound.host) and not c["insecure"] and not c["keys"]:
            raise given.error(not_insecure(str(bound), bound.host, "--keys DIR (pd keys new)"), name, "listen")
    if is_wildcard(listen.host) and "advertise" not in given.text:
        problem = f"{listen} is every interface of this machine: say with --advertise what others connect to"
        raise given.error(problem, "listen")
    if is_wildcard(advertise.host) or (is_loopback(advertise.host) and not is_loopback(listen.host)):
        raise given.error(f"other machines cannot connect to {advertise}: give this one's address", "advertise")
    own = [address for address in (c["listen"], c["advertise"]) if address in c["join"]]
    if own:
        raise given.error(f"{own[0]} is this node's own address: give another member's", "join")
    if events.port == 65535:
        raise given.error("leaves no port for the events' replay: give a smaller one", "events", "listen")
    if events.port and listen.port in (events.port, events.port + 1):
        raise given.error(f"ports {events.port} and {events.port + 1} must differ from --listen's", "events")


def not_insecure(where: str, host: str, keys: str) -> str:
    unknown = "" if is_wildcard(host) else unknown_host(host)
    if unknown:
        return f"{where}: {host} is not known here: {unknown}"
    return f"{where} can be reached from other machines: needs {keys}, or --insecure, or give 127.0.0.1"


def _check_http(c: Chosen, given: Given) -> None:
    port, bus, events = c["http_port"], split_address(c["listen"]).port, split_address(c["events"]).port
    if port and not is_loopback(c["http_host"].strip("[]")) and not c["insecure"] and not c["http_keys"]:
        raise given.error(not_insecure(c["http_host"], c["http_host"], "--http-keys FILE"), "http_host")
    if "http_port" in given.text and port and port in (bus, *((events, events + 1) if events else ())):
        raise given.error(f"port {port} is the bus's: give another one", "http_port")


def _check_device(c: Chosen, given: Given) -> None:
    device, ranks = c["device"], c["tp"] * c["pp"]
    if device != "cpu" and c["kv_buffer_device"] == "device":
        raise given.error(f"NIXL cannot address the memory of {device} here: give cpu", "kv_buffer_device", "device")
    if not is_cpu(c) and c["engine"] == "coded":
        raise given.error("the coded engine computes on the CPU: give cpu or fake", "device")
    if ":" in device and ranks > 1:
        kind = device.partition(":")[0]
        raise given.error(f"{device} is one device for {ranks} ranks: give {kind}, and each takes its own", "device")


def _check_stages(c: Chosen, given: Given) -> None:
    stages, ranks = c["pp"], c["tp"] * c["pp"]
    if stages == 1:
        return
    if c["role"] != "prefill":
        raise given.error(f"{stages} stages can prefill, not decode: give --role prefill with it, or 1", "pp")
    if c["speculate"]:
        raise given.error("the stages of a prefill node draft nothing: give 0, or --pp 1", "speculate")
    if ranks > RANKS_MAX:
        raise given.error(f"{stages} stages of {c['tp']} ranks are more than {RANKS_MAX} ranks", "pp")


def _check_model(c: Chosen, given: Given) -> None:
    if c["speculate_method"] == "mtp" and c["speculate"] != 1:
        raise given.error("mtp drafts one token a step: give --speculate 1 with it", "speculate_method")
    drafts = c["speculate_method"] == "draft"
    if drafts and not (c["speculate"] and c["draft_model"]):
        raise given.error("draft needs --draft-model MODEL and --speculate N with it", "speculate_method")
    if drafts and c["tp"] > 1:
        raise given.error("a draft model does not go with several ranks: give --tp 1", "speculate_method")
    if c["draft_model"] and not drafts:
        raise given.error("goes with --speculate-method draft", "draft_model")
    if c["engine"] == "coded":
        if c["speculate"]:
            raise given.error("the coded engine does not speculate: give --engine torch, or 0", "speculate")
        return
    wanted = f"give a folder with config.json and *.safetensors, a .gguf file, or {DEMO_MODEL}"
    model = c["model"]
    if not model:
        raise given.error(f"is needed: {wanted}", "model")
    if model != DEMO_MODEL and not os.path.exists(model):
        raise given.error(f"there is no {model}; {wanted}", "model")
    if c["weights"] == "fp16" and not (is_cpu(c) and c["dtype"] == "float32"):
        raise given.error("fp16 needs --device cpu and --dtype float32, whose products it is for", "weights")


def _check_sizes(c: Chosen, given: Given) -> None:
    batch = c["max_batch_tokens"]
    for name in ("prefill_chunk", "max_running"):
        if c[name] > batch:
            raise given.error(f"{c[name]} is more than a step holds: give at most --max-batch-tokens, {batch}", name)


def _check_timers(c: Chosen, given: Given) -> None:
    """A lease must outlive two lost renewals and the claim with its two repeats. The same for every
    role: what one node of a pair keeps, the other renews."""
    lease, renew, claim, least = (
        show_duration(ns) for ns in (c["lease"], c["renew"], c["claim"], 3 * c["renew"] + 3 * c["claim"])
    )
    if c["lease"] < 3 * c["renew"] + 3 * c["claim"]:
        problem = (
            f"a lease of {lease} is too short: three renewals ({renew}) and three claims ({claim}) take {least}; "
            "give a longer --lease, or a shorter --renew and --claim"
        )
        raise given.error(problem, "lease", "renew", "claim")


def _check_host(c: Chosen, given: Given, host: Host) -> None:
    missing = [core for core in c["cpus"] if core not in host.cpus]
    if missing:
        has = ",".join(map(str, host.cpus))
        raise given.error(f"core {missing[0]} cannot be used here; there are {has}", "cpus")
    if len(c["run_dir"]) > RUN_DIR_CHARS_MAX:
        raise given.error(f"longer than {RUN_DIR_CHARS_MAX} characters; give a shorter path", "run_dir")
    if not os.path.isdir(c["run_dir"]):
        raise given.error(f"there is no folder {c['run_dir']}", "run_dir")
    if os.path.exists(c["record"]) and not os.path.isdir(c["record"]):
        raise given.error(f"{c['record']} is a file; give a folder", "record")
    if c["record_tokens"] and not c["record"]:
        raise given.error("needs --record DIR, the recording that they are to stand in", "record_tokens")


def is_cpu(c: Chosen) -> bool:
    return c["device"] in ("cpu", "fake")
