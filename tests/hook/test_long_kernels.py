"""Kernels that are most of a lease: the first of one passes always, and may be its last."""

from __future__ import annotations

import textwrap

import pytest

from tests.hook.programs import PROLOGUE, used_lease
from tests.hook.stage import MS, Stage, StagedVgpu

LONG_MS = 30


def changed(stage: Stage, learned_ms: int, in_truth_ms: int) -> StagedVgpu:
    """A vGPU whose program launches a kernel that was learned to take ``learned_ms``, and takes another time since."""
    program = f"""
from tests.hook.app import NS_PER_ITERATION
kernel = app.kernel({learned_ms})
for _ in range(3):
    kernel.launch()
    app.synchronize()
print("learned", flush=True)
sys.stdin.readline()
kernel.parameters[1].value = int({in_truth_ms}e6 / NS_PER_ITERATION)
while True:
    kernel.launch()
"""
    vgpu = stage.vgpu()
    process = stage.start(textwrap.dedent(PROLOGUE) + program, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        assert stage.heard(process) == "learned"
    stage.tell(process)
    return vgpu


def test_one_in_each_lease_is_seen_to_have_become_shorter(stage: Stage) -> None:
    """Nothing else tells: what is taken for longer than half of a lease is the first in it, and the last."""
    vgpu = changed(stage, LONG_MS, 6)
    in_each: list[int] = []
    while in_each.count(2) < 3:
        before = vgpu.slot().launches
        used_lease(stage, vgpu, 14 * MS)
        in_each.append(vgpu.slot().launches - before)
        assert len(in_each) < 300, f"launches in each lease: {in_each}"


def test_one_that_outlasts_every_lease_is_known_though_it_is_always_the_first(stage: Stage) -> None:
    """No lease has a second one, which would be timed whatever it takes."""
    vgpu = stage.vgpu()
    never_ends = f"kernel = app.kernel({LONG_MS})\nwhile True:\n    kernel.launch()\n"
    stage.start(textwrap.dedent(PROLOGUE) + never_ends, stage.environment(vgpu))
    for _ in range(5):
        used_lease(stage, vgpu, LONG_MS * MS // 2)
    assert vgpu.slot().longest_kernel_ns > LONG_MS * MS // 2


def test_one_that_has_become_ten_times_as_long_is_timed_anew(stage: Stage) -> None:
    """As the first of each lease. What predictions are multiplied by does not go so far."""
    vgpu = changed(stage, 3, LONG_MS)
    for _ in range(40):
        used_lease(stage, vgpu, LONG_MS * MS // 2)
        if vgpu.slot().longest_kernel_ns > 0.8 * LONG_MS * MS:
            return
    pytest.fail(f"taken for {vgpu.slot().longest_kernel_ns / MS:.1f} ms")


def test_what_the_driver_refused_taught_nothing(stage: Stage) -> None:
    """Else the next one would count as nothing. Nobody knows its length, so another waits until it is done."""
    program = """
first, second = app.new_stream(1), app.new_stream(1)
kernels = [app.kernel(60.0, stream) for stream in (first, second)]
refused = list(kernels[0].arguments)
refused[7] = 1 << 30  # of shared memory
assert [app.result("cuLaunchKernel", *refused) == 0 for _ in range(3)] == [False] * 3
for kernel in kernels:
    kernel.launch()
print(app.result("cuStreamQuery", first), flush=True)
"""
    vgpu = stage.vgpu()
    process = stage.start(PROLOGUE + program, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        assert stage.heard(process) == "0"
