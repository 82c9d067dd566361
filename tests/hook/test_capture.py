"""Captures: what is captured passes untouched, no call of the hook's own ends one, and a graph is gated as one unit."""

from __future__ import annotations

import json
import time

import pytest

from tests.hook.programs import drained
from tests.hook.stage import MS, Stage, StagedVgpu, eventually

PROLOGUE = """
import ctypes, json, sys, threading, time
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from tests.hook.app import App, LEGACY, PER_THREAD
app = App()
context = c_void_p()
app.call("cuDevicePrimaryCtxRetain", byref(context), app.device)

def captured(stream, mode, launches, pause=0.0):
    "An executable graph of so many kernels of 1 ms."
    kernel = app.kernel(1.0, stream)
    app.call("cuStreamBeginCapture_v2", stream, mode)
    for _ in range(launches):
        kernel.launch()
        time.sleep(pause)
    graph, executable = c_void_p(), c_void_p()
    app.call("cuStreamEndCapture", stream, byref(graph))
    app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
    return executable

busy, stop, launched = None, False, 0
def keep_busy(own, flags):
    "Another thread at work meanwhile, in a stream of its own."
    global launched
    app.call("cuCtxSetCurrent", context)
    kernel = app.kernel(0.2, PER_THREAD if own else app.new_stream(flags))
    while not stop:
        kernel.launch()
        launched += 1
"""


def outcome(stage: Stage, vgpu: StagedVgpu, body: str, kind: str) -> list[int]:
    program = stage.start(PROLOGUE + body, stage.environment(vgpu))
    if kind == "open":
        vgpu.open()
        return list(json.loads(stage.heard(program)))
    with vgpu.granting(10 * MS):
        return list(json.loads(stage.heard(program)))


GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@pytest.mark.parametrize("kind", ["open", "finite"])
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
def test_a_capture_survives_another_threads_work(stage: Stage, kind: str, mode: int, flags: int) -> None:
    """In the default mode one event query by anybody would invalidate it, and the hook thread looks for drains."""
    results = outcome(
        stage,
        stage.vgpu(),
        f"""
stream = app.new_stream({flags})
app.kernel(0.2, stream).launch()
worker = threading.Thread(target=keep_busy, args=(False, 1))
worker.start()
while launched < 20:
    time.sleep(0.001)
results = []
for _ in range(3):
    graph = captured(stream, {mode}, 5, pause=0.005)
    results.append(app.result("cuGraphLaunch", graph, stream))
    results.append(app.result("cuStreamSynchronize", stream))
stop = True
worker.join()
print(json.dumps(results), flush=True)
""",
        kind,
    )
    assert results == [0] * 6


def test_a_capture_waits_for_no_lease(stage: Stage) -> None:
    """A thread that captures submits nothing: it must not be held, least of all between begin and end."""
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
stream = app.new_stream(1)
graph = captured(stream, 0, 50)
print("captured", flush=True)
print(app.result("cuGraphLaunch", graph, stream), flush=True)
""",
        stage.environment(vgpu),
    )
    assert stage.heard(program) == "captured"  # nobody has granted anything
    vgpu.await_want()  # the graph's launch is gated
    assert not vgpu.slot().undrained
    vgpu.open()
    assert stage.heard(program) == "0"
    eventually(lambda: vgpu.slot().graph_launches == 1, "it was counted")


def test_a_stream_that_joined_a_capture_is_captured_too(stage: Stage) -> None:
    results = outcome(
        stage,
        stage.vgpu(),
        """
first, second = app.new_stream(1), app.new_stream(1)
fork, join = app.event(), app.event()
kernel = app.kernel(1.0, second)
kernel.launch()
app.call("cuStreamBeginCapture_v2", first, 0)
results = [app.result("cuEventRecord", fork, first), app.result("cuStreamWaitEvent", second, fork, c_uint(0))]
for _ in range(10):
    kernel.launch()
    time.sleep(0.002)
results += [app.result("cuEventRecord", join, second), app.result("cuStreamWaitEvent", first, join, c_uint(0))]
graph = c_void_p()
results.append(app.result("cuStreamEndCapture", first, byref(graph)))
print(json.dumps(results), flush=True)
""",
        "finite",
    )
    assert results == [0] * 5


def test_drains_are_seen_while_a_capture_stays_open(stage: Stage) -> None:
    """Markers set before, or in streams where they may be set, tell; no stream is asked."""
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
stream, other = app.new_stream(1), app.new_stream(1)
app.kernel(5.0, other).launch()
app.call("cuStreamBeginCapture_v2", stream, 0)
print("open", flush=True)
input()
graph = c_void_p()
print(app.result("cuStreamEndCapture", stream, byref(graph)), flush=True)
""",
        stage.environment(vgpu),
    )
    with vgpu.granting(20 * MS):
        assert stage.heard(program) == "open"
        eventually(lambda: not vgpu.slot().undrained, "its drain was seen")
        stage.tell(program)
        assert stage.heard(program) == "0"


def test_a_graphs_duration_is_learned(stage: Stage) -> None:
    """50 graphs of 10 ms under a window of 1 ms: submitted as they run, not at once."""
    (submitted_ns,) = outcome(
        stage,
        stage.vgpu(),
        """
stream = app.new_stream(1)
graph = captured(stream, 0, 10)
app.call("cuGraphLaunch", graph, stream)
start = time.monotonic_ns()
for _ in range(50):
    app.call("cuGraphLaunch", graph, stream)
print(json.dumps([time.monotonic_ns() - start]), flush=True)
""",
        "finite",
    )
    assert submitted_ns > 450 * MS


