"""--idle-suspend on a simulated node: who uses nothing leaves the GPU, and comes back by itself when it wants to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cython_ext.simengine import Engine
from tests.integration.fixtures import nodes, started
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import GIB, Spoken, on_gpu, state
from vgpu.ctl.programs import attachment
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import EventReading, VgpuStatus
from vgpu.spec import VgpuChanges

OWNED = 80 << 20
"""Of one that is swapped: what it has is copied indeed."""

BODY = """
import sys
from ctypes import byref, c_uint64, c_void_p
from tests.hook.app import App
app = App()
size = int(sys.argv[1])
block = app.allocate(size)
app.call("cuMemsetD8_v2", c_uint64(block), 7, 4096)
app.synchronize()
kernel = app.kernel(1.0)
event, stream = c_void_p(), c_void_p()
app.call("cuEventCreate", byref(event), 0)
def launch():
    kernel.launch()
    app.synchronize()
def read():
    assert app.read(block, 4096) == bytes([7]) * 4096
print("started", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
CALLS = {
    "a launch": "launch()",
    "a copy": "read()",
    "an allocation": "app.allocate(4096)",
    "a synchronisation": "app.synchronize()",
    "a synchronisation of the context": "app.call('cuCtxSynchronize')",
    "a fill": "app.call('cuMemsetD8_v2', c_uint64(block), 7, 16)",
    "a question for an event": "app.call('cuEventQuery', event)",
    "an event": "app.call('cuEventRecord', event, app.stream)",
    "a stream": "app.call('cuStreamCreate', byref(stream), 1)",
}


class Idle(Spoken):
    """A program that does what it is told, and nothing else."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, memory_bytes: int = GIB) -> None:
        super().__init__(node, vgpu, BODY, str(memory_bytes))

    def does(self, line: str) -> None:
        self.say(line)
        assert self.heard() == "done"


shared, node = nodes(1)
programs = started("programs")


def sleeper(node: SimulatedNode, **fields: object) -> VgpuStatus:
    return node.create(**({"sm_percent": 30, "memory_bytes": "20G", "idle_suspend_ns": "1s"} | fields))


def idle_suspends(node: SimulatedNode, vgpu: VgpuStatus) -> None:
    """Until it does, and its programs have nothing on the GPU but what cannot be swapped."""

    def away() -> bool:
        with node.link() as link:
            pids = {process.pid for process in link.processes(vgpu.vgpu_id).processes}
        swapped = vgpu.spec.oversubscribe is not None and away_bytes(node, vgpu) >= OWNED
        on_card = sum(taken for pid, taken in on_gpu(node, vgpu.gpu_index).items() if pid in pids)
        return state(node, vgpu) == "idle-suspended" and (swapped or on_card == 0)

    eventually(away, "it is suspended while idle")


@contextmanager
def events(node: SimulatedNode) -> Iterator[list[EventReading]]:
    """What happens from now on; whole at the end."""
    seen: list[EventReading] = []
    with node.link() as link:
        notices = link.watch(snapshots=True, events=True)
        next(notices)  # it is watched from here on
        yield seen
        with node.link() as other:
            other.set(other.list()[0].vgpu_id, VgpuChanges.parse(name="last"))
        for notice in notices:
            if notice.event is not None:
                seen.append(notice.event)
                if notice.event.kind == "changed" and notice.event.fields.get("name") == "last":
                    return


@pytest.mark.slow
def test_whatever_it_calls_brings_it_back(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Three programs doze at a time, each in its own vGPU, and are brought back one after the other."""
    vgpus = [sleeper(node) for _ in range(3)]
    idle = [Idle(node, vgpu, 10 * GIB) for vgpu in vgpus]
    programs += idle
    calls = list(CALLS.values())
    assert len(calls) % len(idle) == 0
    while calls:
        for vgpu in vgpus:
            idle_suspends(node, vgpu)
        for program in idle:
            program.does(calls.pop())
            assert on_gpu(node)[program.popen.pid] > 10 * GIB
    for vgpu, program in zip(vgpus, idle, strict=True):
        idle_suspends(node, vgpu)
        program.does("read()")


def test_its_place_is_kept(node: SimulatedNode, programs: list[Spoken]) -> None:
    vgpu = sleeper(node, sm_percent=80, memory_bytes="100G")
    programs.append(Idle(node, vgpu, 90 * GIB))
    idle_suspends(node, vgpu)
    for fields in ({"sm_percent": 30, "memory_bytes": "1G"}, {"sm_percent": 10, "memory_bytes": "60G"}):
        with pytest.raises(VgpuError) as refused:
            node.create(**fields)
        assert refused.value.code is ErrorCode.NO_ROOM
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges.parse(memory_bytes="95G"))
    assert state(node, vgpu) == "idle-suspended"
    programs[0].say("read()")
    assert programs[0].heard() == "done"


