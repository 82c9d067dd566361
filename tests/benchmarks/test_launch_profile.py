"""benchmarks/experiments/launch_profile.py: where a launch's time goes, by looks at the launching thread."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks.experiments.launch_profile import Sample, kinds, parse, plain

NAMES = {
    1: ["__pyx_f_4gate_enter at gate.c:7"],
    2: ["real_cuStreamQuery at driver.h:3", "__pyx_f_5track_streams_busy at track.c:4", "vgpu_drained at track.c:5"],
    3: ["__pyx_f_4gate_enter at gate.c:8", "vgpu_enter at gate.c:9"],
}


def test_lines_become_samples() -> None:
    assert parse(["libvgpu_hook.so 1a", "libc.so.6 ff 2 3"]) == [
        Sample("libvgpu_hook.so", 0x1A, ()),
        Sample("libc.so.6", 0xFF, (2, 3)),
    ]


def test_a_call_is_told_by_who_made_it_and_our_own_code_by_its_function() -> None:
    samples = [
        Sample("libvgpu_hook.so", 1, ()),
        Sample("libcuda.so.1", 99, (2, 3)),
        Sample("libcuda.so.1", 98, (2, 3)),
        Sample("launch", 97, ()),
    ]
    assert kinds(samples, NAMES) == Counter(
        {
            "own: gate_enter": 1,
            "in libcuda.so.1 from real_cuStreamQuery < track_streams_busy < vgpu_drained < gate_enter < vgpu_enter": 2,
            "the program itself, in launch": 1,
        }
    )
    assert kinds(samples[:1], NAMES, lines=True) == Counter({"own: __pyx_f_4gate_enter at gate.c:7": 1})


def test_what_lies_below_the_launch_itself_is_of_calls_that_have_returned() -> None:
    names = {
        1: ["real_cuEventQuery at driver.h:3", "vgpu_collect at track.c:5"],
        2: ["__pyx_f_4gate_enter at gate.c:8"],
        3: ["vgpu_enter at gate.c:9"],
        4: ["__pyx_f_8wrappers_kernel at wrappers.c:7"],
        5: ["real_cuLaunchKernel at driver.h:4", "__pyx_f_8wrappers_kernel at wrappers.c:8"],
        6: ["cuLaunchKernel at wrappers.c:99"],
    }
    samples = [Sample("libcuda.so.1", 9, (1, 2, 3, 4, 6)), Sample("libcuda.so.1", 9, (1, 2, 3, 5, 6))]
    assert kinds(samples, names) == Counter(
        {
            "in libcuda.so.1 from real_cuEventQuery < vgpu_collect < gate_enter < vgpu_enter < wrappers_kernel < "
            "cuLaunchKernel": 1,
            "in libcuda.so.1 from real_cuLaunchKernel < wrappers_kernel < cuLaunchKernel": 1,
        }
    )


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("__pyx_f_10cython_ext_5logic_6window_backlog_submit at window.c:1", "cython_ext_logic_window_backlog_submit"),
        ("__pyx_f_4gate_wait.isra.0", "gate_wait"),
        ("cuLaunchKernel", "cuLaunchKernel"),
    ],
)
def test_what_cython_puts_around_names_is_left_out(symbol: str, name: str) -> None:
    assert plain(symbol) == name


@pytest.mark.slow
def test_a_launch_is_looked_at() -> None:
    command = [sys.executable, "-m", "benchmarks.experiments.launch_profile", "--simulate", "--what", "paced"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"paced: \d+ ns through the hook, \d+ past it, -?\d+ added, .* [1-9]\d* looks", done.stdout)
    assert "vgpu_" in done.stdout  # a launch that is timed: the others take the fast path, under the limit, too
    assert "all of our own code" in done.stdout
