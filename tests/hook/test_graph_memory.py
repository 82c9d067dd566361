"""Memory that graphs allocate: a vGPU pays for what the device keeps for them, and over the limit the launch fails."""

from __future__ import annotations

import json

import pytest

from tests.hook.stage import GIB, Stage, eventually
from tests.hook.talk import Talk

MIB = 1 << 20
OUT_OF_MEMORY = 2
GRAPHS = 5

PROLOGUE = """
from tests.sim.graphs import Built
MIB = 1 << 20

def lasting(size):
    # One that allocates and frees so much each time it runs.
    graph = Built(app.call)
    graph.give(graph.take(size))
    return graph.executable()

def launch(graph, how="cuGraphLaunch"):
    return app.result(how, graph, app.stream)

def trim():
    app.synchronize()
    app.call("cuDeviceGraphMemTrim", 0)
"""


def talk(stage: Stage, body: str, limit: int = 8 * GIB) -> Talk:
    return Talk(stage, stage.vgpu(memory_bytes=limit), PROLOGUE + body)


@pytest.mark.parametrize("how", ["cuGraphLaunch", "cuGraphUpload"])
def test_charged_from_the_first_launch_or_upload_until_it_is_trimmed(stage: Stage, how: str) -> None:
    program = talk(
        stage,
        f"""
graph = lasting(100 * MIB)
say()
say(launch(graph, "{how}"), launch(graph, "{how}"), app.memory_info())
app.synchronize()
app.call("cuGraphExecDestroy", graph)
say()
trim()
say(app.memory_info())
""",
    )
    _, slot = program.next()
    assert slot.charged_bytes == 0
    (*answers, info), slot = program.next()
    assert answers == [0, 0]
    assert (slot.committed_bytes[GRAPHS], slot.charged_bytes) == (128 * MIB, 128 * MIB)
    assert info == [8 * GIB - 128 * MIB, 8 * GIB]
    _, slot = program.next()
    assert slot.charged_bytes == 128 * MIB
    (info,), slot = program.next()
    assert (slot.charged_bytes, info) == (0, [8 * GIB, 8 * GIB])


def test_reserved_is_what_nodes_hold_at_once(stage: Stage) -> None:
    """Ten times 100 MiB, one after the other, fit into 128 MiB."""
    program = talk(
        stage,
        """
graph = Built(app.call)
for _ in range(10):
    graph.give(graph.take(100 * MIB))
say(launch(graph.executable()))
""",
        limit=128 * MIB,
    )
    (answer,), slot = program.next()
    assert (answer, slot.charged_bytes, slot.refusals) == (0, 128 * MIB, 0)


@pytest.mark.parametrize("how", ["cuGraphLaunch", "cuGraphUpload"])
def test_a_graph_that_does_not_fit_is_refused_and_nothing_is_lost(stage: Stage, how: str) -> None:
    program = talk(
        stage,
        f"""
block = app.allocate(64 * MIB)
graph = lasting(200 * MIB)
say(launch(graph, "{how}"), graph.value != 0)
app.free(block)
say(launch(graph, "{how}"))
""",
        limit=256 * MIB,
    )
    (refused, _), slot = program.next()
    assert (refused, slot.charged_bytes, slot.refusals) == (OUT_OF_MEMORY, 64 * MIB, 1)
    (granted,), slot = program.next()
    assert (granted, slot.charged_bytes) == (0, 224 * MIB)


def test_with_its_upload_a_graph_is_made_executable_or_not_at_all(stage: Stage) -> None:
    program = talk(
        stage,
        """
import ctypes
class Params(ctypes.Structure):
    _fields_ = [("flags", c_uint64), ("stream", c_void_p), ("wrong", c_void_p), ("answer", ctypes.c_int)]
graph = Built(app.call)
graph.give(graph.take(200 * MIB))
def instantiate():
    made, params = c_void_p(), Params(flags=2, stream=app.stream)
    return app.result("cuGraphInstantiateWithParams", byref(made), graph.graph, byref(params)), made
block = app.allocate(128 * MIB)
say(instantiate()[0])
app.free(block)
answer, made = instantiate()            # the first attempt has left nothing behind: there may be one at a time
say(answer, graph.taken(), launch(made))
""",
        limit=256 * MIB,
    )
    (refused,), slot = program.next()
    assert (refused, slot.charged_bytes) == (OUT_OF_MEMORY, 128 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0, 224, 0], 224 * MIB)