def test_several_programs_and_one_that_comes(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Each of them is brought back by any of them; who starts meanwhile is let in, and brings them back."""
    vgpu = sleeper(node)
    programs += [Idle(node, vgpu), Idle(node, vgpu)]
    idle_suspends(node, vgpu)
    for program in programs:
        program.say("read()")
    assert [program.heard() for program in programs] == ["done", "done"]
    idle_suspends(node, vgpu)
    programs.append(Idle(node, vgpu, 2 * GIB))
    eventually(lambda: sum(on_gpu(node).values()) > 4 * GIB, "all are back")
    idle_suspends(node, vgpu)
    programs.pop(0).end()
    assert isinstance(programs[0], Idle)
    programs[0].does("launch()")


@pytest.mark.slow
def test_nobody_who_works_dozes(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Nor who only copies. A launch takes a millisecond, a pause less than it takes to be suspended."""
    vgpus = [sleeper(node), sleeper(node)]
    programs += [Idle(node, vgpu) for vgpu in vgpus]
    with events(node) as seen:
        for program, work in zip(programs, ("launch()", "read()"), strict=True):
            program.say(f"import time; [({work}, time.sleep(0.1)) for _ in range(40)]")
        assert [program.heard() for program in programs] == ["done", "done"]
    assert not [event for event in seen if event.kind == "suspended"]
    for vgpu in vgpus:
        idle_suspends(node, vgpu)


def test_a_dozing_program_ends_as_ever(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Its exit handlers call the driver."""
    vgpu = sleeper(node)
    program = Idle(node, vgpu)
    programs.append(program)
    program.does("import atexit; atexit.register(lambda: app.call('cuCtxSynchronize') or print('cleaned', flush=True))")
    idle_suspends(node, vgpu)
    program.say("sys.exit(3)")
    assert program.heard() == "cleaned"
    assert program.popen.wait() == 3
    eventually(lambda: state(node, vgpu) == "idle", "no program is left")


@pytest.mark.slow
def test_killed_servers_and_brokers(node: SimulatedNode, programs: list[Spoken]) -> None:
    """The next ones know that it is idle-suspended, and not for good."""
    vgpu = sleeper(node)
    program = Idle(node, vgpu)
    programs.append(program)
    for broker_too in (False, True):
        idle_suspends(node, vgpu)
        reading = node.reading(vgpu.vgpu_id)
        assert reading is not None
        server = node.server_pid()
        if broker_too:
            assert reading.broker_pid
            os.kill(reading.broker_pid, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        eventually(lambda server=server: node.server_pid() != server, "another server runs")
        eventually(lambda: state(node, vgpu) == "idle-suspended", "it stays idle-suspended")
        assert sum(on_gpu(node).values()) == 0
        program.does("read()")
    idle_suspends(node, vgpu)
    program.does("launch()")


@pytest.mark.slow
def test_a_server_killed_on_the_way(node: SimulatedNode, programs: list[Spoken]) -> None:
    """At whatever moment of suspending or coming back: the program notices a pause."""
    vgpu = sleeper(node)
    program = Idle(node, vgpu)
    programs.append(program)
    for looks in (0, 1, 2, 4, 8, 16):
        eventually(lambda: state(node, vgpu) == "idle-suspended", "it is about to doze")
        if looks % 4:  # else it is on its way still
            idle_suspends(node, vgpu)
        program.say("launch(); read()")
        for _ in range(looks):
            node.reading(vgpu.vgpu_id)  # so long
        os.kill(node.server_pid(), signal.SIGKILL)
        assert program.heard() == "done"


@pytest.mark.slow
def test_a_persons_suspension_goes_before(node: SimulatedNode, programs: list[Spoken]) -> None:
    vgpu = sleeper(node)
    program = Idle(node, vgpu)
    programs.append(program)
    idle_suspends(node, vgpu)
    with node.link() as link:
        assert link.suspend(vgpu.vgpu_id).state == "suspended"
        program.say("read()")
        run = [sys.executable, "-m", "vgpu.ctl", "exec", vgpu.vgpu_id, "--", sys.executable, "-m", "vgpu.workload"]
        ran = subprocess.run(run, env=node.environment, capture_output=True, text=True, check=False)
        assert f"{vgpu.vgpu_id} is suspended; vgpuctl resume {vgpu.vgpu_id}" in ran.stderr
        assert node.create(sm_percent=90, memory_bytes="130G").state == "idle"
        assert state(node, vgpu) == "suspended"
        with pytest.raises(VgpuError) as refused:
            link.resume(vgpu.vgpu_id)
        assert refused.value.code is ErrorCode.NO_ROOM
        link.remove(next(v.vgpu_id for v in link.list() if v.vgpu_id != vgpu.vgpu_id))
        link.resume(vgpu.vgpu_id)
    assert program.heard() == "done"


def test_what_else_ends_it(node: SimulatedNode, programs: list[Spoken]) -> None:
    vgpu = sleeper(node)
    programs.append(Idle(node, vgpu))
    with node.link() as link:
        idle_suspends(node, vgpu)
        assert link.resume(vgpu.vgpu_id).state == "idle"
        idle_suspends(node, vgpu)
        assert link.set(vgpu.vgpu_id, VgpuChanges.parse(idle_suspend_ns="off")).spec.idle_suspend_ns == 0
        eventually(lambda: state(node, vgpu) == "idle", "it is to doze no more")
        link.set(vgpu.vgpu_id, VgpuChanges.parse(idle_suspend_ns="1s"))
        idle_suspends(node, vgpu)
        link.remove(vgpu.vgpu_id, force=True)
        programs[0].say("read()")
        assert programs[0].heard() == "done", "it finds out"


@pytest.mark.slow
def test_its_time_to_live_ends_while_it_dozes(node: SimulatedNode, programs: list[Spoken]) -> None:
    vgpu = sleeper(node)
    programs.append(Idle(node, vgpu))
    idle_suspends(node, vgpu)
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges.parse(ttl_ns="1ms"))
    eventually(lambda: node.reading(vgpu.vgpu_id) is None, "it is removed")
    programs[0].say("read()")
    assert programs[0].heard() == "done"


def test_no_room_for_now(node: SimulatedNode, programs: list[Spoken]) -> None:
    """Somebody in no vGPU has taken its memory: it is told, and tried again until there is room."""
    vgpu = sleeper(node, memory_bytes="100G")
    program = Idle(node, vgpu, 90 * GIB)
    programs.append(program)
    idle_suspends(node, vgpu)
    outsider = node.popen(
        [sys.executable, "-c", BODY, str(100 * GIB)],
        env={**node.environment, **outside_environment(vgpu)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert outsider.stdout is not None
        assert outsider.stdout.readline() == "started\n"
        program.say("read()")

        def told() -> bool:
            reading = node.reading(vgpu.vgpu_id)
            return reading is not None and any("no room for its memory" in warning for warning in reading.warnings)

        eventually(told, "it is told")
        assert state(node, vgpu) == "idle-suspended"
    finally:
        outsider.kill()
        outsider.communicate()
    assert program.heard() == "done"
    eventually(lambda: (reading := node.reading(vgpu.vgpu_id)) and not reading.warnings, "that is over")


def outside_environment(vgpu: VgpuStatus) -> dict[str, str]:
    """Of a program on the simulated GPU in no vGPU."""
    found = attachment([vgpu]).environment({})
    return {name: value for name, value in found.items() if name not in {"VGPU_ID", "LD_PRELOAD"}}


def away_bytes(node: SimulatedNode, vgpu: VgpuStatus) -> int:
    reading = node.reading(vgpu.vgpu_id)
    assert reading is not None
    return reading.memory_away_bytes


@pytest.mark.slow
def test_swapped_ones(node: SimulatedNode, programs: list[Spoken]) -> None:
    """They are swapped out."""
    vgpu = sleeper(node, memory_bytes="2G", oversubscribe="swap")
    program = Idle(node, vgpu, OWNED)
    programs.append(program)
    for call in ("read()", "launch()", "app.allocate(4096)"):
        idle_suspends(node, vgpu)
        program.does(call)
        assert away_bytes(node, vgpu) == 0
    idle_suspends(node, vgpu)
    program.does("app.call('cuEventQuery', event)")  # which the driver answers all the same
    assert state(node, vgpu) == "idle-suspended"
    with node.link() as link:
        assert link.suspend(vgpu.vgpu_id).state == "suspended"
        link.resume(vgpu.vgpu_id)
    program.does("read()")


@pytest.mark.slow
def test_what_is_swapped_may_have_the_place_of_who_dozes(node: SimulatedNode, programs: list[Spoken]) -> None:
    """For as long as it does. There is room for one of the two beside what the third was promised."""
    engine = Engine(node.paths.runtime / "sim", 0)
    free = 2 * engine.context_bytes + OWNED * 3 // 2
    hard = sleeper(node, memory_bytes=engine.memory_bytes - free, idle_suspend_ns="off")
    first = Idle(node, hard, 10 * GIB)
    programs.append(first)
    swapped = [node.create(sm_percent=20, memory_bytes="2G", oversubscribe="swap") for _ in range(2)]
    others = []
    for vgpu in swapped:
        others.append(Idle(node, vgpu, OWNED))
        programs.append(others[-1])

    def all_there() -> bool:
        for program in others:
            program.does("launch()")
        return not any(away_bytes(node, vgpu) for vgpu in swapped)

    eventually(lambda: not all_there(), "the contexts of both are seen, too")
    with node.link() as link:
        link.set(hard.vgpu_id, VgpuChanges.parse(idle_suspend_ns="1s"))
    idle_suspends(node, hard)
    eventually(all_there, "both are on the card")
    with node.link() as link:
        link.set(hard.vgpu_id, VgpuChanges.parse(idle_suspend_ns="off"))
    first.does("read()")
    assert any(away_bytes(node, vgpu) for vgpu in swapped)
    assert not all_there()
    for program in programs:
        program.say("read()")
        assert program.heard() == "done"


@pytest.mark.slow
def test_it_moves_and_goes_on() -> None:
    with SimulatedNode(2) as node:
        vgpu = sleeper(node)
        program = Idle(node, vgpu)
        try:
            idle_suspends(node, vgpu)
            with node.link() as link:
                moved = link.migrate(vgpu.vgpu_id, str(1 - vgpu.gpu_index))
            assert moved.gpu_index != vgpu.gpu_index
            program.does("read()")
            idle_suspends(node, vgpu)
            program.does("launch()")
        finally:
            program.end()


@pytest.mark.slow
def test_where_it_is_not_possible(node: SimulatedNode) -> None:
    with pytest.raises(VgpuError, match="managed memory"):
        sleeper(node, oversubscribe="managed")
    sleeper(node)
    with node.link() as link, pytest.raises(VgpuError, match="MPS does not allow") as refused:
        link.set_gpu("0", mode="spatial")
    assert refused.value.code is ErrorCode.MODE
    with SimulatedNode(1, mode="spatial") as spatial:
        with pytest.raises(VgpuError, match="under MPS cannot be suspended") as refused:
            sleeper(spatial)
        assert refused.value.code is ErrorCode.MODE
        vgpu = sleeper(spatial, idle_suspend_ns="off")
        with spatial.link() as link, pytest.raises(VgpuError, match="under MPS cannot be suspended"):
            link.set(vgpu.vgpu_id, VgpuChanges.parse(idle_suspend_ns="10m"))


ENDS = """
# Ends as programs do, by the driver's own handler, which runs after the hook's; but only after some time.
from ctypes import CDLL, c_size_t, c_void_p, cast
from tests.hook.app import App
libc, driver = CDLL(None), CDLL("libcuda.so.1")
libc.__cxa_atexit(cast(driver.cuCtxSynchronize, c_void_p), None, None)
libc.__cxa_atexit(cast(libc.sleep, c_void_p), c_void_p(4), None)
app = App()
app.allocate(1 << 30)
print("started", flush=True)
"""


def test_one_that_is_about_to_end_does_not_doze_off(node: SimulatedNode, programs: list[Spoken]) -> None:
    """It would never end: its last calls wait, and nobody is left in it to say so."""
    vgpu = sleeper(node)
    programs.append(Spoken(node, vgpu, ENDS))
    assert programs[0].popen.wait(30) == 0
    eventually(lambda: state(node, vgpu) == "idle", "nobody is left in it")
