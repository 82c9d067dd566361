"""Suspending and resuming vGPUs of a simulated node: their programs stand still, and their memory is others'."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.integration.fixtures import nodes, started
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import GIB, Worker, on_gpu, state
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import VgpuStatus

CONTEXTS = 800 << 20
"""Of two programs: less than what they take."""


shared, node = nodes(1)
programs = started("programs")


def used_and_peak(node: SimulatedNode, vgpu: VgpuStatus) -> tuple[int, int]:
    reading = node.reading(vgpu.vgpu_id)
    assert reading is not None
    return reading.memory_used_bytes, reading.memory_peak_bytes


def test_others_have_its_memory_and_share_until_it_is_resumed(node: SimulatedNode, programs: list[Worker]) -> None:
    vgpu = node.create(sm_percent=80, memory_bytes="100G")
    programs += [Worker(node, vgpu, 30 * GIB), Worker(node, vgpu, 40 * GIB)]
    for program in programs:
        program.goes_on()
    _, peak = eventually(lambda: (two := used_and_peak(node, vgpu))[1] > 70 * GIB + CONTEXTS and two, "their contexts")
    with node.link() as link:
        assert link.suspend(vgpu.vgpu_id).state == "suspended"
        assert link.suspend(vgpu.vgpu_id).state == "suspended"
    assert all(program.stands_still() for program in programs)
    assert sum(on_gpu(node).values()) == 0
    eventually(lambda: used_and_peak(node, vgpu)[0] <= 70 * GIB, "its contexts are seen gone")
    assert used_and_peak(node, vgpu)[1] == peak
    with node.link() as link:
        advice = link.inspect(vgpu.vgpu_id).advice
        assert advice is None or "--mem" not in advice.text
    other = node.create(sm_percent=60, memory_bytes="80G")
    programs.append(Worker(node, other, 75 * GIB))
    programs[2].goes_on()
    with node.link() as link:
        with pytest.raises(VgpuError) as refused:
            link.resume(vgpu.vgpu_id)
        assert (refused.value.code, refused.value.hint) == (ErrorCode.NO_ROOM, "make room: vgpuctl rm ID")
        assert state(node, vgpu) == "suspended"
        assert all(program.stands_still() for program in programs[:2])
        link.remove(other.vgpu_id, force=True)
        programs.pop().end()
        eventually(lambda: sum(on_gpu(node).values()) == 0, "the driver has let go")
        assert link.resume(vgpu.vgpu_id).state != "suspended"
        assert link.resume(vgpu.vgpu_id).state != "suspended"
    for program in programs:
        program.goes_on()
    assert sum(on_gpu(node).values()) > 70 * GIB


@pytest.mark.slow
def test_its_counters_go_on_meanwhile_over_a_restart_and_to_its_end(
    node: SimulatedNode, programs: list[Worker]
) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="8G")
    programs.append(Worker(node, vgpu, GIB))
    beside = node.create(sm_percent=30, memory_bytes="8G")  # alone, the first one's token would not end
    programs.append(Worker(node, beside, GIB))
    told: list[tuple[int, ...]] = [(0, 0, 0, 0)]

    def goes_on() -> bool:
        """False once it is gone."""
        reading = node.reading(vgpu.vgpu_id)
        if reading is None:
            return False
        told.append((reading.tokens, reading.held_ns, reading.busy_ns, reading.overuse_ns))
        assert all(now >= before for before, now in zip(*told[-2:], strict=True)), told
        return True

    eventually(lambda: goes_on() and min(told[-1][:3]) > 0, "it has had the GPU")
    with node.link() as link:
        link.suspend(vgpu.vgpu_id)
        assert goes_on()
        assert link.inspect(vgpu.vgpu_id).vgpu.tokens == told[-1][0]
    os.kill(node.server_pid(), signal.SIGKILL)
    eventually(lambda: state(node, vgpu) == "restarting", "its server is gone")
    eventually(lambda: state(node, vgpu) == "suspended", "its server is back")
    assert goes_on()
    with node.link() as link:
        link.resume(vgpu.vgpu_id)
        assert goes_on()
        programs[0].goes_on()
        assert goes_on()
        removal = threading.Thread(target=link.remove, args=(vgpu.vgpu_id,), kwargs={"force": True})
        removal.start()
        eventually(lambda: not goes_on(), "it is gone")
        removal.join()


def test_a_new_program_is_turned_away_meanwhile(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="4G")
    with node.link() as link:
        link.suspend(vgpu.vgpu_id)
        run = [sys.executable, "-m", "vgpu.ctl", "exec", vgpu.vgpu_id, "--", sys.executable, "-m", "vgpu.workload"]
        ran = subprocess.run(run, env=node.environment, capture_output=True, text=True, check=False)
        assert ran.returncode != 0
        assert f"{vgpu.vgpu_id} is suspended; vgpuctl resume {vgpu.vgpu_id}" in ran.stderr
        link.resume(vgpu.vgpu_id)
    ran = subprocess.run([*run, "--seconds", "0.1"], env=node.environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_work_that_never_ends_is_not_suspended_and_goes_on(
    node: SimulatedNode, programs: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits for a word of the host's cannot be waited for; a neighbour's work is none of its business."""
    vgpu = node.create(sm_percent=50, memory_bytes="8G")
    body = """
import sys
from ctypes import byref, c_uint, c_uint64, c_void_p
from tests.hook.app import App
app = App()
page = c_void_p()
app.call("cuMemHostAlloc", byref(page), 4096, 0)
app.call("cuStreamWaitValue32_v2", app.stream, c_uint64(page.value), 5, 0)
print("started", flush=True)
sys.stdin.readline()
c_uint.from_address(page.value).value = 5
app.synchronize()
print("done", flush=True)
"""
    stuck = node.program(vgpu, body)
    try:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "started\n"
        programs.append(Worker(node, vgpu, GIB))
        with node.link() as link, pytest.raises(VgpuError, match="did not end within 10 s") as refused:
            link.suspend(vgpu.vgpu_id)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert state(node, vgpu) != "suspended"
        programs[0].goes_on()
        assert stuck.communicate("\n", timeout=60)[0] == "done\n"
    finally:
        stuck.kill()
        stuck.communicate()