def test_what_idle_graphs_keep_makes_room_for_others(stage: Stage) -> None:
    """Two graphs in turns, of which one fits; then plain memory, then a pool."""
    program = talk(
        stage,
        """
first, second = lasting(150 * MIB), lasting(150 * MIB)
answers = []
for graph in (first, second, first, second):
    answers.append(launch(graph))
    app.synchronize()
say(answers)
block = app.allocate(200 * MIB)
say(block is not None, launch(first))
app.free(block)
say(launch(first))
app.synchronize()
pooled = c_uint64()
say(app.result("cuMemAllocAsync", byref(pooled), c_size_t(200 * MIB), app.stream))
""",
        limit=256 * MIB,
    )
    (answers,), slot = program.next()
    assert (answers, slot.charged_bytes) == ([0, 0, 0, 0], 160 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([True, OUT_OF_MEMORY], 200 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 160 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 224 * MIB)


def test_a_graph_behind_one_that_runs_is_refused_if_the_driver_does_not_let_it_share(stage: Stage) -> None:
    """The simulated one does not, and what it took for the second is given back."""
    program = talk(
        stage,
        """
import time
first, second = lasting(150 * MIB), lasting(150 * MIB)
kernel = app.kernel(200.0)
answers = [launch(first)]
kernel.launch()
answers.append(launch(second))
say(answers)
app.synchronize()
say(launch(second))
""",
        limit=256 * MIB,
    )
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([[0, OUT_OF_MEMORY]], 160 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 160 * MIB)


def test_what_a_graph_leaves_to_the_program_is_charged_until_freed_and_trimmed(stage: Stage) -> None:
    program = talk(
        stage,
        """
graph = Built(app.call)
left = graph.take(100 * MIB)
executable = graph.executable()
say(launch(executable))
app.free(left)
trim()
say(launch(executable))
""",
    )
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 128 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 128 * MIB)


def test_allocations_under_a_capture_are_the_graphs(stage: Stage) -> None:
    program = talk(
        stage,
        """
pointer, graph, executable = c_uint64(), c_void_p(), c_void_p()
app.call("cuStreamBeginCapture_v2", app.stream, 1)
app.call("cuMemAllocAsync", byref(pointer), c_size_t(300 * MIB), app.stream)
app.call("cuMemsetD8Async", pointer, 1, c_size_t(MIB), app.stream)
app.call("cuMemFreeAsync", pointer, app.stream)
app.call("cuStreamEndCapture", app.stream, byref(graph))
app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
say()
say(launch(executable))
other, stream = lasting(40 * MIB), app.new_stream(1)
app.call("cuStreamBeginCapture_v2", app.stream, 0)              # globally: what the books ask must not end it
answer = app.result("cuGraphLaunch", other, stream)
say(answer, app.result("cuStreamEndCapture", app.stream, byref(graph)))
""",
        limit=512 * MIB,
    )
    _, slot = program.next()
    assert slot.charged_bytes == 0
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 320 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0, 0], 352 * MIB)


def test_what_is_trimmed_while_a_launch_waits_for_its_lease_is_not_taken_unasked(stage: Stage) -> None:
    program = talk(
        stage,
        """
import os, threading
os.environ["VGPU_AHEAD"] = "0"  # the launch is to wait in the gate, not in the driver's queue
context, answers = c_void_p(), []
app.call("cuCtxGetCurrent", byref(context))
graph = lasting(150 * MIB)
def work():
    app.call("cuCtxSetCurrent", context)
    answers.append(launch(graph))
work()
app.synchronize()
say(answers)
waits = threading.Thread(target=work)
waits.start()
say()
block = app.allocate(200 * MIB)
say(block is not None, answers)
waits.join()
say(answers)
app.free(block)
work()
app.synchronize()
say(answers)
""",
        limit=256 * MIB,
    )
    vgpu = program.vgpu
    assert json.loads(stage.heard(program.process)) == [[0]]
    assert vgpu.slot().charged_bytes == 160 * MIB
    vgpu.withdraw()
    eventually(lambda: not stage.dispatcher.outstanding(vgpu.key), "it has no lease")
    stage.tell(program.process)
    program.next()
    vgpu.await_want()
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([True, [0]], 200 * MIB)
    vgpu.open()
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([[0, OUT_OF_MEMORY]], 200 * MIB)
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([[0, OUT_OF_MEMORY, 0]], 160 * MIB)


def test_a_context_takes_the_memory_of_its_graphs_along(stage: Stage) -> None:
    program = talk(
        stage,
        """
say(launch(lasting(100 * MIB)))
app.call("cuDevicePrimaryCtxReset_v2", app.device)
say()
""",
    )
    said, slot = program.next()
    assert (said, slot.charged_bytes) == ([0], 128 * MIB)
    _, slot = program.next()
    assert slot.charged_bytes == 0
