"""What is measured: each side a few processes on this machine that answer at one URL, with one core for each server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pdbus.bus.errors import Broken
from pdbus.nodes.cluster import GATEWAY_COMMAND, Cluster, http_ok, listens
from pdbus.nodes.node_process import NodeProcess, descendants

from ..vllm.servers import free_port

HERE = Path(__file__).parent
READY_S = 600.0  # compiling, on a busy machine
STOP_S = 30.0
MAX_MODEL_LEN = 2048
MAX_RUNNING = 16
CONNECTORS: dict[str, dict[str, Any]] = {
    "nixl": {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
    "pdbus": {"kv_connector": "PdBusConnector", "kv_connector_module_path": "pdbus.connector.vllm"},
}


class Setup(NamedTuple):
    """`python`: vLLM's. `preload`: libraries for vLLM's processes, as its documentation recommends."""

    model: str
    python: str
    logs: Path
    preload: str = ""
    eager: bool = False


class Up(NamedTuple):
    url: str
    processes: tuple[NodeProcess, ...]

    def memory_bytes(self) -> int:
        """Resident in all of its processes; what several share counts once."""
        pids = [pid for process in self.processes for pid in (process.pid, *descendants(process.pid))]
        return sum(_resident(pid) for pid in pids)


@asynccontextmanager
async def vllm_alone(setup: Setup) -> AsyncIterator[Up]:
    async with _started([_vllm(setup, "alone", free_port(), 0)]) as processes:
        yield Up(processes[0].http, processes)


@asynccontextmanager
async def vllm_nixl(setup: Setup, *, patched: bool = False) -> AsyncIterator[Up]:
    """`patched`: without the progress threads of its NIXL agents."""
    patch = {"PYTHONPATH": str(HERE / "no_progress_thread")} if patched else {}
    proxy = free_port()
    pair = [
        _vllm(setup, name, free_port(), core, CONNECTORS["nixl"],
              {**patch, "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())})
        for core, name in enumerate(("nixl-p", "nixl-d"))
    ]  # fmt: skip
    words = (setup.python, str(HERE / "plain_proxy.py"), str(proxy), *(server.http for server in pair))
    async with _started(pair) as servers, _started([_process(setup, "proxy", words, proxy)], "/") as proxies:
        yield Up(proxies[0].http, (*servers, *proxies))


@asynccontextmanager
async def vllm_pdbus(setup: Setup) -> AsyncIterator[Up]:
    bus, gateway = f"tcp://127.0.0.1:{free_port()}", free_port()
    extras = ({"name": "p1", "listen": bus}, {"name": "d1", "join": bus})
    pair = [
        _vllm(setup, f"pdbus-{extra['name']}", free_port(), core,
              {**CONNECTORS["pdbus"], "kv_role": role, "kv_connector_extra_config": extra})
        for core, (role, extra) in enumerate(zip(("kv_producer", "kv_consumer"), extras, strict=True))
    ]  # fmt: skip
    prefill, decode = (server.http.rpartition(":")[2] for server in pair)
    words = (
        *GATEWAY_COMMAND, "--vllm", "--http", f"127.0.0.1:{gateway}",
        "--prefiller-host", "127.0.0.1", "--prefiller-port", prefill,
        "--decoder-host", "127.0.0.1", "--decoder-port", decode,
    )  # fmt: skip
    async with _started(pair) as servers, _started([_process(setup, "gateway", words, gateway)]) as gateways:
        yield Up(gateways[0].http, (*servers, *gateways))


@asynccontextmanager
async def nodes(setup: Setup, *, weights: str, pair: bool) -> AsyncIterator[Up]:
    """Our engine: P and D with a core each, or one node that does both, on the first core."""
    options: dict[str, str | int | float | bool] = {
        "model": setup.model, "threads": 1, "max_model_len": MAX_MODEL_LEN, "max_running": MAX_RUNNING,
        "weights": weights,
    }  # fmt: skip
    if not pair:
        options["cpus"] = str(min(os.sched_getaffinity(0)))
    cluster = Cluster(int(pair), int(pair), int(not pair), options=options, logs=setup.logs)
    async with cluster:
        yield Up((cluster.decode if pair else cluster.both)[0].http, tuple(cluster.nodes))


SIDES = {
    "vllm": vllm_alone,
    "vllm-nixl": vllm_nixl,
    "vllm-nixl-patched": lambda setup: vllm_nixl(setup, patched=True),
    "vllm-pdbus": vllm_pdbus,
    "node-float32": lambda setup: nodes(setup, weights="float32", pair=False),
    "node-fp16": lambda setup: nodes(setup, weights="fp16", pair=False),
    "pair-float32": lambda setup: nodes(setup, weights="float32", pair=True),
    "pair-fp16": lambda setup: nodes(setup, weights="fp16", pair=True),
}


# ---------------------------------------------------------------- processes


def _vllm(
    setup: Setup, name: str, port: int, core: int, transfer: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> NodeProcess:  # fmt: skip
    words = (
        setup.python, "-m", "vllm.entrypoints.openai.api_server", "--model", setup.model, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(MAX_RUNNING), "--no-enable-prefix-caching",
        *(("--enforce-eager",) if setup.eager else ()),
        *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
    )  # fmt: skip
    own = {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core), "LD_PRELOAD": setup.preload, "PYTHONPATH": "", **(environment or {}),
    }  # fmt: skip
    return _process(setup, name, words, port, own)


def _process(
    setup: Setup, name: str, words: Sequence[str], port: int, environment: Mapping[str, str] | None = None
) -> NodeProcess:
    return NodeProcess(
        name, "server", words, address="", http=f"http://127.0.0.1:{port}", environment=environment,
        log=setup.logs / f"{name}.log",
    )  # fmt: skip


@asynccontextmanager
async def _started(processes: Sequence[NodeProcess], path: str = "/health") -> AsyncIterator[tuple[NodeProcess, ...]]:
    """Until all answer; `path` '/' for what has no health: any answer will do. Raises Broken."""
    async with AsyncExitStack() as stack:
        for process in processes:
            await process.start()
            stack.push_async_callback(_stop, process)
        async with asyncio.timeout(READY_S):
            for process in processes:
                while not (await http_ok(process.http + path) if path != "/" else await listens(process.http)):
                    if not process.running:
                        raise Broken(f"{process.name} ended: {' | '.join(list(process.tail)[-5:])}")
                    await asyncio.sleep(0.25)
        yield tuple(processes)


async def _stop(process: NodeProcess) -> None:
    process.kill_all()
    await process.wait()
    await process.close()


def _resident(pid: int) -> int:
    """Of /proc/PID/smaps_rollup, in bytes; 0 for a process that has just ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return next(int(row.split()[1]) << 10 for row in text.splitlines() if row.startswith("Pss:"))
