"""``--slo`` with real programs under the real hook: steps are counted, and their order follows their deadlines."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Final

import pytest

from tests.integration.node import SimulatedNode, eventually
from tests.integration.worker import Spoken
from vgpu.errors import ErrorCode, VgpuError
from vgpu.protocol.messages import Steps, VgpuStatus
from vgpu.spec import VgpuChanges

ANSWER: Final = """
def answer():
    for line in sys.stdin:
        print(steps, flush=True)
"""
SERVER: Final = (
    ANSWER
    + """
import ctypes, sys, threading, time
from ctypes import byref, c_uint64, c_void_p
from tests.hook.app import App
step_ms, prefill_ms, tokens, pause_ms = (float(word) for word in sys.argv[1:])
app = App()
kernel = app.kernel(step_ms / 4)
graph, executable = c_void_p(), c_void_p()
app.call("cuStreamBeginCapture_v2", app.stream, 2)
for _ in range(4):
    kernel.launch()
app.call("cuStreamEndCapture", app.stream, byref(graph))
app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
part = app.kernel(prefill_ms / 10)
token, host = app.allocate(4096), ctypes.create_string_buffer(16)
steps = 0
print("started", flush=True)
threading.Thread(target=answer, daemon=True).start()
def next_token():
    app.call("cuMemcpyDtoHAsync_v2", host, c_uint64(token), ctypes.c_size_t(16), app.stream)
    app.call("cuStreamSynchronize", app.stream)
while True:
    for _ in range(10):
        part.launch()
    next_token()
    for _ in range(int(tokens)):
        app.call("cuGraphLaunch", executable, app.stream)
        next_token()
    steps += 1
    time.sleep(pause_ms / 1e3)
"""
)
BATCH: Final = (
    ANSWER
    + """
import sys, threading
from tests.hook.app import App
app = App()
kernel = app.kernel(1)
steps = 0
print("started", flush=True)
threading.Thread(target=answer, daemon=True).start()
while True:
    for _ in range(20):
        kernel.launch()
    app.synchronize()
    steps += 1
"""
)
BY_HAND: Final = """
import sys
from tests.hook.app import App
app = App()
kernel = app.kernel(1)
for _ in range(50):
    kernel.launch()
    app.synchronize()
print("started", flush=True)
for line in sys.stdin:
    kernel.launch() if line.strip() == "launch" else app.synchronize()
    print("done", flush=True)
"""
TWO_THREADS: Final = (
    ANSWER
    + """
import sys, threading, time
from ctypes import byref, c_void_p
from tests.hook.app import App
app = App()
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
streams = app.new_stream(1), app.new_stream(1)
token, other = app.kernel(2, streams[0]), app.kernel(2, streams[1])
steps = 0
def step():
    token.launch()
    app.call("cuStreamSynchronize", streams[0])
for _ in range(100):
    step()
def launch():
    app.call("cuCtxSetCurrent", context)
    while True:
        for _ in range(10):
            other.launch()
        time.sleep(0.05)
threading.Thread(target=launch, daemon=True).start()
print("started", flush=True)
threading.Thread(target=answer, daemon=True).start()
while True:
    step()
    steps += 1
