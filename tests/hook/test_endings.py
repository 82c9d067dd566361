"""Streams and contexts that die, with work of ours in them or before it: what was known of them goes with them, and
leases drain when the work has."""

from __future__ import annotations

import time

import pytest

from tests.hook.programs import PROLOGUE, drained
from tests.hook.stage import MS, PATIENCE_S, Stage, eventually

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
    vgpu.open()
    stage.heard(program)
    drained(stage, vgpu, vgpu.revoke(time.monotonic_ns() + MS))


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
    revoked_during_a_long_kernel(stage, DEATHS + body, 300)


def revoked_during_a_long_kernel(stage: Stage, program: str, length_ms: int = 150) -> None:
    """``program`` launches one that lasts so long and says so; its lease is revoked then, and has not drained before
    that one is through."""
    vgpu = stage.vgpu()
    process = stage.start(PROLOGUE + program, stage.environment(vgpu))
    vgpu.await_want()
    start_ns = time.monotonic_ns()
    vgpu.open()
    stage.heard(process)
    drained(stage, vgpu, vgpu.revoke(time.monotonic_ns() + MS))
    assert time.monotonic_ns() >= start_ns + (length_ms - 1) * MS


def test_work_of_a_destroyed_stream_still_counts(stage: Stage) -> None:
    revoked_during_a_long_kernel(
        stage,
        """
stream = app.new_stream(1)
app.kernel(150.0, stream).launch()
app.call("cuStreamDestroy_v2", stream)
print(1, flush=True)
input()
""",
    )


def test_work_of_a_stream_that_another_contexts_thread_destroyed_still_counts(stage: Stage) -> None:
    revoked_during_a_long_kernel(
        stage,
        """
other, stream = c_void_p(), app.new_stream(1)
app.kernel(150.0, stream).launch()
app.call("cuCtxCreate_v2", byref(other), 0, app.device)
app.call("cuStreamDestroy_v2", stream)
print(1, flush=True)
input()
""",
    )


@pytest.mark.parametrize("how", HOW)
def test_work_in_a_stream_of_another_context_than_the_current_one_still_counts_when_that_one_ends(
    stage: Stage, how: str
) -> None:
    revoked_during_a_long_kernel(
        stage,
        DEATHS
        + f"""
long = app.kernel(150.0, app.new_stream(1))
end = enter("{how}")
long.launch()
end()
print(1, flush=True)
input()
""",
    )


