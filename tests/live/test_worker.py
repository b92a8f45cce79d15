"""The worker as a real process: over a real slab and a real channel, driven as control drives it."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.messages import Sampling
from pdbus.bus.wire import Declared, pack_u32, replace
from pdbus.connector.channel import ControlChannel, endpoint_in
from pdbus.connector.ipc import (
    FromWorker,
    ProbeWorker,
    RowResult,
    SeqClose,
    SeqForce,
    SeqOpen,
    Step,
    StepDone,
    StepRow,
    StopWorker,
    WorkerAlive,
    WorkerArgs,
    WorkerFailed,
    WorkerReady,
)
from pdbus.connector.process import Child, Exit, spawn
from pdbus.connector.run_directory import RunDirectory
from pdbus.connector.slab import Slab
from pdbus.nodes.engines.coded import CodedEngine, check_slab, coded_geometry

pytestmark = pytest.mark.live

BLOCKS = 8
PROMPT = list(b"once upon a time")
ANSWER_WITHIN_S = 30


class Worker:
    """A worker process, and what it has said."""

    def __init__(self, args: WorkerArgs, slab: Slab) -> None:
        self.args = args
        self.slab = slab
        self.said: asyncio.Queue[FromWorker] = asyncio.Queue()
        self.channel = ControlChannel(args.endpoint, FromWorker, self.said.put_nowait)
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.child: Child

    async def start(self) -> None:
        self.child = await spawn("pdbus.nodes.worker", self.args, on_exit=self.ended.set_result)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.said.get(), ANSWER_WITHIN_S)

    async def exit_code(self) -> int:
        return (await asyncio.wait_for(asyncio.shield(self.ended), ANSWER_WITHIN_S)).code

    async def tell(self, *messages: Declared) -> None:
        for message in messages:
            self.channel.send(message)

    async def step(self, step: int, *rows: StepRow) -> tuple[RowResult, ...]:
        await self.tell(Step(step=step, rows=rows))
        done = await self.next()
        assert isinstance(done, StepDone) and done.step == step
        return done.rows

    async def close(self) -> None:
        await self.child.stop(lambda: self.channel.send(StopWorker()), 5.0)
        self.channel.close()


@asynccontextmanager
async def started(**changes: object) -> AsyncIterator[Worker]:
    """A worker process that has just been spawned, coded unless told otherwise."""
    geometry = coded_geometry(4)
    directory = RunDirectory()
    slab = Slab.create(BLOCKS * geometry.block_bytes)
    args = WorkerArgs(
        endpoint=endpoint_in(directory.path, "worker"), slab_path=slab.path, slab_bytes=slab.size_bytes,
        blocks=BLOCKS, geometry=geometry, engine="coded", model="",
    )  # fmt: skip
    worker = Worker(replace(args, **changes), slab)
    try:
        await worker.start()
        yield worker
        await worker.close()
    finally:
        slab.close()
        directory.close()


def with_worker(scenario: Callable[[Worker], Awaitable[None]], **changes: object) -> None:
    async def run() -> None:
        async with started(**changes) as worker:
            await scenario(worker)

    asyncio.run(run())


def in_process_answer(length: int) -> list[int]:
    """The tokens of the same engine in this process."""
    geometry = coded_geometry(4)
    memory = bytearray(BLOCKS * geometry.block_bytes)
    args = WorkerArgs(endpoint="", slab_path="", slab_bytes=0, blocks=BLOCKS, geometry=geometry, engine="", model="")
    engine = CodedEngine(args, memory)
    engine.open(1, PROMPT, Sampling())
    rows = [StepRow(seq=1, start=0, count=len(PROMPT), new_blocks=pack_u32(range(BLOCKS)), sample=True)]
    rows += [StepRow(seq=1, start=len(PROMPT) + i, count=1, sample=True) for i in range(length - 1)]
    return [engine.step([row])[0].token for row in rows]


def test_a_sequence_from_open_to_close() -> None:
    """Steps are queued before the last one's tokens are back, as control does; the slab is shared memory."""

    async def scenario(worker: Worker) -> None:
        ready = await worker.next()
        assert isinstance(ready, WorkerReady)
        assert (ready.pid, ready.vocab_size) == (worker.child.pid, 256)
        await worker.tell(
            SeqOpen(seq=1, prompt=pack_u32(PROMPT), sampling=Sampling()),
            Step(step=1, rows=(StepRow(seq=1, start=0, count=9, new_blocks=pack_u32([3, 1, 4])),)),
            Step(step=2, rows=(StepRow(seq=1, start=9, count=7, new_blocks=pack_u32([0, 5]), sample=True),)),
            Step(step=3, rows=(StepRow(seq=1, start=16, count=1, sample=True),)),
            SeqClose(seq=1),
        )
        done = [await worker.next() for _ in range(3)]
        assert [d.step for d in done] == [1, 2, 3]
        assert done[0].rows == (RowResult(seq=1),)
        assert [d.rows[0].token for d in done[1:]] == in_process_answer(2)
        assert all(d.compute_ns > 0 for d in done)
        assert check_slab(worker.slab.memory, worker.args.geometry, BLOCKS, [3, 1, 4, 0], PROMPT) == ""
        await worker.tell(StopWorker())
        assert await worker.exit_code() == 0

    with_worker(scenario)