@pytest.mark.slow
def test_a_server_that_dies_meanwhile_leaves_nothing_that_cannot_be_resumed(
    node: SimulatedNode, programs: list[Worker]
) -> None:
    """Killed at any moment of a suspension: afterwards it goes on, or is suspended, and then it can be resumed."""
    vgpu = node.create(sm_percent=50, memory_bytes="8G")
    programs.append(Worker(node, vgpu, GIB))
    for delay_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3):
        programs[0].goes_on()

        def suspend() -> None:
            try:
                with node.link() as link:
                    link.suspend(vgpu.vgpu_id)
            except VgpuError:
                pass  # it was killed before it could answer

        asking = threading.Thread(target=suspend)
        asking.start()
        time.sleep(delay_s)
        os.kill(node.server_pid(), signal.SIGKILL)
        asking.join()
        eventually(lambda: node.reading(vgpu.vgpu_id), "the vGPU is back")
        eventually(lambda: state(node, vgpu) not in {"starting", "restarting"}, "its server is")

        def resumed() -> bool:
            with node.link() as link:
                try:
                    return link.resume(vgpu.vgpu_id).state != "suspended"
                except VgpuError:
                    return False  # what the killed server had begun is not through yet

        eventually(resumed, "it is resumed")
    programs[0].goes_on()


def test_a_killed_program_of_a_suspended_vgpu_is_forgotten(node: SimulatedNode, programs: list[Worker]) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="8G")
    programs += [Worker(node, vgpu, GIB), Worker(node, vgpu, GIB)]
    with node.link() as link:
        link.suspend(vgpu.vgpu_id)
        programs.pop(0).end()
        eventually(lambda: node.reading(vgpu.vgpu_id).processes == 1, "one is left")
        link.resume(vgpu.vgpu_id)
    programs[0].goes_on()


def test_removed_while_suspended_its_programs_find_out(node: SimulatedNode, programs: list[Worker]) -> None:
    vgpu = node.create(sm_percent=50, memory_bytes="8G")
    programs.append(Worker(node, vgpu, GIB))
    with node.link() as link:
        link.suspend(vgpu.vgpu_id)
        link.remove(vgpu.vgpu_id, force=True)
    assert programs[0].stands_still()  # its thread has had an error
    assert sum(on_gpu(node).values()) > GIB, "and it is no more frozen"


@pytest.mark.slow
def test_under_mps_nothing_is_suspended() -> None:
    with SimulatedNode(1, mode="spatial") as node:
        vgpu = node.create(sm_percent=30, memory_bytes="4G")
        with node.link() as link, pytest.raises(VgpuError, match="cannot be suspended") as refused:
            link.suspend(vgpu.vgpu_id)
        assert refused.value.code is ErrorCode.MODE
        assert "--mode temporal" in refused.value.hint


def test_the_commands(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=30, memory_bytes="4G", name="sleeper")
    states = []
    for command in ("suspend", "resume"):
        told = subprocess.run(
            [sys.executable, "-m", "vgpu.ctl", command, "sleeper", "-o", "json"],
            env=node.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        states.append(json.loads(told.stdout)["state"])
    assert states == ["suspended", "idle"]
    assert state(node, vgpu) == "idle"
