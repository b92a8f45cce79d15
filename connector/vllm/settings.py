"""What a user says in `kv_connector_extra_config`, checked once and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pdbus.bus.errors import ConfigError
from pdbus.bus.ports import is_loopback, is_wildcard, parse_address
from pdbus.bus.wire import Declared

ROLES: dict[str, Literal["prefill", "decode"]] = {"kv_producer": "prefill", "kv_consumer": "decode"}
WHERE = "kv_connector_extra_config"
MIB = 1 << 20
# What other connectors read, for where to listen
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


class Settings(Declared):
    role: Literal["prefill", "decode"]
    name: str
    listen: str
    join: tuple[str, ...] = ()
    kv_memory_mib: int = 512  # of the slab: what is handed over at one time, not what the engine caches
    pair_wait_s: float = 10.0  # how long a decode server waits for the prefill server to know the request
    park_s: float = 30.0  # how long a computed prompt waits for its reader
    fetch_s: float = 120.0  # all of a fetch, the prefill included; then the prompt is computed on the decode server
    lease_s: float = 30.0
    fingerprint: str = ""
    keys: str = ""  # a folder of keys (pd keys)
    record: str = ""  # a folder; everything heard and decided is appended to files there


LIMITS: dict[str, tuple[float, float]] = {
    "kv_memory_mib": (1, 1 << 24),
    "pair_wait_s": (0.1, 600),
    "park_s": (0.1, 3600),
    "fetch_s": (0.1, 3600),
    "lease_s": (1, 3600),
}
TEXTS = ("name", "listen", "fingerprint", "keys", "record")


def settings_of(
    given: Mapping[str, Any], *, kv_role: str, buffer_device: str, environment: Mapping[str, str], unique: str
) -> Settings:
    """`unique` tells this process from all others, for a name. Raises ConfigError naming the key at fault."""
    known = {*LIMITS, *TEXTS, "role", "join"}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"{WHERE}.{unknown[0]}", f"is unknown; known are {', '.join(sorted(known))}")
    if buffer_device != "cpu":
        raise ConfigError("kv_buffer_device", f"{buffer_device!r} is not supported in this version; give cpu")
    role = _role(given.get("role"), kv_role)
    texts = {name: _text(given, name) for name in TEXTS if name in given}
    texts.setdefault("name", f"vllm-{role}-{unique}")
    texts.setdefault("listen", f"tcp://{environment.get(HOST, '127.0.0.1')}:{environment.get(PORT, '0')}")
    _check_listen(texts["listen"], keyed="keys" in texts)
    numbers = {name: _number(given, name) for name in LIMITS if name in given}
    return Settings(role=role, join=_join(given.get("join", ())), **texts, **numbers)  # type: ignore[arg-type]


def _role(given: object, kv_role: str) -> Literal["prefill", "decode"]:
    role = ROLES.get(kv_role) if given is None else given
    if role == "prefill" or role == "decode":
        return role
    if given is not None:
        raise ConfigError(f"{WHERE}.role", f"{given!r} is neither prefill nor decode")
    raise ConfigError("kv_role", f"{kv_role} says not which: give kv_producer or kv_consumer, or {WHERE}.role")


def _text(given: Mapping[str, Any], name: str) -> str:
    if not isinstance(given[name], str) or not given[name]:
        raise ConfigError(f"{WHERE}.{name}", f"{given[name]!r} is no text")
    return str(given[name])


def _number(given: Mapping[str, Any], name: str) -> float:
    value, (least, most) = given[name], LIMITS[name]
    whole = Settings.__annotations__[name] == "int"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(f"{WHERE}.{name}", f"{value!r} is no {'whole ' if whole else ''}number")
    if not least <= value <= most:
        raise ConfigError(f"{WHERE}.{name}", f"{value} is not from {least} to {most}")
    return value


def _join(given: object) -> tuple[str, ...]:
    addresses = [given] if isinstance(given, str) else given
    if not isinstance(addresses, list | tuple) or not all(isinstance(a, str) for a in addresses):
        raise ConfigError(f"{WHERE}.join", f"{given!r} is neither an address nor a list of them")
    return tuple(str(parse_address(a, f"{WHERE}.join")) for a in addresses)


def _check_listen(listen: str, *, keyed: bool) -> None:
    """It is what others call. Without keys nobody but this machine may."""
    host = parse_address(listen, f"{WHERE}.listen", port_zero=True).host
    if is_wildcard(host):
        raise ConfigError(f"{WHERE}.listen", f"{host} is no address that others can call: give one of this machine's")
    if not keyed and not is_loopback(host):
        raise ConfigError(f"{WHERE}.listen", f"{host} can be reached from other machines: needs {WHERE}.keys (pd keys)")