def test_a_forced_token_and_a_wrong_byte() -> None:
    """A decode node's life: KV that others wrote, the first token from elsewhere, and a byte gone wrong."""

    async def scenario(worker: Worker) -> None:
        await worker.next()
        first, second, third = in_process_answer(3)
        await worker.tell(SeqOpen(seq=1, prompt=pack_u32(PROMPT), sampling=Sampling()))
        await worker.step(1, StepRow(seq=1, start=0, count=16, new_blocks=pack_u32(range(6))))
        await worker.tell(SeqForce(seq=1, tokens=pack_u32([first])))
        (result,) = await worker.step(2, StepRow(seq=1, start=16, count=1, sample=True))
        assert (result.token, result.wrong_kv) == (second, "")
        worker.slab.memory[2 * worker.args.geometry.block_bytes] ^= 0x10
        (result,) = await worker.step(3, StepRow(seq=1, start=17, count=1, sample=True))
        assert result.token != third
        assert result.wrong_kv.startswith("block 2 layer 0 K head 0 slot 0 channel 0: position 8 ")

    with_worker(scenario)


def test_a_probe_goes_through_the_worker() -> None:
    async def scenario(worker: Worker) -> None:
        await worker.next()
        await worker.tell(ProbeWorker(probe=7))
        assert await worker.next() == WorkerAlive(probe=7)

    with_worker(scenario)


@pytest.mark.parametrize(
    ("changes", "setting", "problem"),
    [
        ({"engine": "jax"}, "--engine", "'jax' is neither torch nor coded"),
        ({"coded_vocab": 3}, "coded_vocab", "3 is too few tokens; at least 16"),
        ({"cpus": (4095,)}, "--cpus", "4095: Invalid argument"),
        (
            {"slab_path": "/proc/self/fd/999"},
            "",
            "cannot open the KV slab at /proc/self/fd/999: No such file or directory",
        ),
    ],
)
def test_what_cannot_work_is_one_line_that_names_the_setting(
    changes: dict[str, object], setting: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(worker: Worker) -> None:
        assert await worker.next() == WorkerFailed(problem=problem, setting=setting)
        assert await worker.exit_code() == (2 if setting else 1)

    with_worker(scenario, **changes)
    assert "Traceback" not in capfd.readouterr().err


def test_a_bug_is_reported_with_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(worker: Worker) -> None:
        await worker.next()
        await worker.tell(Step(step=1, rows=(StepRow(seq=9, start=0, count=1),)))
        assert await worker.next() == WorkerFailed(problem="LocalProtocolError: sequence 9 is not open")
        assert await worker.exit_code() == 1

    with_worker(scenario)


def test_the_worker_keeps_to_its_cores() -> None:
    async def scenario(worker: Worker) -> None:
        await worker.next()
        assert os.sched_getaffinity(worker.child.pid) == {cpu}

    cpu = max(os.sched_getaffinity(0))
    with_worker(scenario, cpus=(cpu,))


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A control process killed with -9 must leave no worker behind."""
    program = """
import asyncio, sys
from pdbus.connector.channel import ControlChannel
from pdbus.connector.ipc import FromWorker, WorkerArgs
from pdbus.connector.process import spawn
from pdbus.connector.run_directory import RunDirectory
from pdbus.connector.slab import Slab
from pdbus.nodes.engines.coded import coded_geometry

async def main():
    geometry = coded_geometry(4)
    slab = Slab.create(geometry.block_bytes)
    said = asyncio.Queue()
    channel = ControlChannel(sys.argv[1], FromWorker, said.put_nowait)
    args = WorkerArgs(endpoint=sys.argv[1], slab_path=slab.path, slab_bytes=slab.size_bytes, blocks=1,
                      geometry=geometry, engine="coded", model="")
    child = await spawn("pdbus.nodes.worker", args, on_exit=print)
    await said.get()
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    control = subprocess.Popen([sys.executable, "-c", program, f"{tmp_path}/w"], stdout=subprocess.PIPE, text=True)
    assert control.stdout is not None
    worker = os.pidfd_open(int(control.stdout.readline()))
    control.kill()
    control.wait()
    assert _readable(worker, ANSWER_WITHIN_S)
    os.close(worker)
    control.stdout.close()


def _readable(fd: int, timeout_s: float) -> bool:
    """Whether the process behind a pidfd has ended."""
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_the_coded_worker_never_imports_torch() -> None:
    """Importing torch takes seconds and hundreds of megabytes; chaos tests start dozens of coded workers."""
    program = """
import sys
import pdbus.nodes.worker as worker
from pdbus.connector.ipc import WorkerArgs
from pdbus.nodes.engines.coded import coded_geometry
geometry = coded_geometry(4)
args = WorkerArgs(endpoint="", slab_path="", slab_bytes=0, blocks=1, geometry=geometry, engine="coded", model="")
worker.make_engine(args, bytearray(geometry.block_bytes)).warm_up()
print([name for name in ("torch", "nixl", "transformers") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
