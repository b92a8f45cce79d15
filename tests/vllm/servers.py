"""vLLM servers with the connector, as processes; and a request that both are given, as a gateway gives it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

START_S = 400
ANSWER_S = 120
LEASE_S = 3  # of the prefill server: less than is left between renewals, so that one can be seen to expire
CORES = 2  # of the machine, that are used
BLOCK = 32  # the least that vLLM's CPU kernels take


def ours(kv_role: str, **extra: Any) -> dict[str, Any]:
    """As `--kv-transfer-config` says it."""
    return {
        "kv_connector": "PdBusConnector",
        "kv_connector_module_path": "pdbus.connector.vllm",
        "kv_role": kv_role,
        "kv_connector_extra_config": extra,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """One `vllm` process and what it has started. `core`: the one it computes on; of several ranks the first one's."""

    def __init__(
        self, model: Path, log: Path, core: int, transfer: Mapping[str, Any], tp: int = 1, **environment: str
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._model, self._tp, self._transfer, self._environment = model, tp, transfer, environment
        self._cores = "|".join(str((core + rank) % CORES) for rank in range(tp))
        self.start()

    def start(self) -> None:
        """Also again, on the same ports."""
        env = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": self._cores,
            "OMP_NUM_THREADS": "1", **self._environment,
        }  # fmt: skip
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model),
                    "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
                    "--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "128",
                    "--block-size", str(BLOCK), "--enforce-eager", "--tensor-parallel-size", str(self._tp),
                    "--kv-transfer-config", json.dumps(self._transfer),
                ],
                stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self._process.poll() is None, self.log[-3000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"not ready in {START_S} s: {self.log[-3000:]}")

    def wait_for(self, text: str) -> None:
        """Until its log says so."""
        end = time.monotonic() + START_S
        while text not in self.log:
            assert time.monotonic() < end, f"never said {text!r}: {self.log[-3000:]}"
            time.sleep(0.1)

    def complete(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more,
        }  # fmt: skip
        answer: dict[str, Any] = httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_S).json()
        return answer

    def tokens(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        answer = self.complete(prompt, max_tokens, **more)
        assert "choices" in answer, answer
        return list(answer["choices"][0]["token_ids"])

    def handed_over(self) -> int:
        """How many tokens it has loaded of KV that another server computed."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        rows = [r for r in text.splitlines() if r.startswith("vllm:external_prefix_cache_hits_total")]
        return int(float(rows[0].rpartition(" ")[2]))

    def pids(self, module: str = "") -> list[int]:
        """Of all processes below it, or of those that run this module."""
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                    parents = _ancestors(int(entry))
                except OSError:
                    continue
                if (not module or module.encode() in command) and self._process.pid in parents:
                    found.append(int(entry))
        return found

    def kill(self) -> None:
        """All of it, at once."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """All of it stands still."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        below = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._process.pid in _ancestors(p)]
        for pid in (self._process.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            break
        found.append(pid)
    return found


class Pair:
    """A prefill server and a decode server that have found each other."""

    def __init__(self, model: Path, logs: Path, *, prefill: dict[str, Any]) -> None:
        """Both record into `logs`/recordings."""
        bus = f"tcp://127.0.0.1:{free_port()}"
        self.recordings = logs / "recordings"
        same = {"record": str(self.recordings)}
        self.p = Server(model, logs / "p.log", 0, ours("kv_producer", name="p1", listen=bus, **same, **prefill))
        self.d = Server(model, logs / "d.log", 1, ours("kv_consumer", name="d1", join=[bus], pair_wait_s=5, **same))
        self._both = ThreadPoolExecutor(16)

    def __enter__(self) -> Pair:
        try:
            self.p.wait_ready()
            self.d.wait_ready()
            self.d.wait_for("node.up node=p1")
            # until the decode server's mover has read from the prefill server's
            end = time.monotonic() + START_S
            while not self.d.handed_over():
                assert time.monotonic() < end, self.d.log[-3000:]
                self.tokens(range(10, 60), 2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.p.stop()
        self.d.stop()
        self._both.shutdown(wait=False)

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        """A prompt computed by the prefill server. Returns what the decode server is to be given with it."""
        parameters = {"pdbus_pair": secrets.token_hex(16)}
        self.p.complete(prompt, 1, kv_transfer_params=parameters)
        return parameters

    def tokens(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        """Of the decode server, the prefill server being given the same request for one token, under one pair."""
        parameters = {"kv_transfer_params": {"pdbus_pair": secrets.token_hex(16)}}
        first = self._both.submit(self.p.complete, prompt, 1, **parameters)
        answer = self.d.tokens(prompt, max_tokens, **parameters, **more)
        first.result(ANSWER_S)
        return answer

    def submit(self, call: Any, *args: Any, **more: Any) -> Any:
        return self._both.submit(call, *args, **more)


class StockPair:
    """The same with vLLM's NixlConnector, for comparison."""

    def __init__(self, model: Path, logs: Path) -> None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        self.p, self.d = (
            Server(
                model, logs / f"stock-{core}.log", core, transfer, VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
                VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()),
            )
            for core in range(2)
        )  # fmt: skip

    def __enter__(self) -> StockPair:
        try:
            self.p.wait_ready()
            self.d.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.p.kill()
        self.d.kill()

    def prefilled(self, prompt: Sequence[int]) -> dict[str, Any]:
        """As `Pair.prefilled`."""
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        found: dict[str, Any] = self.p.complete(prompt, 1, kv_transfer_params=asked)["kv_transfer_params"]
        return found
