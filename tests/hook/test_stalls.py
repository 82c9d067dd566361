"""Work that was submitted under an open-ended lease, unmeasured, and cannot end before a launch that the gate holds: no
launch waits for it without end."""

from __future__ import annotations

import time

from tests.hook.programs import PROLOGUE
from tests.hook.stage import MS, Stage, StagedVgpu, eventually


def launched_on(stage: Stage, program: str) -> StagedVgpu:
    """``program`` says that it has launched, loses its open-ended lease, and goes on under one that has an end."""
    vgpu = stage.vgpu()
    process = stage.start(PROLOGUE + program, stage.environment(vgpu))
    vgpu.await_want()
    vgpu.open()
    assert stage.heard(process) == "launched"
    end_ns = time.monotonic_ns() + MS
    vgpu.revoke(end_ns)
    eventually(lambda: time.monotonic_ns() > end_ns, "the lease is over")
    waits = vgpu.slot().gate_waits
    stage.tell(process)
    # not its want: that may be the one of before, and a lease that comes before the launch goes back unused
    eventually(lambda: vgpu.slot().gate_waits > waits, "its launch waits for a lease")
    vgpu.lease(time.monotonic_ns(), time.monotonic_ns() + 60_000 * MS)
    assert stage.heard(process) == "over"
    return vgpu


def test_a_kernel_that_waits_for_another_launch(stage: Stage) -> None:
    """As ranks of one communicator in one process do."""
    vgpu = launched_on(
        stage,
        """
first, second = app.new_stream(1), app.new_stream(1)
word = app.allocate(4096)
app.call("cuMemsetD8_v2", c_uint64(word), 0, c_size_t(4096))
app.call("cuStreamWaitValue32_v2", first, c_uint64(word), c_uint(1), c_uint(0))
app.kernel(1.0, first).launch()
print("launched", flush=True)
input()
app.kernel(1.0, second).launch()
app.call("cuStreamWriteValue32_v2", second, c_uint64(word), c_uint(1), c_uint(0))
app.call("cuStreamSynchronize", first)
print("over", flush=True)
input()
""",
    )
    eventually(lambda: not vgpu.slot().undrained, "its drain is seen")


def test_a_launch_beside_a_capture_of_the_same_thread(stage: Stage) -> None:
    """While it is open no stream may be asked, so the end of the one before is not seen without a marker."""
    launched_on(
        stage,
        """
stream, other = app.new_stream(1), app.new_stream(0)
kernel = app.kernel(1.0, other)
app.call("cuStreamBeginCapture_v2", stream, 2)
kernel.launch()
print("launched", flush=True)
input()
kernel.launch()
app.call("cuStreamEndCapture", stream, byref(c_void_p()))
print("over", flush=True)
input()
""",
    )