RELEASES = {
    "primary": """
app.call("cuDevicePrimaryCtxRetain", byref(c_void_p()), app.device)
app.call("cuDevicePrimaryCtxRelease_v2", app.device)
""",
    "green": """
app.call("cuGreenCtxDestroy", app.green_context()[0])
""",
}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES.keys())
def test_a_context_that_is_released_and_lives_on_keeps_its_markers(stage: Stage, release: str) -> None:
    """A launch of unknown length waits for the one before, whose end is seen by one."""
    vgpu = stage.vgpu()
    body = f"""
first, second = app.new_stream(1), app.new_stream(1)
app.kernel(60.0, first).launch()
{release}
app.kernel(0.1, second).launch()
print(app.result("cuStreamQuery", first), flush=True)
"""
    program = stage.start(PROLOGUE + body, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        assert stage.heard(program) == "0"


def test_a_stream_with_a_dead_ones_handle_is_another_stream(stage: Stage) -> None:
    revoked_during_a_long_kernel(
        stage,
        """
stream = app.new_stream(1)
app.kernel(0.01, stream).launch()
app.call("cuStreamSynchronize", stream)
app.call("cuStreamDestroy_v2", stream)
others = [app.new_stream(1)]
while others[-1].value != stream.value and len(others) < 100:
    others.append(app.new_stream(1))
app.kernel(150.0, others[-1]).launch()
assert others[-1].value == stream.value
print(1, flush=True)
input()
""",
    )


@pytest.mark.parametrize("turn", ["cuCtxSetCurrent", "cuCtxPushCurrent_v2", "cuCtxCreate_v2"])
def test_another_contexts_default_stream_is_another_stream(stage: Stage, turn: str) -> None:
    """Long work in the second context's: the lease has not drained when the first one's has."""
    revoked_during_a_long_kernel(
        stage,
        f"""
first, second, function = c_void_p(), c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(first))
app.call("cuCtxCreate_v2", byref(second), 0, app.device)
app.call("cuModuleLoadData", byref(app.module), PTX.encode())
long = app.kernel(150.0, LEGACY)
app.call("cuCtxSetCurrent", first)
app.call("cuModuleLoadData", byref(app.module), PTX.encode())
app.kernel(0.1, LEGACY).launch()
if "{turn}" == "cuCtxCreate_v2":
    app.call("cuCtxCreate_v2", byref(second), 0, app.device)
    app.call("cuModuleLoadData", byref(app.module), PTX.encode())
    long = app.kernel(150.0, LEGACY)
else:
    app.call("{turn}", second)
long.launch()
print(1, flush=True)
input()
""",
    )


def test_a_context_may_end_with_work_of_ours_in_it(stage: Stage) -> None:
    vgpu = stage.vgpu()
    program = stage.start(
        PROLOGUE
        + """
for _ in range(5):
    kernel = app.kernel(1.0, LEGACY)
    for _ in range(20):
        kernel.launch()
    app.call("cuDevicePrimaryCtxReset_v2", app.device)
    app = App()
print("done", flush=True)
""",
        stage.environment(vgpu),
    )
    with vgpu.granting(20 * MS):
        assert stage.heard(program) == "done"
        assert program.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("second", ["PER_THREAD", "LEGACY", "app.new_stream(1)"])
@pytest.mark.parametrize("order", ["launch_long(); launch_short()", "launch_short(); launch_long()"])
def test_a_threads_own_streams_in_two_contexts_are_both_waited_for(stage: Stage, second: str, order: str) -> None:
    body = f"""
first, other = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(first))
long = app.kernel(300.0, PER_THREAD)
app.call("cuCtxCreate_v2", byref(other), 0, app.device)
app.call("cuModuleLoadData", byref(app.module), PTX.encode())
short = app.kernel(50.0, {second})  # or the lease may go back before the other is launched: idle

def launch_long():
    app.call("cuCtxSetCurrent", first)
    long.launch()

def launch_short():
    app.call("cuCtxSetCurrent", other)
    short.launch()

{order}
print(1, flush=True)
input()
"""
    revoked_during_a_long_kernel(stage, body, 300)


ABANDONED = {
    "a context that is destroyed": """
first, other = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(first))
app.call("cuCtxCreate_v2", byref(other), 0, app.device)
app.call("cuStreamBeginCapture_v2", app.new_stream(1), 2)
app.call("cuCtxDestroy_v2", other)
app.call("cuCtxSetCurrent", first)
""",
    "a primary context that is reset": """
app.call("cuStreamBeginCapture_v2", app.new_stream(1), 2)
app.call("cuDevicePrimaryCtxReset_v2", app.device)
app = App()
""",
    "a stream that is destroyed": """
stream = app.new_stream(1)
app.call("cuStreamBeginCapture_v2", stream, 2)
app.call("cuStreamDestroy_v2", stream)
""",
    "a hundred at once, which all end": """
streams = [app.new_stream(1) for _ in range(100)]
for stream in streams:
    app.call("cuStreamBeginCapture_v2", stream, 2)
for stream in streams:
    app.call("cuStreamEndCapture", stream, byref(c_void_p()))
""",
}


@pytest.mark.parametrize("how", ABANDONED.values(), ids=ABANDONED.keys())
def test_captures_end_with_what_they_are_in(stage: Stage, how: str) -> None:
    """While one is open no stream is asked whether it is done; what is asked for ever is never answered."""
    vgpu = stage.vgpu()
    body = how + "app.kernel(1.0, LEGACY).launch()\napp.synchronize()\nprint('done', flush=True)\ninput()"
    program = stage.start(PROLOGUE + body, stage.environment(vgpu))
    vgpu.await_want()
    vgpu.open()
    assert stage.heard(program) == "done"
    eventually(lambda: not vgpu.slot().undrained, "its drain is seen")
