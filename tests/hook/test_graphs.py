"""Graphs that are changed after they were made: their learned lengths are doubted, and learned anew."""

from __future__ import annotations

import pytest

from tests.hook.stage import MS, Stage
from tests.hook.test_gate import PROLOGUE

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

how = HOW
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
if how.startswith("cuGraphExecKernelNode"):
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
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphExecMemsetNodeSetParams",
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
