"""The shell of the triggers: what changes while it reads /proc, and readings that take long."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from gpuserver.core.observe.sockets import LISTENS, Socket
from gpuserver.core.states.idle import Step
from gpuserver.core.states.standby import NO_STANDBY, Cause, Standby
from gpuserver.runtime.lifecycle import idle_suspend, surveys, triggers
from gpuserver.runtime.lifecycle.idle_suspend import IdleSuspension
from gpuserver.runtime.lifecycle.ports import SocketOwners, Tables
from gpuserver.runtime.lifecycle.suspension import Suspension
from gpuserver.runtime.lifecycle.triggers import Triggers
from gpuserver.runtime.state import GpuState
from gpuserver.runtime.vgpus import Vgpu
from tests.runtime.test_gangs import PATHS
from tests.runtime.test_gangs import vgpu as made
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.protocol.messages import Suspend

PATIENCE_S = 60.0
LISTENER = Socket("00000000", 8000, "00000000:0000", LISTENS, 7)
PORT = Standby(("tcp:8000",))
HERE = 1
"""The one network namespace."""


def connection(number: int) -> Socket:
    return Socket("0100007F", 8000, f"0100007F:{number:04X}", 0x01, 0)


class Kernel:
    """What /proc says. A reading that is in ``stuck`` waits for its event: the survey of a vGPU, or the tables."""

    def __init__(self) -> None:
        self.inodes: set[int] = {LISTENER.inode}
        self.tables: list[Socket] = [LISTENER]
        self.accepted = 0
        self.stuck: dict[str, threading.Event] = {}
        self.begun: list[str] = []
        self.ended: list[str] = []

    def arrives(self, number: int) -> None:
        self.tables = [*self.tables, connection(number)]
        self.accepted += 1

    def survey(self, vgpu_id: str, *_: object) -> SocketOwners:
        inodes = dict.fromkeys(self.inodes, os.getpid())
        self._read(vgpu_id)
        return SocketOwners({HERE: os.getpid()}, inodes)

    def read_tables(self, spaces: Mapping[int, int], ports: Iterable[int] | None = None) -> Tables:
        if ports is not None:
            self._read("tables")
        return {HERE: list(self.tables)}

    def _read(self, what: str) -> None:
        self.begun.append(what)
        if what in self.stuck:
            self.stuck[what].wait(PATIENCE_S)
        self.ended.append(what)


class Scene:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.vgpus: dict[str, Vgpu] = {}
        self.resumed: list[tuple[Vgpu, Cause]] = []
        self.state: Any = SimpleNamespace(
            vgpus=self.vgpus,
            settings=SimpleNamespace(paths=PATHS),
            tokens=SimpleNamespace(wants=lambda _: False),
        )
        suspension = SimpleNamespace(check=lambda _: None, bring_back=self._bring_back)
        self.triggers = Triggers(cast(GpuState, self.state), cast(Suspension, suspension))

    async def _bring_back(self, vgpu: Vgpu, cause: Cause) -> None:
        self.resumed.append((vgpu, cause))
        resume(vgpu)

    def suspended(self, number: int = 1, standby: Standby = PORT, **spec: Any) -> Vgpu:
        vgpu = made(number, **spec)
        vgpu.link, vgpu.activity = cast(Any, 1), cast(Any, SimpleNamespace(ends=False))
        vgpu.quiesced, vgpu.standby = True, standby
        self.vgpus[vgpu.record.vgpu_id] = vgpu
        return vgpu

    @asynccontextmanager
    async def looking(self) -> AsyncIterator[None]:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                self.state.nursery = nursery
                nursery.start_soon(self.triggers.run)
                yield
                for event in self.kernel.stuck.values():
                    event.set()
                nursery.cancel_scope.cancel()


def resume(vgpu: Vgpu) -> None:
    vgpu.quiesced, vgpu.standby, vgpu.connected_port, vgpu.unheard_ports = False, NO_STANDBY, 0, ()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.005)


async def a_few_rounds() -> None:
    await trio.sleep(4 * triggers.LOOK_S)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    kernel = Kernel()
    monkeypatch.setattr(surveys, "survey", kernel.survey)
    monkeypatch.setattr(surveys, "read_tables", kernel.read_tables)
    monkeypatch.setattr(triggers, "read_tables", kernel.read_tables)
    monkeypatch.setattr(triggers, "count_accepted", lambda _: kernel.accepted)
    monkeypatch.setattr(triggers, "SURVEY_S", 0.05)
    return Scene(kernel)


def test_a_vgpu_that_is_resumed_during_a_survey_keeps_none_of_its_results(scene: Scene) -> None:
    vgpu, kernel = scene.suspended(), scene.kernel
    name = vgpu.record.vgpu_id
    kernel.inodes = set()  # no process listens
    kernel.stuck[name] = threading.Event()

    async def play() -> None:
        async with scene.looking():
            await until(lambda: kernel.begun)
            resume(vgpu)
            kernel.stuck[name].set()
            await until(lambda: kernel.ended)
            await a_few_rounds()
            assert (vgpu.connected_port, vgpu.unheard_ports) == (0, ())

    trio.run(play)


def test_a_vgpu_that_is_resumed_while_the_tables_are_read_has_no_new_connection(scene: Scene) -> None:
    vgpu, kernel = scene.suspended(), scene.kernel
    kernel.stuck["tables"] = threading.Event()

    async def play() -> None:
        async with scene.looking():
            await until(lambda: "tables" in kernel.begun)
            kernel.arrives(1)
            resume(vgpu)
            kernel.stuck["tables"].set()
            await until(lambda: "tables" in kernel.ended)
            await a_few_rounds()
            assert vgpu.connected_port == 0
            assert not scene.resumed

    kernel.arrives(9)
    trio.run(play)


def test_what_a_person_says_during_a_survey_holds(scene: Scene) -> None:
    """``vgpuctl set`` has changed the ports of an idle-suspended vGPU, and a person suspends it meanwhile."""
    vgpu = scene.suspended(standby=NO_STANDBY, idle_suspend_ns="1s", resume_on="tcp:8000")
    vgpu.idle_suspended = (Process(1, 1),)
    kernel, name, said = scene.kernel, vgpu.record.vgpu_id, Standby(at_unix_s=1e12)
    kernel.stuck[name] = threading.Event()

    async def play() -> None:
        async with scene.looking():
            await until(lambda: kernel.begun)
            vgpu.idle_suspended, vgpu.standby = (), said
            kernel.stuck[name].set()
            await until(lambda: kernel.ended)
            await a_few_rounds()
            assert vgpu.standby is said

    trio.run(play)


def test_an_idle_suspended_vgpu_gets_its_new_ports(scene: Scene) -> None:
    vgpu = scene.suspended(standby=NO_STANDBY, idle_suspend_ns="1s", resume_on="tcp:8000")
    vgpu.idle_suspended = (Process(1, 1),)

    async def play() -> None:
        async with scene.looking():
            await until(lambda: vgpu.standby == PORT)
            scene.kernel.arrives(1)
            await until(lambda: vgpu.connected_port == 8000)

    trio.run(play)


def test_triggers_of_other_vgpus_go_on_while_a_survey_is_stuck(scene: Scene) -> None:
    vgpu, other, kernel = scene.suspended(1), scene.suspended(2), scene.kernel
    kernel.stuck[vgpu.record.vgpu_id] = threading.Event()

    async def play() -> None:
        async with scene.looking():
            await until(lambda: len(kernel.begun) >= 2)
            kernel.arrives(1)
            await until(lambda: scene.resumed)
            assert scene.resumed == [(other, Cause.CONNECTION)]
            kernel.stuck[vgpu.record.vgpu_id].set()
            await until(lambda: len(scene.resumed) == 2)  # no connection is lost to it

    trio.run(play)


def test_a_stuck_survey_ends_with_an_error_and_holds_one_thread(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "READ_S", 0.05)
    vgpu, kernel = scene.suspended(), scene.kernel
    name = vgpu.record.vgpu_id
    kernel.stuck[name] = threading.Event()

    async def play() -> None:
        async with scene.looking():
            for _ in range(3):
                with pytest.raises(VgpuError, match="gave no answer") as refused:
                    await scene.triggers.prepare(vgpu, Suspend(vgpu=name, resume_on=("tcp:8000",)))
                assert refused.value.code is ErrorCode.UNAVAILABLE
            await until(lambda: "gave no answer" in vgpu.suspend_error)
            assert kernel.begun == [name]
            kernel.arrives(1)
            kernel.stuck[name].set()
            await until(lambda: scene.resumed)
            assert not vgpu.suspend_error

    trio.run(play)


def test_a_program_that_began_to_listen_between_its_sockets_and_the_tables(scene: Scene) -> None:
    vgpu, kernel = scene.suspended(), scene.kernel
    kernel.inodes = set()
    kernel.arrives(1)  # the tables have listener and connection already

    async def play() -> None:
        async with scene.looking():
            await until(lambda: kernel.ended)
            kernel.inodes = {LISTENER.inode}
            await until(lambda: scene.resumed == [(vgpu, Cause.CONNECTION)])

    trio.run(play)


def test_connections_of_another_program_cost_a_few_surveys(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vGPU listens at the same port of another address."""
    vgpu, kernel = scene.suspended(), scene.kernel
    kernel.tables = [LISTENER, Socket("0100007F", 8000, "00000000:0000", LISTENS, 8)]
    kernel.arrives(1)

    async def play() -> None:
        async with scene.looking():
            await until(lambda: kernel.ended.count(vgpu.record.vgpu_id) == 2)
            await trio.sleep(6 * triggers.SURVEY_S)
            assert kernel.ended.count(vgpu.record.vgpu_id) == 2
            assert not scene.resumed

    trio.run(play)


