"""Contexts that die with work of ours in them: what was known of their streams goes with them, and leases drain."""

from __future__ import annotations

import time

import pytest

from tests.hook.stage import MS, PATIENCE_S, Stage
from tests.hook.test_gate import PROLOGUE, drained

DEATHS = """
def enter(how):
    "Make a context of one's own the current one; what ends it."
    if how == "cuGreenCtxDestroy":
        green, context = app.green_context()
        app.call("cuCtxPushCurrent_v2", context)
        stream = c_void_p()
        app.call("cuGreenCtxStreamCreate", byref(stream), green, 1, 0)
        streams.append(stream)
        return lambda: (app.call(how, green), app.call("cuCtxPopCurrent_v2", byref(context)))
    context = c_void_p()
    app.call("cuCtxCreate_v2", byref(context), 0, app.device)
    app.call("cuModuleLoadData", byref(app.module), PTX.encode())
    streams.append(app.new_stream(1))
    return lambda: app.call(how, context)

streams = []
"""
HOW = ["cuCtxDestroy_v2", "cuCtxDetach", "cuGreenCtxDestroy"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stream", ["streams[-1]", "LEGACY", "PER_THREAD"])
def test_a_lease_drains_though_its_streams_are_no_more(stage: Stage, how: str, stream: str) -> None:
    vgpu = stage.vgpu()
    body = f"""
end = enter("{how}")
app.kernel(5.0, {stream}).launch()
end()
print(1, flush=True)
input()
"""
    program = stage.start(PROLOGUE + DEATHS + body, stage.environment(vgpu))
    vgpu.await_want()
    epoch = vgpu.open()
    stage.heard(program)
    vgpu.end(epoch, time.monotonic_ns() + MS)
    drained(stage, vgpu, epoch)


@pytest.mark.parametrize("how", HOW)
def test_contexts_may_end_with_work_of_ours_in_them_one_after_the_other(stage: Stage, how: str) -> None:
    vgpu = stage.vgpu()
    body = f"""
for _ in range(5):
    end = enter("{how}")
    kernel = app.kernel(1.0, streams[-1])
    for _ in range(20):
        kernel.launch()
    end()
print("done", flush=True)
"""
    program = stage.start(PROLOGUE + DEATHS + body, stage.environment(vgpu))
    with vgpu.granting(20 * MS):
        assert stage.heard(program) == "done"
        assert program.wait(PATIENCE_S) == 0


def test_a_context_lives_on_while_somebody_is_attached(stage: Stage) -> None:
    """Its work still counts, and more may follow."""
    vgpu = stage.vgpu()
    body = """
enter("cuCtxDetach")
context = c_void_p()
app.call("cuCtxAttach", byref(context), 0)
long = app.kernel(150.0, streams[-1])
long.launch()
app.call("cuCtxDetach", context)
long.launch()
print(1, flush=True)
input()
"""
    program = stage.start(PROLOGUE + DEATHS + body, stage.environment(vgpu))
    vgpu.await_want()
    start_ns = time.monotonic_ns()
    epoch = vgpu.open()
    stage.heard(program)
    vgpu.end(epoch, time.monotonic_ns() + MS)
    drained(stage, vgpu, epoch)
    assert time.monotonic_ns() >= start_ns + 299 * MS
