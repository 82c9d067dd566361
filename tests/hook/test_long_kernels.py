"""Kernels that are most of a lease: the first of one passes always, and may be its last."""

from __future__ import annotations

import textwrap

import pytest

from tests.hook.stage import MS, Stage
from tests.hook.test_gate import PROLOGUE, used_lease

LEARNED_MS, IN_TRUTH_MS = 30, 6
PROGRAM = f"""
from tests.hook.app import NS_PER_ITERATION
kernel = app.kernel({LEARNED_MS})
for _ in range(3):
    kernel.launch()
    app.synchronize()
print("learned", flush=True)
sys.stdin.readline()
kernel.parameters[1].value = int({IN_TRUTH_MS}e6 / NS_PER_ITERATION)
while True:
    kernel.launch()
"""


def test_one_in_each_lease_is_seen_to_have_become_shorter(stage: Stage) -> None:
    """Nothing else tells: what is taken for longer than half of a lease is the first in it, and the last."""
    vgpu = stage.vgpu()
    process = stage.start(textwrap.dedent(PROLOGUE) + PROGRAM, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        assert stage.heard(process) == "learned"
    stage.tell(process)
    in_each: list[int] = []
    while in_each.count(2) < 3:
        before = vgpu.slot().launches
        used_lease(stage, vgpu, 14 * MS)
        in_each.append(vgpu.slot().launches - before)
        assert len(in_each) < 300, f"launches in each lease: {in_each}"


def test_one_that_outlasts_every_lease_is_known_though_it_is_always_the_first(stage: Stage) -> None:
    """No lease has a second one, which would be timed whatever it takes."""
    vgpu = stage.vgpu()
    never_ends = f"kernel = app.kernel({LEARNED_MS})\nwhile True:\n    kernel.launch()\n"
    stage.start(textwrap.dedent(PROLOGUE) + never_ends, stage.environment(vgpu))
    for _ in range(5):
        used_lease(stage, vgpu, LEARNED_MS * MS // 2)
    assert vgpu.slot().longest_kernel_ns > LEARNED_MS * MS // 2


GROWS = f"""
from tests.hook.app import NS_PER_ITERATION
kernel = app.kernel(3)
for _ in range(20):
    kernel.launch()
    app.synchronize()
print("learned", flush=True)
sys.stdin.readline()
kernel.parameters[1].value = int({LEARNED_MS}e6 / NS_PER_ITERATION)
while True:
    kernel.launch()
"""


def test_one_that_has_become_ten_times_as_long_is_timed_anew(stage: Stage) -> None:
    """As the first of each lease. What predictions are multiplied by does not go so far."""
    vgpu = stage.vgpu()
    process = stage.start(textwrap.dedent(PROLOGUE) + GROWS, stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        assert stage.heard(process) == "learned"
    stage.tell(process)
    for _ in range(40):
        used_lease(stage, vgpu, LEARNED_MS * MS // 2)
        if vgpu.slot().longest_kernel_ns > 0.8 * LEARNED_MS * MS:
            return
    pytest.fail(f"taken for {vgpu.slot().longest_kernel_ns / MS:.1f} ms")