def test_a_vgpu_that_is_used_during_the_survey_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    vgpu, suspended = made(idle_suspend_ns="1s"), list[Standby]()
    steps = iter((Step.SUSPEND, Step.STAY, Step.SUSPEND, Step.SUSPEND))
    monkeypatch.setattr(idle_suspend, "decide", lambda *_: next(steps))

    async def when_idle(_: Vgpu) -> Standby:
        return PORT

    async def suspend_idle(_: Vgpu, standby: Standby) -> None:
        suspended.append(standby)

    state: Any = SimpleNamespace(tokens=SimpleNamespace(wants=lambda _: False, last_event_ns=lambda _: 0))
    idle = IdleSuspension(state, cast(Any, SimpleNamespace(suspend_idle=suspend_idle)), cast(Any, None))
    idle._triggers = cast(Any, SimpleNamespace(when_idle=when_idle))
    watch = idle_suspend.Watch(0, 0)

    async def play() -> None:
        await idle._move(vgpu, watch)
        assert not suspended
        await idle._move(vgpu, watch)
        assert suspended == [PORT]

    trio.run(play)


def test_a_call_ends_the_pause_between_two_checks_of_idle_suspended_vgpus() -> None:
    checked: list[float] = []

    async def play() -> None:
        idle = IdleSuspension(cast(Any, SimpleNamespace(vgpus={"v": None})), cast(Any, None), cast(Any, None))
        idle._check = lambda vgpu: checked.append(trio.current_time())  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(idle.run)
            await trio.sleep(idle_suspend.NEWS_S / 4)
            assert len(checked) == 1
            idle.check_now()
            await trio.sleep(0.001)
            assert len(checked) == 2
            nursery.cancel_scope.cancel()

    trio.run(play, clock=MockClock(autojump_threshold=0))


def test_a_connection_to_a_port_of_an_idle_suspended_vgpu_is_reported(scene: Scene) -> None:
    vgpu = scene.suspended(idle_suspend_ns="1s", resume_on=("tcp:8000",))
    vgpu.idle_suspended = (Process(1, 1),)
    reported = trio.Event()
    scene.triggers.on_connection(reported.set)

    async def play() -> None:
        async with scene.looking():
            await until(lambda: vgpu.record.vgpu_id in scene.kernel.ended)
            await trio.sleep(0.1)
            assert not reported.is_set()
            scene.kernel.arrives(1)
            await reported.wait()

    trio.run(play)
