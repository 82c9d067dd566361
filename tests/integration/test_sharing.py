"""Light programs hold the GPU side by side, under shared leases: who does, when that ends, and what each is charged.

What a program finishes goes by the machine's speed, so nothing here is timed: figures are compared with what the
simulated GPU ran in the same time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from cython_ext.simengine import Engine
from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import Spoken
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges
from vgpu.trace.collect import collect

LIGHT: Final = """
import sys, threading, time
from tests.hook.app import App
kernel_ms, kernels, host_ms, between_ms = (float(word) for word in sys.argv[1:])
app = App()
kernel = app.kernel(kernel_ms)
steps, working = 0, threading.Event()
working.set()
print("started", flush=True)
def answer():
    for line in sys.stdin:
        if line == "stop\\n":
            working.clear()
        elif line == "go\\n":
            working.set()
        print(steps, flush=True)
threading.Thread(target=answer, daemon=True).start()
while working.wait():
    for _ in range(int(kernels)):
        kernel.launch()
        time.sleep(between_ms / 1e3)
    app.synchronize()
    time.sleep(host_ms / 1e3)
    steps += 1
"""
FIFTH: Final = ("0.1", "10", "4", "0")
"""Ten kernels of 0.1 ms, then 4 ms of the host: a demand of a fifth, or less on a slow machine."""
SHORTER: Final = ("0.05", "10", "4", "0")
WHOLE: Final = ("2", "10", "0", "0")
TRAINER: Final = ("3", "50", "0", "2")
"""The host is busy while the GPU is, and launches without waiting."""
MEMORY: Final = 1 << 30


class Program(Spoken):
    """A program that computes in steps."""

    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, what: Sequence[str]) -> None:
        super().__init__(node, vgpu, LIGHT, *what)

    @property
    def steps(self) -> int:
        self.say("steps")
        return int(self.heard())

    def goes_on(self) -> None:
        before = self.steps
        eventually(lambda: self.steps > before + 5, "it works")


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    with SimulatedNode() as running:
        yield running


def beside(node: SimulatedNode, count: int, percent: float = 30, **spec: object) -> list[VgpuStatus]:
    return [node.create(sm_percent=percent, memory_bytes=MEMORY, **spec) for _ in range(count)]


def readings(node: SimulatedNode) -> list[VgpuStatus]:
    with node.link() as link:
        return list(link.list())


def shared(node: SimulatedNode) -> list[bool]:
    return [vgpu.shares for vgpu in readings(node)]


def all_share(node: SimulatedNode, count: int) -> None:
    eventually(lambda: shared(node).count(True) == count, f"{count} vGPUs share")


def test_light_ones_share_beside_a_heavy_one(node: SimulatedNode) -> None:
    vgpus = beside(node, 3)
    light = [Program(node, vgpu, FIFTH) for vgpu in vgpus[:2]]
    all_share(node, 2)
    heavy = Program(node, vgpus[2], WHOLE)
    heavy.goes_on()
    all_share(node, 2)
    with node.link() as link:
        assert not link.inspect(vgpus[2].vgpu_id).vgpu.light
    for program in (*light, heavy):
        program.goes_on()
    heavy.popen.kill()
    heavy.popen.wait()
    for program in light:
        program.goes_on()
        program.end()


def test_two_heavy_ones_take_turns_beside_a_light_one(node: SimulatedNode) -> None:
    heavy = [Program(node, vgpu, WHOLE) for vgpu in beside(node, 2)]
    for program in heavy:
        program.goes_on()
    light = Program(node, beside(node, 1)[0], FIFTH)
    all_share(node, 1)
    before = [vgpu.tokens for vgpu in readings(node)]
    eventually(lambda: readings(node)[0].tokens > before[0] + 10, "turns go on")
    assert shared(node) == [False, False, True]
    assert readings(node)[2].tokens <= before[2] + 2, "the light one holds on meanwhile"
    for program in (*heavy, light):
        program.goes_on()
        program.end()


def test_beside_one_with_exclusive_leases_light_ones_take_turns(node: SimulatedNode) -> None:
    light = [Program(node, vgpu, FIFTH) for vgpu in beside(node, 2)]
    all_share(node, 2)
    heavy = Program(node, beside(node, 1, lease="exclusive")[0], WHOLE)
    heavy.goes_on()
    eventually(lambda: not any(shared(node)), "they take turns")
    for program in light:
        program.goes_on()
    heavy.end()
    all_share(node, 2)
    for program in light:
        program.goes_on()
        program.end()


def test_one_that_keeps_host_and_gpu_busy_at_the_same_time_takes_turns(node: SimulatedNode) -> None:
    vgpus = beside(node, 2)
    programs = [Program(node, vgpu, what) for vgpu, what in zip(vgpus, (FIFTH, TRAINER), strict=True)]

    def found() -> list[bool]:
        with node.link() as link:
            return [vgpu.light for vgpu in link.list() if vgpu.demand_ratio]

    eventually(lambda: found() == [True, False], "both are measured, the trainer is heavy")
    eventually(lambda: shared(node) == [True, False], "the trainer takes turns")
    for program in programs:
        program.end()


def test_one_that_asked_for_exclusive_leases_never_shares(node: SimulatedNode) -> None:
    first, second = beside(node, 1)[0], beside(node, 1, lease="exclusive")[0]
    programs = [Program(node, vgpu, FIFTH) for vgpu in (first, second)]

    def measured() -> bool:
        with node.link() as link:
            return all(vgpu.light for vgpu in link.list())

    eventually(measured, "both are found light")
    for program in programs:
        program.goes_on()
    assert not any(shared(node))
    with node.link() as link:
        link.set(second.vgpu_id, VgpuChanges.parse(lease="auto"))
    all_share(node, 2)
    with node.link() as link:
        link.set(first.vgpu_id, VgpuChanges.parse(lease="exclusive"))
    eventually(lambda: not any(shared(node)), "they take turns")
    for program in programs:
        program.goes_on()
        program.end()


def test_what_each_is_charged_adds_up_to_what_the_gpu_ran(node: SimulatedNode) -> None:
    vgpus = beside(node, 3)
    programs = [Program(node, vgpu, what) for vgpu, what in zip(vgpus, (FIFTH, FIFTH, SHORTER), strict=True)]
    all_share(node, 3)
    engine = Engine(node.paths.runtime / "sim", 0)

    def charged_s() -> float:
        with node.link() as link:
            return sum(vgpu.busy_ns for vgpu in link.list()) / 1e9

    def ran_s() -> float:
        engine.refresh()
        return engine.kernel_ns / 1e9

    def settled() -> bool:
        then = charged_s(), ran_s()
        time.sleep(0.3)
        return (charged_s(), ran_s()) == then

    errors: list[float] = []
    # On a busy machine many launches cannot be timed, and kernels are charged by few samples. So it has five tries.
    for _ in range(5):
        begun, before = ran_s(), charged_s()
        eventually(lambda begun=begun: ran_s() - begun > 0.5, "half a second of it ran")
        for program in programs:
            program.say("stop")
            program.heard()
        eventually(settled, "all is charged")
        errors.append((charged_s() - before) / (ran_s() - begun) - 1)
        if abs(errors[-1]) < 0.12:
            break
        for program in programs:
            program.say("go")
            program.heard()
    assert abs(errors[-1]) < 0.12, f"all that ran is charged, and no more: {errors}"
    for program in programs:
        program.end()


def test_a_limit_holds_under_a_shared_lease(node: SimulatedNode) -> None:
    limited, other = node.create(sm_percent=8, memory_bytes=MEMORY), beside(node, 1)[0]
    programs = [Program(node, vgpu, FIFTH) for vgpu in (limited, other)]
    all_share(node, 2)
    begun, before = time.monotonic(), node.reading(limited.vgpu_id)
    assert before is not None
    time.sleep(2)
    after, passed = node.reading(limited.vgpu_id), time.monotonic() - begun
    assert after is not None
    assert (after.busy_ns - before.busy_ns) / 1e9 <= 0.08 * passed + 0.05, "and what its bucket had saved up"
    for program in programs:
        program.goes_on()
        program.end()


def test_one_is_killed_another_stands_still_and_the_third_goes_on(node: SimulatedNode) -> None:
    programs = [Program(node, vgpu, FIFTH) for vgpu in beside(node, 3)]
    all_share(node, 3)
    programs[0].popen.kill()
    programs[0].popen.wait()
    os.kill(programs[1].popen.pid, signal.SIGSTOP)
    programs[2].goes_on()
    os.kill(programs[1].popen.pid, signal.SIGCONT)
    all_share(node, 2)
    for program in programs[1:]:
        program.goes_on()
        program.end()


def test_a_server_that_was_killed_finds_them_light_again(node: SimulatedNode) -> None:
    vgpus = beside(node, 2)
    programs = [Program(node, vgpu, FIFTH) for vgpu in vgpus]
    all_share(node, 2)
    time.sleep(1.5)  # the journal is written once a second
    killed = node.server_pid()
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: node.server_pid() not in (0, killed), "its successor is there")
    all_share(node, 2)
    for program in programs:
        program.goes_on()
        program.end()


def test_beside_a_heavy_one_light_ones_die_stand_still_and_come_back(node: SimulatedNode) -> None:
    *light, heavy = [
        Program(node, vgpu, what) for vgpu, what in zip(beside(node, 3), (FIFTH, FIFTH, WHOLE), strict=True)
    ]
    all_share(node, 2)
    os.kill(light[0].popen.pid, signal.SIGSTOP)
    heavy.goes_on()
    light[1].popen.kill()
    light[1].popen.wait()
    heavy.goes_on()
    os.kill(light[0].popen.pid, signal.SIGCONT)
    light[0].goes_on()
    all_share(node, 1)
    time.sleep(1.5)  # the journal is written once a second
    killed = node.server_pid()
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: node.server_pid() not in (0, killed), "its successor is there")
    all_share(node, 1)
    os.kill(heavy.popen.pid, signal.SIGSTOP)
    light[0].goes_on()
    os.kill(heavy.popen.pid, signal.SIGCONT)
    for program in (light[0], heavy):
        program.goes_on()
        program.end()


def test_a_recording_says_which_leases_are_shared(node: SimulatedNode) -> None:
    vgpus = beside(node, 3)
    programs = [Program(node, vgpu, what) for vgpu, what in zip(vgpus, (FIFTH, FIFTH, WHOLE), strict=True)]
    all_share(node, 2)

    def takes_turns() -> bool:
        """Beside sharers that pause it has a lease without an end, and no token is counted yet."""
        heavy = readings(node)[2]
        return not heavy.light and (heavy.tokens > 0 or heavy.open_ended)

    eventually(takes_turns, "the heavy one takes turns")
    (recording,), _ = collect(["0"], 500_000_000, lambda seconds: None, node.paths.control_socket)
    found = {
        vgpu.vgpu_id: {lease.shared for lease in recording.leases if lease.vgpu_id == vgpu.vgpu_id} for vgpu in vgpus
    }
    assert found == {vgpus[0].vgpu_id: {True}, vgpus[1].vgpu_id: {True}, vgpus[2].vgpu_id: {False}}
    for program in programs:
        program.end()


def test_long_kernels_of_a_newcomer_are_learned_beside_sharers_without_their_slices(node: SimulatedNode) -> None:
    vgpus = beside(node, 3)
    light = [Program(node, vgpu, FIFTH) for vgpu in vgpus[:2]]
    all_share(node, 2)
    newcomer = Program(node, vgpus[2], ("30", "1", "0", "0"))

    def learned_ms() -> float:
        return readings(node)[2].burst_ns / 1e6

    eventually(lambda: 27 < learned_ms() < 40, "its kernels take 30 ms, and with slices of others more than 50")
    before = readings(node)[2].tokens
    eventually(lambda: readings(node)[2].tokens > before + 3 or readings(node)[2].open_ended, "it goes on")
    eventually(lambda: 27 < learned_ms() < 40, "they still do")
    assert not readings(node)[2].light
    for program in (*light, newcomer):
        program.goes_on()
        program.end()
