"""Settings of a node: where they come from, what they default to, and one message for each that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.nodes import config_checks
from pdbus.nodes.config import SETTINGS, NodeConfig, load
from pdbus.nodes.host import Host

GIB = 1 << 30
HOST = Host(cpus=(0, 1, 2, 3), memory_bytes=64 * GIB, run_dir="/tmp", name_suffix="3f2a")


def coded(**flags: str) -> NodeConfig:
    return load({"engine": "coded", **flags}, host=HOST)


def refusal(**flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        coded(**flags)
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text)
    return path


def test_every_setting_is_a_field_and_every_field_a_setting() -> None:
    others = {"listen_asked", "advertise_asked", "events_asked", "http_port_asked", "written"}
    assert {s.field or s.name for s in SETTINGS} | others == set(NodeConfig.__struct_fields__)


def test_defaults() -> None:
    config = coded(role="prefill")
    assert (config.name, config.listen, config.advertise) == (
        "prefill-3f2a",
        "tcp://127.0.0.1:7400",
        "tcp://127.0.0.1:7400",
    )
    assert (config.events, config.http_host, config.http_port) == ("tcp://127.0.0.1:7401", "127.0.0.1", 8080)
    assert (config.block_size, config.dtype, config.threads) == (16, "float32", 4)
    assert (config.lease_ns, config.renew_ns, config.claim_ns) == (30 * 10**9, 5 * 10**9, 2 * 10**9)
    assert config.kv_blocks == 0 and config.kv_memory_bytes == GIB
    assert not (config.listen_asked or config.events_asked or config.http_port_asked or config.advertise_asked)


def test_defaults_follow_the_device_the_batch_and_the_machine() -> None:
    on_gpu = load({"model": "/", "device": "cuda:1"}, host=HOST)
    assert (on_gpu.block_size, on_gpu.dtype, on_gpu.kv_buffer_device) == (64, "bfloat16", "cpu")
    made_up = coded(device="fake")
    assert (made_up.block_size, made_up.dtype, made_up.kv_buffer_device) == (16, "float32", "cpu")
    assert coded().kv_buffer_device == "device"
    small = coded(max_batch_tokens="32")
    assert (small.prefill_chunk, small.max_running) == (32, 32)
    assert coded(cpus="1,2").threads == 2
    little = load({"engine": "coded"}, host=Host(cpus=(0,), memory_bytes=GIB, run_dir="/tmp", name_suffix="0"))
    assert (little.kv_memory_bytes, little.threads) == (GIB // 4, 1)


def test_an_option_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "block_size = 4\nkv_blocks = 40\nmax_running = 4\n")
    environ = {"PD_BLOCK_SIZE": "2", "PD_KV_BLOCKS": "20", "PD_PREFILL_CHUNK": ""}
    config = load({"engine": "coded", "block_size": "1"}, environ, file=file, host=HOST)
    assert (config.block_size, config.kv_blocks, config.max_running, config.prefill_chunk) == (1, 20, 4, 256)


def test_a_file_may_use_dashes_tables_and_toml_types(tmp_path: Path) -> None:
    text = """
    kv-blocks = 64
    [node]
    engine = "coded"
    deterministic = true
    join = ["tcp://a:1", "tcp://b:2"]
    cpus = [0, 2]
    coded-step-ms = 1.5
    """
    config = load({}, file=toml(tmp_path, text), host=HOST)
    assert (config.kv_blocks, config.deterministic, config.coded_step_ms) == (64, True, 1.5)
    assert (config.join, config.cpus) == (("tcp://a:1", "tcp://b:2"), (0, 2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv_blcks = 3", "kv_blcks (node.toml): is no setting of a node; the nearest is kv_blocks"),
        ("foo = 3", "foo (node.toml): is no setting of a node; `pd-node --help` lists them all"),
        ("[up]\nx = 1", "up (node.toml): is no setting"),
        ("[nodes]\nmodel = 'x'", "nodes (node.toml): is no setting of a node; the only table is [node]"),
        ("kv-blocks = 8\n[node]\nkv_blocks = 9", "kv-blocks (node.toml): says again what kv_blocks (node.toml) says"),
        ("deterministic = 'yes'", "deterministic (node.toml): give true or false, without quotes"),
        ("deterministic = 1", "deterministic (node.toml): give true or false, without quotes"),
        ("name = 5", "name (node.toml): give text in quotes"),
        ("record = true", "record (node.toml): give text in quotes"),
        ("model = ['x']", "model (node.toml): give text in quotes"),
        ("kv_blocks = true", "kv_blocks (node.toml): give a number, or text in quotes"),
        ("kv_blocks = [64]", "kv_blocks (node.toml): give a number, or text in quotes"),
        ("coded_step_ms = false", "coded_step_ms (node.toml): give a number"),
        ("cpus = [true]", "cpus (node.toml): give a list, or text in quotes"),
        ("join = 1.5", "join (node.toml): give a list, or text in quotes"),
        ("record = ''", "record (node.toml): is empty: give a value, or leave it out"),
        ("kv_blocks = 'many'", "kv_blocks (node.toml): 'many' is not a whole number"),
        ("kv_blocks = 1979-05-27", "kv_blocks (node.toml): give a number, or text in quotes"),
        ("node = 3", "node (node.toml): is a table"),
        ("kv_blocks = ", "--config: "),
        ("kv_blocks = 8\nkv_memory = '1GiB'", "give either it or"),
    ],
)
def test_a_bad_file_is_told_by_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"engine": "coded"}, file=toml(tmp_path, text), host=HOST)
    assert said in str(caught.value)


def test_an_empty_list_in_a_file_is_none(tmp_path: Path) -> None:
    config = load({"engine": "coded"}, file=toml(tmp_path, "join = []\ncpus = []"), host=HOST)
    assert (config.join, config.cpus) == ((), ())


@pytest.mark.parametrize("name", [s.name for s in SETTINGS if not s.is_switch])
def test_an_option_given_as_empty_is_a_slip(name: str) -> None:
    """`--record "$DIR"` without that variable ran unrecorded."""
    option = "--" + name.replace("_", "-")
    for text in ("", " ", ","):
        assert refusal(**{name: text}) == f"{option}: is empty: give a value, or leave it out"


def test_an_empty_variable_is_not_set() -> None:
    assert load({"engine": "coded"}, {"PD_RECORD": "", "PD_JOIN": ""}, host=HOST).join == ()
    with pytest.raises(ConfigError, match=r"^PD_JOIN: is empty"):
        load({"engine": "coded"}, {"PD_JOIN": ","}, host=HOST)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read .*No such file"):
        load({}, file=tmp_path / "none.toml", host=HOST)


def test_a_bad_variable_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^PD_KV_BLOCKS: 1 is out of range; give a whole number from 2"):
        load({"engine": "coded"}, {"PD_KV_BLOCKS": "1"}, host=HOST)


def test_what_is_found_out_later_is_blamed_as_it_was_written(tmp_path: Path) -> None:
    """That a port is taken, or a model damaged, shows only when the node starts."""
    config = load(
        {"engine": "coded"}, {"PD_LISTEN": "tcp://127.0.0.1:1"}, file=toml(tmp_path, "dtype = 'float16'"), host=HOST
    )
    said = [
        str(config.as_written(ConfigError(option, "no"))) for option in ("--listen", "--dtype", "--engine", "--name")
    ]
    assert said == ["PD_LISTEN: no", "dtype (node.toml): no", "--engine: no", "--name: no"]


def test_a_stronger_source_decides_between_blocks_and_memory() -> None:
    config = load({"engine": "coded", "kv_memory": "1MiB"}, {"PD_KV_BLOCKS": "7"}, host=HOST)
    assert (config.kv_blocks, config.kv_memory_bytes) == (0, 1 << 20)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * GIB), ("2G", 2 * GIB), ("512mb", 512 * 10**6), ("1.5MiB", 3 << 19), ("65536", 1 << 16)],
)
def test_sizes(text: str, size: int) -> None:
    assert coded(kv_memory=text).kv_memory_bytes == size


@pytest.mark.parametrize(("text", "ns"), [("45s", 45 * 10**9), ("1500ms", 15 * 10**8), ("2m", 120 * 10**9)])
def test_durations(text: str, ns: int) -> None:
    assert coded(lease=text, renew="10ms", claim="10ms").lease_ns == ns


def test_asked_ports_are_told_from_default_ones() -> None:
    config = coded(listen="tcp://127.0.0.1:7500", http_port="8080")
    assert (config.listen_asked, config.events_asked, config.http_port_asked) == (True, False, True)
    assert config.events == "tcp://127.0.0.1:7501"


def test_another_machine_may_connect_when_told_so() -> None:
    config = coded(listen="tcp://*:7400", advertise="tcp://10.0.0.5:7400", insecure="true", http_host="0.0.0.0")
    assert (config.listen, config.events, config.advertise) == ("tcp://*:7400", "tcp://*:7401", "tcp://10.0.0.5:7400")


@pytest.mark.parametrize(
    ("flags", "setting", "hint"),
    [
        ({"role": "prefil"}, "--role", "give prefill, decode or both"),
        ({"engine": "tensorflow"}, "--engine", "give torch or coded"),
        ({"name": "two words"}, "--name", "up to 64 letters"),
        ({"listen": "127.0.0.1:7400"}, "--listen", "tcp://host:port"),
        ({"listen": "tcp://127.0.0.1:99999"}, "--listen", "65535"),
        ({"listen": "tcp://10.0.0.5:7400"}, "--listen", "needs --keys DIR"),
        ({"listen": "tcp://*:7400", "insecure": "true"}, "--listen", "--advertise"),
        ({"listen": "tcp://127.0.0.1:65534"}, "--listen", "give a smaller one"),
        ({"events": "tcp://127.0.0.1:7400"}, "--events", "must differ from --listen's"),
        ({"events": "tcp://10.0.0.5:7401"}, "--events", "needs --keys DIR"),
        ({"advertise": "tcp://0.0.0.0:7400"}, "--advertise", "give this one's address"),
        ({"listen": "tcp://10.0.0.5:1", "insecure": "1", "advertise": "tcp://127.0.0.1:1"}, "--advertise", "address"),
        ({"join": "tcp://a:1,b:2"}, "--join", "tcp://host:port"),
        ({"http_port": "65536"}, "--http-port", "0 to 65535"),
        ({"http_port": "7401"}, "--http-port", "give another one"),
        ({"http_host": "0.0.0.0"}, "--http-host", "needs --http-keys FILE, or --insecure"),
        ({"http_host": "http://x"}, "--http-host", "a host name or address"),
        ({"engine": "torch"}, "--model", "a folder with config.json"),
        ({"engine": "torch", "model": "/nowhere"}, "--model", "there is no /nowhere"),
        ({"device": "gpu"}, "--device", "cpu, cuda"),
        (
            {"device": "fake", "kv_buffer_device": "device"},
            "--kv-buffer-device",
            "NIXL cannot address the memory of fake",
        ),
        ({"device": "cuda"}, "--device", "the coded engine computes on the CPU: give cpu or fake"),
        ({"device": "fake:1"}, "--device", "give cpu, cuda"),
        ({"kv_buffer_device": "xpu"}, "--kv-buffer-device", "give device or cpu"),
        ({"dtype": "int8"}, "--dtype", "float32, bfloat16 or float16"),
        ({"weights": "int8"}, "--weights", "auto, float32 or fp16"),
        ({"weights": "fp16", "dtype": "bfloat16", "engine": "torch", "model": "/"}, "--weights", "--dtype float32"),
        ({"max_model_len": "0"}, "--max-model-len", "a whole number from 1"),
        ({"block_size": "24"}, "--block-size", "not a power of two; give 1, 2, 4"),
        ({"block_size": "0"}, "--block-size", "from 1 to 1024"),
        ({"kv_blocks": "-3"}, "--kv-blocks", "from 2"),
        ({"kv_blocks": "3.5"}, "--kv-blocks", "not a whole number"),
        ({"kv_blocks": "8", "kv_memory": "1GiB"}, "--kv-blocks", "either it or --kv-memory"),
        ({"kv_memory": "2 bananas"}, "--kv-memory", "2GiB or 512MiB"),
        ({"kv_memory": "12"}, "--kv-memory", "at least 65536 bytes"),
        ({"max_batch_tokens": "0"}, "--max-batch-tokens", "from 1"),
        ({"prefill_chunk": "2048"}, "--prefill-chunk", "at most --max-batch-tokens, 1024"),
        ({"max_batch_tokens": "8", "max_running": "9"}, "--max-running", "at most --max-batch-tokens, 8"),
        ({"cpus": "0,x"}, "--cpus", "0,2-3"),
        ({"cpus": "3-1"}, "--cpus", "0,2-3"),
        ({"cpus": "0,9"}, "--cpus", "core 9 cannot be used here; there are 0,1,2,3"),
        ({"threads": "0"}, "--threads", "from 1"),
        ({"lease": "30"}, "--lease", "30s or 400ms"),
        ({"lease": "5ms"}, "--lease", "100ms to 1h"),
        ({"lease": "2s", "renew": "1s"}, "--lease", "three renewals (1s) and three claims (2s) take 9s"),
        (
            {"renew": "20s"},
            "--renew",
            "a lease of 30s is too short: three renewals (20s) and three claims (2s) take 66s",
        ),
        ({"claim": "10s"}, "--claim", "three renewals (5s) and three claims (10s) take 45s"),
        ({"coded_vocab": "1"}, "--coded-vocab", "from 16"),
        ({"coded_step_ms": "nan"}, "--coded-step-ms", "milliseconds from 0"),
        ({"coded_token_us": "-1"}, "--coded-token-us", "microseconds from 0"),
        ({"deterministic": "perhaps"}, "--deterministic", "give true or false"),
        ({"run_dir": "/nowhere"}, "--run-dir", "there is no folder"),
        ({"run_dir": "/" + "x" * 80}, "--run-dir", "a shorter path"),
        ({"record": "/dev/null"}, "--record", "give a folder"),
        ({"record_tokens": "1"}, "--record-tokens", "needs --record DIR"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_setting_and_what_would_be_right(
    flags: dict[str, str], setting: str, hint: str
) -> None:
    said = refusal(**flags)
    assert said.startswith(f"{setting}: ")
    assert hint in said
    assert "\n" not in said


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_a_lease_is_held_against_renewals_and_claims_that_were_not_given(role: str) -> None:
    """A prefill node with a lease of a second, beside a decode node that renews every five, lost every lease."""
    assert refusal(role=role, lease="1s").startswith("--lease: a lease of 1s is too short: three renewals (5s)")
    assert coded(role=role, lease="21s").lease_ns == 21 * 10**9
    assert coded(role=role, lease="1s", renew="200ms", claim="100ms").lease_ns == 10**9


def test_a_slip_in_a_variable_is_named() -> None:
    """It was passed over, and the default taken without a word."""
    with pytest.raises(ConfigError, match=r"^PD_KV_BLOK: is no variable of pdbus; the nearest is PD_KV_BLOCKS$"):
        load({"engine": "coded"}, {"PD_KV_BLOK": "5"}, host=HOST)


def test_variables_of_others_are_none_of_our_business() -> None:
    """Kubernetes sets these for a service that is called pd."""
    others = {
        "PD_PORT": "tcp://10.0.0.1:80",
        "PD_SERVICE_HOST": "10.0.0.1",
        "PD_PORT_80_TCP_ADDR": "x",
        "PD_TOKEN": "x",
    }
    own = {"PD_CACHE": "/tmp", "PD_ADDRESS": "tcp://127.0.0.1:7400"}
    assert load({"engine": "coded"}, {**others, **own}, host=HOST) == coded()


def test_a_bad_file_is_blamed_on_what_named_it(tmp_path: Path) -> None:
    bad = toml(tmp_path, "kv_blocks = ")
    with pytest.raises(ConfigError, match=r"^PD_CONFIG: .* is not TOML"):
        load({}, {"PD_CONFIG": str(bad)}, file=bad, host=HOST)


def test_a_file_that_is_nested_too_deeply_is_said_so(tmp_path: Path) -> None:
    bad = toml(tmp_path, f"kv_blocks = {'[' * 5000}{']' * 5000}")
    with pytest.raises(ConfigError, match=r"^--config: .* nested too deeply$"):
        load({}, {}, file=bad, host=HOST)


@pytest.mark.parametrize("setting", ["listen", "events", "http_host"])
def test_a_host_that_nobody_knows_is_not_said_to_be_reachable(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "unknown_host", lambda host: "Name or service not known")
    said = refusal(**{setting: "nosuch.invalid" if setting == "http_host" else "tcp://nosuch.invalid:7600"})
    assert said.endswith("nosuch.invalid is not known here: Name or service not known")
