"""Graphs that are changed after they were made: their learned lengths are doubted, and learned anew."""

from __future__ import annotations

import pytest

from tests.hook.programs import PROLOGUE
from tests.hook.stage import MS, Stage

UPDATES = """
import time
from ctypes import c_int
SHORT, LONG = 0.1, 1.0               # ms; memory is filled at 4.1 GB/ms
NS_PER_MS, FILLED = 1_000_000, 4_100_000_000

class KernelParams(ctypes.Structure):
    _fields_ = [("function", c_void_p), ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint),
                ("parameters", c_void_p), ("extra", c_void_p), ("kernel", c_void_p), ("context", c_void_p)]

class FillParams(ctypes.Structure):
    _fields_ = [("target", c_uint64), ("pitch", c_size_t), ("value", c_uint), ("element", c_uint),
                ("width", c_size_t), ("height", c_size_t)]

class Side3D(ctypes.Structure):
    _fields_ = [("x", c_size_t), ("y", c_size_t), ("z", c_size_t), ("level", c_size_t), ("kind", c_int),
                ("host", c_void_p), ("device", c_uint64), ("array", c_void_p), ("reserved", c_void_p),
                ("pitch", c_size_t), ("height", c_size_t)]

class CopyParams(ctypes.Structure):
    _fields_ = [("source", Side3D), ("target", Side3D), ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)]

class CopyNodeParams(ctypes.Structure):
    _fields_ = [("flags", c_int), ("reserved", c_int), ("context", c_void_p), ("copy", CopyParams)]

class NodeParams(ctypes.Structure):
    class Union(ctypes.Union):
        _fields_ = [("padding", c_uint64 * 29), ("kernel", KernelParams), ("copy", CopyNodeParams),
                    ("fill", FillParams), ("graph", c_void_p)]
    _fields_ = [("type", c_int), ("reserved", c_int * 3), ("of", Union), ("reserved_too", c_uint64)]

kept = []

def kernel_params(ms):
    kernel = app.kernel(ms)
    kept.append(kernel)
    function, gx, gy, gz, bx, by, bz, shared, _, parameters, _ = kernel.arguments
    at = ctypes.cast(parameters, c_void_p)
    return KernelParams(function, (c_uint * 3)(gx, gy, gz), (c_uint * 3)(bx, by, bz), shared, at)

def with_kernels(*lengths):
    graph, node, nodes = c_void_p(), c_void_p(), []
    app.call("cuGraphCreate", byref(graph), 0)
    for ms in lengths:
        app.call("cuGraphAddKernelNode_v2", byref(node), graph, None, c_size_t(0), byref(kernel_params(ms)))
        nodes.append(c_void_p(node.value))
    return graph, nodes

def instantiated(graph):
    executable = c_void_p()
    app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
    return executable

def launch(count):
    start = time.monotonic_ns()
    for _ in range(count):
        app.call("cuGraphLaunch", executable, app.stream)
    return time.monotonic_ns() - start

def filling(ms, memory):
    return FillParams(memory, 0, 0, 1, int(ms * FILLED), 1)

def copying(ms, memory):
    "Onto itself: it reads and writes."
    at = Side3D(kind=2, device=memory)
    return CopyParams(at, at, int(ms * FILLED / 2), 1, 1)

def with_child(ms):
    graph, node = c_void_p(), c_void_p()
    app.call("cuGraphCreate", byref(graph), 0)
    app.call("cuGraphAddChildGraphNode", byref(node), graph, None, c_size_t(0), with_kernels(ms)[0])
    return graph, node

def with_copy(ms, memory):
    graph, node = c_void_p(), c_void_p()
    app.call("cuGraphCreate", byref(graph), 0)
    app.call("cuGraphAddMemcpyNode", byref(node), graph, None, c_size_t(0), byref(copying(ms, memory)), context)
    return graph, node

how, _, what = HOW.partition(" ")
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
if how == "cuGraphExecMemcpyNodeSetParams":
    memory = app.allocate(FILLED)
    graph, node = with_copy(SHORT, memory)
    update = lambda: app.call(how, executable, node, byref(copying(LONG, memory)), context)
elif how == "cuGraphExecChildGraphNodeSetParams":
    graph, node = with_child(SHORT)
    update = lambda: app.call(how, executable, node, with_kernels(LONG)[0])
elif how == "cuGraphExecNodeSetParams":
    memory, params = app.allocate(FILLED), NodeParams()
    if what == "kernel":
        graph, (node,) = with_kernels(SHORT)
        params.type, params.of.kernel = 0, kernel_params(LONG)
    elif what == "copy":
        graph, node = with_copy(SHORT, memory)
        params.type, params.of.copy.copy = 1, copying(LONG, memory)
    else:
        graph, node = with_child(SHORT)
        params.type, params.of.graph = 4, with_kernels(LONG)[0].value
    update = lambda: app.call(how, executable, node, byref(params))
elif how.startswith("cuGraphExecKernelNode"):
    graph, (node,) = with_kernels(SHORT)
    update = lambda: app.call(how, executable, node, byref(kernel_params(LONG)))
elif how == "cuGraphExecMemsetNodeSetParams":
    memory, graph, node = app.allocate(FILLED), c_void_p(), c_void_p()
    app.call("cuGraphCreate", byref(graph), 0)
    app.call(
        "cuGraphAddMemsetNode", byref(node), graph, None, c_size_t(0), byref(filling(SHORT, memory)), context
    )
    update = lambda: app.call(how, executable, node, byref(filling(LONG, memory)), context)
elif how == "cuGraphNodeSetEnabled":
    graph, (_, node) = with_kernels(SHORT, LONG)
    update = lambda: app.call(how, executable, node, 1)
elif how == "cuGraphExecUpdate_v2":
    graph, _ = with_kernels(SHORT)
    update = lambda: app.call(how, executable, with_kernels(LONG)[0], (c_uint64 * 3)())
else:
    graph, _ = with_kernels(SHORT)
    update = lambda: app.call(how, executable, with_kernels(LONG)[0], byref(c_void_p()), byref(c_int()))
executable = instantiated(graph)
if how == "cuGraphNodeSetEnabled":
    app.call(how, executable, node, 0)
for _ in range(20):
    launch(1)
    app.synchronize()
"""


