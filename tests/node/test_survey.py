"""A GPU Server that hangs: waited for once, told of, and heard again. On a clock of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from pydantic import BaseModel

from tests.ctl.fake_node import gpu_reading, process_reading, vgpu_reading
from vgpu.errors import ErrorCode, VgpuError
from vgpu.node import survey
from vgpu.node.servers import ServerProcess
from vgpu.node.survey import LOOK_S, SILENT, StatusCollector
from vgpu.protocol.messages import (
    Forward,
    GetMetrics,
    GetSnapshot,
    MetricsSnapshot,
    ProcessList,
    ProcessReading,
    Snapshot,
)


class Played:
    """Two servers, of which those in ``hung`` answer once ``woken``. ``asked``: GPUs, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes = {i: ServerProcess(i, Path(f"/{i}"), Path(f"/{i}.log"), pid=100 + i, reason="") for i in (0, 1)}
        for process in self.processes.values():
            process.up.set()
            process.settled.set()
        self.survey = StatusCollector(self.processes, simulated=True)
        self.hung: set[int] = set()
        self.woken = trio.Event()
        self.asked: list[int] = []
        self.on_its_way: list[dict[int, bool]] = []
        """By look: whether each GPU has the one vGPU that there is."""
        monkeypatch.setattr(survey, "ask", self.ask)

    async def ask(self, path: Path, forward: Forward, model: type[BaseModel], timeout_s: float) -> Any:
        index = int(path.name)
        if self.on_its_way:
            return self.answer_on_its_way(index)
        self.asked.append(index)
        if index in self.hung:
            with trio.move_on_after(timeout_s):
                await self.woken.wait()
            if not self.woken.is_set():
                raise VgpuError(ErrorCode.TIMEOUT, "no answer")
        gpu, vgpu = gpu_reading(index=index), vgpu_reading(vgpu_id=f"vgpu-0000000{index}", gpu_index=index)
        snapshot = Snapshot(at_unix_s=1.0, gpus=(gpu,), vgpus=(vgpu,))
        process = ProcessReading.model_validate(process_reading(gpu_index=index, vgpu_id=vgpu.vgpu_id))
        match forward.request:
            case GetSnapshot():
                return snapshot
            case GetMetrics():
                return MetricsSnapshot(snapshot=snapshot, processes=(process,), gpus=(), vgpus=())
            case _:
                return ProcessList(processes=(process,))

    def answer_on_its_way(self, index: int) -> Snapshot:
        here = self.on_its_way[0].pop(index)
        if not self.on_its_way[0]:
            self.on_its_way.pop(0)
        vgpus = (vgpu_reading(vgpu_id="vgpu-00000007", gpu_index=index),) if here else ()
        return Snapshot(at_unix_s=1.0, gpus=(gpu_reading(index=index),), vgpus=vgpus)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def states(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [(gpu.state, gpu.reason) for gpu in snapshot.gpus]


WELL = ("serving", "")
LOST = ("restarting", SILENT)


def test_one_that_hangs_is_waited_for_once_and_heard_when_it_answers(played: Played) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.survey.run)
            assert states(await played.survey.snapshot()) == [WELL, WELL]
            played.hung = {1}
            began = trio.current_time()
            assert states(await played.survey.snapshot()) == [WELL, LOST]
            assert trio.current_time() == began + LOOK_S
            for _ in range(20):
                assert states(await played.survey.snapshot()) == [WELL, LOST]
            metering, listed = await played.survey.meter(0), await played.survey.processes(0)
            assert trio.current_time() == began + LOOK_S
            assert states(metering.snapshot) == [WELL, LOST]
            assert [process.gpu_index for process in (*metering.processes, *listed.processes)] == [0, 0]
            assert listed.silent_gpus == (1,)
            assert [(vgpu.gpu_index, vgpu.state) for vgpu in metering.snapshot.vgpus] == [
                (0, "running"),
                (1, "restarting"),  # as it was said to be
            ]
            await trio.sleep(600)
            assert states(await played.survey.snapshot()) == [WELL, LOST]
            played.woken.set()
            await trio.sleep(survey.AGAIN_S)
            began = trio.current_time()
            assert states(await played.survey.snapshot()) == [WELL, WELL]
            assert (await played.survey.processes(0)).silent_gpus == ()
            assert trio.current_time() == began
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("first", ["meter", "processes"])
def test_whoever_asks_first_waits_for_all(first: str, played: Played) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.survey.run)
            played.hung = {0}
            before = trio.current_time()
            await getattr(played.survey, first)(0)
            assert trio.current_time() == before + LOOK_S
            (silent, other) = (await played.survey.snapshot()).gpus
            assert (silent.state, silent.name, other.state) == ("failed", "unknown", "serving")  # it never said a word
            assert trio.current_time() == before + LOOK_S
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_server_after_it_is_asked_like_any_other(played: Played) -> None:
    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.survey.run)
            await played.survey.snapshot()
            played.hung = {1}
            await played.survey.snapshot()
            played.processes[1].up = trio.Event()
            assert states(await played.survey.snapshot()) == [WELL, LOST]
            played.hung = set()
            played.processes[1].up.set()
            assert states(await played.survey.snapshot()) == [WELL, WELL]
            await trio.sleep(60)
            played.asked.clear()
            await trio.sleep(600)
            assert played.asked == []  # nobody listens for the one that is gone
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_one_that_changes_its_gpu_while_both_are_asked_is_there(played: Played) -> None:
    async def run() -> None:
        before, torn, after = {0: True, 1: False}, {0: False, 1: False}, {0: False, 1: True}
        played.on_its_way = [dict(look) for look in (before, torn, after)]
        assert [vgpu.gpu_index for vgpu in (await played.survey.snapshot()).vgpus] == [0]
        assert [vgpu.gpu_index for vgpu in (await played.survey.snapshot()).vgpus] == [1]
        played.on_its_way = [dict(look) for look in (torn, torn)]
        assert (await played.survey.snapshot()).vgpus == (), "it was removed"
        played.on_its_way = [dict(torn)]
        assert (await played.survey.snapshot()).vgpus == (), "asked once"

    trio.run(run)
