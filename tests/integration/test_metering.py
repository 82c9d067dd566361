"""What programs are charged for and limited to, by the hook's meter, against what the simulated GPU truly ran.

The programs compute for a part of the time: short kernels, and time of the host between them. Bounds from above hold on
a machine of any speed; those from below compare with what the GPU ran in the same time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Final

import pytest

from cython_ext.simengine import Engine
from tests.integration.node import SimulatedNode, eventually
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuChanges

EAGER: Final = """
import sys, time
from tests.hook.app import App
kernels, host_us = [float(ms) for ms in sys.argv[1].split(",")], float(sys.argv[2])
app = App()
launched = [app.kernel(ms) for ms in kernels]
def spin(us):
    until = time.perf_counter() + us * 1e-6
    while time.perf_counter() < until:
        pass
def run(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(5):
            for kernel in launched:
                kernel.launch()
                spin(host_us)
        app.synchronize()
run(0.3)
print("ready", flush=True)
for line in sys.stdin:
    run(float(line))
    print("ran", flush=True)
"""
MEMORY: Final = 1 << 30
WINDOWS: Final = 5
SETTLED_S: Final = 3.0
FULL_S: Final = 0.2
"""The most that a bucket saves up, for a limit of 100 %."""


def settled_s(node: SimulatedNode, expected_s: float, bound_s: float) -> float:
    """What is charged, once that is within the bound; else what it is after some seconds."""
    deadline = time.monotonic() + SETTLED_S
    while abs((charged := charged_s(node)) - expected_s) > bound_s and time.monotonic() < deadline:
        time.sleep(0.05)
    return charged


def card(node: SimulatedNode) -> Engine:
    return Engine(node.paths.runtime / "sim", 0)


def ran_s(engine: Engine) -> float:
    engine.refresh()
    return engine.kernel_ns / 1e9


def charged_s(node: SimulatedNode) -> float:
    with node.link() as link:
        return sum(vgpu.busy_ns for vgpu in link.list()) / 1e9


def eager(node: SimulatedNode, vgpu: VgpuStatus, kernels_ms: Sequence[float], host_us: float) -> subprocess.Popen[str]:
    program = node.program(vgpu, EAGER, ",".join(map(str, kernels_ms)), str(host_us))
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    return program


def run(programs: Sequence[subprocess.Popen[str]], seconds: float) -> float:
    """All of them at the same time. How long it took."""
    began = time.monotonic()
    for program in programs:
        print(seconds, file=program.stdin, flush=True)
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ran\n"
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("kernels_ms", "host_us"),
    [
        pytest.param((0.04,), 200, id="short kernels"),
        pytest.param((2.0,), 0, id="GPU-bound"),
    ],
)
@pytest.mark.parametrize("percent", [100, 60])
def test_the_charge_is_what_the_gpu_ran(
    node: SimulatedNode, percent: int, kernels_ms: Sequence[float], host_us: float
) -> None:
    """In one of a few windows. On a busy host some launches cannot be timed, and the window's charge is too low."""
    vgpu = node.create(sm_percent=percent, memory_bytes=MEMORY)
    program, engine = eager(node, vgpu, kernels_ms, host_us), card(node)
    run([program], 1.0)  # the meter knows its kernels
    found = []
    for _ in range(WINDOWS):
        time.sleep(0.2)
        ran, charged = ran_s(engine), charged_s(node)
        run([program], 2.0)
        ran = ran_s(engine) - ran
        reached = settled_s(node, charged + ran, 0.05 * ran + 0.01) - charged
        if abs(reached - ran) <= 0.05 * ran + 0.01:
            return
        found.append((round(ran, 3), round(reached, 3)))
    raise AssertionError(f"ran and charged, seconds: {found}")


def test_a_limit_holds_for_all_processes_of_a_vgpu_together(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=20, memory_bytes=MEMORY)
    programs = [eager(node, vgpu, (0.05,), 20) for _ in range(2)]
    engine = card(node)
    run(programs, 0.5)
    ran = ran_s(engine)
    took = run(programs, 3.0)
    assert ran_s(engine) - ran <= 0.2 * (took + FULL_S + 0.1)


def test_a_limit_that_comes_while_the_program_runs_binds_it(node: SimulatedNode) -> None:
    """Its threads have allowances without an end until then."""
    vgpu = node.create(sm_percent=100, memory_bytes=MEMORY)
    program, engine = eager(node, vgpu, (0.1,), 5), card(node)
    print(4.0, file=program.stdin, flush=True)
    time.sleep(0.5)
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent=20))
    began, ran = time.monotonic(), ran_s(engine)
    assert program.stdout is not None
    assert program.stdout.readline() == "ran\n"
    took = time.monotonic() - began
    assert ran_s(engine) - ran <= 0.2 * (took + FULL_S) + FULL_S  # what its bucket had by the old limit
    with node.link() as link:
        link.set(vgpu.vgpu_id, VgpuChanges.parse(sm_percent=100))
    charged = charged_s(node)
    run([program], 0.5)
    eventually(lambda: charged_s(node) > charged, "its being charged without a limit")


def test_without_its_server_a_vgpu_with_a_limit_stops_when_it_has_used_its_allowance(node: SimulatedNode) -> None:
    vgpu = node.create(sm_percent=20, memory_bytes=MEMORY)
    program, engine = eager(node, vgpu, (0.1,), 5), card(node)
    run([program], 0.5)
    server = node.server_pid()
    print(2.0, file=program.stdin, flush=True)
    os.kill(server, signal.SIGSTOP)
    try:
        ran = ran_s(engine)
        time.sleep(1.5)
        assert ran_s(engine) - ran <= 0.2 * FULL_S + 0.05
    finally:
        os.kill(server, signal.SIGCONT)
    assert program.stdout is not None
    assert program.stdout.readline() == "ran\n"
    run([program], 0.2)