@pytest.mark.parametrize(
    "how",
    [
        "cuGraphExecKernelNodeSetParams",
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphExecMemsetNodeSetParams",
        "cuGraphExecChildGraphNodeSetParams",
        "cuGraphExecNodeSetParams kernel",
        "cuGraphExecNodeSetParams copy",
        "cuGraphExecNodeSetParams graph",
        "cuGraphNodeSetEnabled",
        "cuGraphExecUpdate",
        "cuGraphExecUpdate_v2",
    ],
)
def test_a_graph_that_became_ten_times_as_long_is_not_queued_by_its_old_length(stage: Stage, how: str) -> None:
    """Its window takes ten of the old length. Eight launches of the new one: submitted as they run, not at once."""
    vgpu = stage.vgpu()
    body = f"HOW = {how!r}\n" + UPDATES + "update()\nprint(launch(8), launch(8), flush=True)\n"
    program = stage.start(PROLOGUE + body, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        first_ns, then_ns = map(int, stage.heard(program).split())
    assert first_ns > 5 * MS
    assert then_ns > 5 * MS


def test_a_graph_that_is_changed_before_each_launch_and_stays_as_long_is_believed(stage: Stage) -> None:
    """Until then the second of two waits for the first to be timed; afterwards both are queued."""
    vgpu = stage.vgpu()
    body = """
event, executable, kept = app.event(), c_void_p(), []
def graph_of(ms):
    graph, kernel = c_void_p(), app.kernel(ms, app.stream)
    app.call("cuStreamBeginCapture_v2", app.stream, 2)
    kernel.launch()
    app.call("cuStreamEndCapture", app.stream, byref(graph))
    kept.append(kernel)
    return graph
graphs = [graph_of(0.4) for _ in range(2)]
app.call("cuGraphInstantiateWithFlags", byref(executable), graphs[0], c_uint64(0))
def overlapped(pairs):
    "Of so many pairs, those whose first was not over when the second had been submitted."
    count = 0
    for i in range(pairs):
        for turn in range(2):
            app.call("cuGraphExecUpdate_v2", executable, graphs[(i + turn) % 2], (c_uint64 * 3)())
            app.call("cuGraphLaunch", executable, app.stream)
            if turn == 0:
                app.call("cuEventRecord", event, app.stream)
        count += app.result("cuEventQuery", event) != 0
        app.synchronize()
    return count
print(overlapped(6), overlapped(30) and overlapped(30), flush=True)
"""
    program = stage.start(PROLOGUE + body, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        doubted, believed = map(int, stage.heard(program).split())
    assert doubted == 0
    assert believed > 0