"""
)
pytestmark = pytest.mark.slow
MEMORY: Final = 1 << 30
BOTH: Final = "tpot=1h,ttft=1h"
TOKENS: Final = ("4", "20", "20", "60")
"""Steps of 4 ms, prefills of 20 ms, answers of 20 tokens, and 60 ms between two of them."""


class Program(Spoken):
    def __init__(self, node: SimulatedNode, vgpu: VgpuStatus, body: str, words: Sequence[str] = ()) -> None:
        super().__init__(node, vgpu, body, *words)

    @property
    def done(self) -> int:
        self.say("done")
        return int(self.heard())

    def goes_on(self) -> None:
        before = self.done
        eventually(lambda: self.done > before + 3, "it works")


def steps_of(node: SimulatedNode, vgpu: VgpuStatus) -> Steps:
    found = node.reading(vgpu.vgpu_id)
    assert found is not None
    return found.steps


def counted(node: SimulatedNode, vgpu: VgpuStatus, more: int) -> tuple[int, int]:
    """How many decode steps and prefills were counted, once ``more`` of both have been added."""

    def both() -> tuple[int, int]:
        steps = steps_of(node, vgpu)
        return steps.tpot_attained + steps.tpot_missed, steps.ttft_attained + steps.ttft_missed

    before = both()
    eventually(lambda: all(now >= was + more for now, was in zip(both(), before, strict=True)), "steps are counted")
    return both()


def test_decode_steps_and_prefills_are_counted_beside_a_batch(node: SimulatedNode) -> None:
    server = node.create(sm_percent=60, memory_bytes=MEMORY, slo=BOTH, priority="high")
    batch = node.create(sm_percent=20, memory_bytes=MEMORY, priority="low", burst=True)
    programs = [Program(node, server, SERVER, TOKENS), Program(node, batch, BATCH)]
    decoded, prefilled = counted(node, server, 5)
    steps = steps_of(node, server)
    assert steps.tpot_missed == steps.ttft_missed == 0  # none takes an hour
    assert decoded > 2 * prefilled
    assert steps.tpot_mean_ns > 1_000_000
    assert steps_of(node, batch) == Steps()
    for program in programs:
        program.goes_on()
    os.kill(programs[0].popen.pid, signal.SIGKILL)
    programs[0].popen.wait()
    assert steps_of(node, server).tpot_attained >= decoded  # they outlive the program
    programs[1].goes_on()
    programs[1].end()


def test_what_is_late_is_missed_and_targets_change_while_programs_run(node: SimulatedNode) -> None:
    server = node.create(sm_percent=60, memory_bytes=MEMORY, slo="tpot=5ms")
    program = Program(node, server, SERVER, ("8", "40", "20", "60"))
    eventually(lambda: steps_of(node, server).tpot_missed > 5, "a step of 8 ms misses a target of 5 ms")
    found = steps_of(node, server)
    assert found.tpot_attained == found.ttft_attained == found.ttft_missed == 0
    with node.link() as link:
        assert link.set(server.vgpu_id, VgpuChanges.parse(slo="ttft=1h")).spec.slo == "ttft=1h"
        eventually(lambda: steps_of(node, server).ttft_attained > 2, "prefills are judged")
        assert link.set(server.vgpu_id, VgpuChanges.parse(slo="off")).spec.slo == ""
        program.goes_on()
        before = steps_of(node, server)
        program.goes_on()
        assert steps_of(node, server) == before
        with pytest.raises(VgpuError) as refused:
            link.set(server.vgpu_id, VgpuChanges.parse(slo="tpot=fast"))
        assert refused.value.code is ErrorCode.INVALID
    program.end()


def test_what_began_before_the_targets_is_not_judged(node: SimulatedNode) -> None:
    server = node.create(sm_percent=60, memory_bytes=MEMORY, slo=BOTH)
    program = Spoken(node, server, BY_HAND)

    def told(*words: str, slo: str) -> int:
        """How many steps and prefills are counted after that."""
        with node.link() as link:
            assert link.set(server.vgpu_id, VgpuChanges.parse(slo=slo)).spec.slo == slo.replace("off", "")
        for word in words:
            program.say(word)
            assert program.heard() == "done"
        steps = steps_of(node, server)
        assert not steps.tpot_missed + steps.ttft_missed
        return steps.tpot_attained + steps.ttft_attained

    begun = told("wait", "launch", slo=BOTH)
    assert told("wait", slo="off") == begun
    assert told("wait", slo=BOTH) == begun
    assert told("launch", "wait", slo=BOTH) == begun + 1
    program.end()


def test_work_of_another_thread_makes_no_prefill_of_a_step(node: SimulatedNode) -> None:
    server = node.create(sm_percent=60, memory_bytes=MEMORY, slo=BOTH)
    batch = node.create(sm_percent=20, memory_bytes=MEMORY, burst=True)
    programs = [Program(node, server, TWO_THREADS), Program(node, batch, BATCH)]
    for program in programs:
        program.goes_on()
    before, done = steps_of(node, server), programs[0].done
    eventually(lambda: programs[0].done > done + 200, "it decodes")
    after = steps_of(node, server)
    assert after.tpot_attained > before.tpot_attained + 150
    assert after.ttft_attained < before.ttft_attained + 15  # a busy machine makes a pause
    for program in programs:
        program.end()


def alive(node: SimulatedNode, vgpu: VgpuStatus) -> bool:
    found = node.reading(vgpu.vgpu_id)
    return found is not None and found.state != "restarting"


def test_targets_outlive_the_gpu_server(node: SimulatedNode) -> None:
    server = node.create(sm_percent=60, memory_bytes=MEMORY, slo="tpot=20ms,ttft=1h")
    program = Program(node, server, SERVER, TOKENS)
    counted(node, server, 2)
    with node.link() as link:
        (gpu,) = link.gpus()
    assert gpu.server_pid is not None
    os.kill(gpu.server_pid, signal.SIGKILL)
    eventually(lambda: alive(node, server), "it is back")
    counted(node, server, 2)
    found = node.reading(server.vgpu_id)
    assert found is not None
    assert found.spec.slo == "tpot=20ms,ttft=1h"
    program.end()


def test_windows_are_short_beside_one_with_a_tpot(node: SimulatedNode) -> None:
    paced, plain, batch = (
        node.create(sm_percent=30, memory_bytes=MEMORY, **fields) for fields in ({"slo": "tpot=5ms"}, {}, {})
    )
    programs = [
        Program(node, paced, SERVER, ("4", "20", "10", "200")),
        Program(node, plain, SERVER, ("4", "20", "10", "200")),
        Program(node, batch, BATCH),
    ]
    for program in programs:
        program.goes_on()
    windows = {vgpu.vgpu_id: 0 for vgpu in (paced, plain, batch)}

    def narrow() -> bool:
        with node.link() as link:
            windows.update({vgpu.vgpu_id: vgpu.window_ns for vgpu in link.list()})
        return windows[batch.vgpu_id] <= 2_000_000 and windows[plain.vgpu_id] <= 2_000_000

    eventually(narrow, "the others' windows are at most 2 ms")
    for program in programs:
        program.goes_on()
        program.end()