def test_captures_do_not_leak(stage: Stage) -> None:
    """After captures that fail, end in another thread or die with their stream, drains are seen as before."""
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
stream, doomed = app.new_stream(1), app.new_stream(1)
graph = c_void_p()
results = [app.result("cuStreamBeginCapture_v2", c_void_p(LEGACY), 0) != 0]
app.call("cuStreamBeginCapture_v2", stream, 0)
results.append(app.result("cuStreamBeginCapture_v2", stream, 0) != 0)
app.result("cuStreamEndCapture", stream, byref(graph))
app.call("cuStreamBeginCapture_v2", doomed, 2)
app.call("cuStreamDestroy_v2", doomed)
app.kernel(1.0, stream).launch()
print(json.dumps(results), flush=True)
input()
""",
        stage.environment(vgpu),
    )
    vgpu.open()
    assert json.loads(stage.heard(program)) == [True, True]
    eventually(lambda: not vgpu.slot().undrained, "its drain was seen")


def test_a_capture_survives_the_end_of_another_stream_with_work_in_it(stage: Stage) -> None:
    """Of a blocking stream, which may not be marked now: nobody marks the default stream in its place."""
    results = outcome(
        stage,
        stage.vgpu(),
        """
stream, doomed, other = app.new_stream(0), app.new_stream(0), app.new_stream(1)
kernels = [app.kernel(0.2, s) for s in (doomed, other)]
for kernel in kernels:
    kernel.launch()
app.call("cuCtxSynchronize")
app.call("cuStreamBeginCapture_v2", stream, 2)
kernels[0].launch()
results = [app.result("cuStreamDestroy_v2", doomed)]
kernels[1].launch()
graph = c_void_p()
results.append(app.result("cuStreamEndCapture", stream, byref(graph)))
print(json.dumps(results), flush=True)
""",
        "finite",
    )
    assert results == [0, 0]


def test_a_capture_in_one_context_does_not_hide_drains_in_another(stage: Stage) -> None:
    """Work in both is marked before it begins, whichever context is current."""
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
app.kernel(50.0, app.new_stream(1)).launch()
app.call("cuCtxCreate_v2", byref(c_void_p()), 0, app.device)
app.call("cuStreamBeginCapture_v2", app.new_stream(1), 0)
print("open", flush=True)
input()
""",
        stage.environment(vgpu),
    )
    vgpu.await_want()
    vgpu.open()
    assert stage.heard(program) == "open"
    eventually(lambda: not vgpu.slot().undrained, "its drain was seen")


BESIDE = """
stream, other = app.new_stream(1), app.new_stream(1)
fork, join = app.event(), app.event()
app.call("cuStreamBeginCapture_v2", stream, 0)
app.kernel(5.0, other).launch()
"""


OTHERS = pytest.mark.parametrize(
    "other", ["app.new_stream(0)", "app.new_stream(1)", "LEGACY"], ids=["blocking", "non-blocking", "legacy"]
)


@OTHERS
def test_a_drain_of_what_was_launched_beside_a_capture_is_seen_while_it_stays_open(stage: Stage, other: str) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + BESIDE.replace("other = app.new_stream(1), app.new_stream(1)", f"other = app.new_stream(1), {other}")
        + """
print("open", flush=True)
input()
print(app.result("cuStreamEndCapture", stream, byref(c_void_p())), flush=True)
""",
        stage.environment(vgpu),
    )
    vgpu.await_want()
    vgpu.open()
    assert stage.heard(program) == "open"
    drained(stage, vgpu, vgpu.revoke(time.monotonic_ns() + MS))
    stage.tell(program)
    assert stage.heard(program) == "0"


@OTHERS
def test_a_thread_with_an_open_capture_works_in_another_stream_for_several_leases(stage: Stage, other: str) -> None:
    """It waits in the gate: the capture cannot end before the work of its last lease was seen to drain."""
    body = f"""
stream, other = app.new_stream(1), {other}
kernel = app.kernel(1.0, other)
kernel.launch()
app.call("cuStreamBeginCapture_v2", stream, {RELAXED})
for _ in range(40):
    kernel.launch()
print(json.dumps([app.result("cuStreamEndCapture", stream, byref(c_void_p()))]), flush=True)
"""
    assert outcome(stage, stage.vgpu(), body, "finite") == [0]


def test_a_stream_that_joins_with_work_from_before_ends_no_capture(stage: Stage) -> None:
    """A marker would be captured, and a look at it end the capture."""
    results = outcome(
        stage,
        stage.vgpu(),
        BESIDE
        + """
results = [app.result("cuEventRecord", fork, stream), app.result("cuStreamWaitEvent", other, fork, c_uint(0))]
time.sleep(0.2)
results += [app.result("cuEventRecord", join, other), app.result("cuStreamWaitEvent", stream, join, c_uint(0))]
results.append(app.result("cuStreamEndCapture", stream, byref(c_void_p())))
print(json.dumps(results), flush=True)
""",
        "open",
    )
    assert results == [0] * 5
