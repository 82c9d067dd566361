"""Null pointers, sizes of nothing, wrong handles: with the hook each call ends as it does without."""

from __future__ import annotations

import signal
from pathlib import Path

from cython_ext.readings import SlotState
from tests.hook.odd.cases import Program, all_cases, differences
from tests.hook.stage import LIBRARIES, Stage, eventually

HANGS = f"signal {signal.SIGALRM}"
CUDA, NVML = str(LIBRARIES / "sim/libcuda.so.1"), str(LIBRARIES / "sim/libnvidia-ml.so.1")


def test_the_hook_ends_odd_calls_as_the_driver_does(stage: Stage, tmp_path: Path) -> None:
    program = Program(tmp_path, all_cases())
    vgpu = stage.vgpu(memory_bytes=143_771 << 20)
    vgpu.open()
    inside = stage.environment(vgpu)
    outside = {name: value for name, value in inside.items() if name not in ("VGPU_ID", "LD_PRELOAD")}
    expected = program.results(outside, CUDA, NVML)
    assert [program.cases[number] for number, result in expected.items() if result == HANGS] == []

    def give_back() -> None:
        eventually(lambda: all(slot.state == SlotState.DEAD for slot in vgpu.slots()), "its slot is a dead one's")
        for slot in vgpu.slots():
            vgpu.activity.reap_slot(slot.index)

    found = program.results(inside, CUDA, NVML, give_back)
    assert differences(program.cases, found, expected) == []


def test_the_memory_of_a_vgpu_is_told_to_who_asks_for_one_of_the_two(stage: Stage, tmp_path: Path) -> None:
    program = """
from ctypes import byref, c_size_t
from tests.hook.app import App
app, free, total, other = App(), c_size_t(), c_size_t(), c_size_t()
for arguments in ((None, byref(total)), (byref(free), None), (None, None)):
    assert app.result("cuMemGetInfo_v2", *arguments) == 0
app.call("cuMemGetInfo_v2", byref(other), byref(c_size_t()))
print(total.value >> 30, free.value == other.value)
"""
    assert stage.run(program, stage.environment(stage.vgpu(memory_bytes=3 << 30))).stdout == "3 True\n"
