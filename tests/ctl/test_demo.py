"""The arithmetic of the demonstration, its verdict, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import ended
from vgpu.demo.report import Report, Sharer
from vgpu.errors import VgpuError
from vgpu.harness.measure import Sample, Series, common_window, shares
from vgpu.harness.program import WorkloadReport

SECOND = 10**9


def series(*points: tuple[float, float]) -> Series:
    made = Series()
    for seconds, work in points:
        made.add(Sample(int(seconds * SECOND), work))
    return made


def test_work_between_samples_lies_on_the_line() -> None:
    made = series((1, 10), (2, 30), (4, 30))
    assert made.work_at(SECOND) == 10
    assert made.work_at(SECOND * 3 // 2) == 20
    assert made.work_at(3 * SECOND) == 30
    assert made.rate(SECOND, 3 * SECOND) == 10
    assert made.recent_rate() == 0


@pytest.mark.parametrize("at_ns", [0, SECOND - 1, 2 * SECOND + 1])
def test_nothing_is_known_outside_of_the_samples(at_ns: int) -> None:
    with pytest.raises(ValueError, match="on both sides"):
        series((1, 1), (2, 2)).work_at(at_ns)


def test_samples_come_in_order() -> None:
    made = series((1, 1))
    with pytest.raises(ValueError, match="not after"):
        made.add(Sample(SECOND, 2))


positive = st.integers(1, 10**6)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=20), st.data())
def test_the_whole_is_the_sum_of_its_parts(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    made, at_ns, work = Series(), 0, 0
    for step_ns, more in steps:
        at_ns, work = at_ns + step_ns, work + more
        made.add(Sample(at_ns, work))
    first, last = made.samples[0], made.samples[-1]
    between = data.draw(st.integers(first.at_ns, last.at_ns))
    before, after = made.work_at(between) - first.work, last.work - made.work_at(between)
    assert before + after == pytest.approx(last.work - first.work)
    assert before >= 0
    assert after >= 0


def test_the_window_begins_when_the_last_one_reports_and_must_fit_into_every_series() -> None:
    early, late = series((1, 0), (5, 40)), series((2, 0), (6, 10))
    assert common_window([early, late], 3 * SECOND) == (2 * SECOND, 5 * SECOND)
    with pytest.raises(VgpuError, match=r"0\.5 s too early"):
        common_window([early, late], 3 * SECOND + SECOND // 2)
    with pytest.raises(VgpuError, match="never got to run"):
        common_window([early, Series()], SECOND)


def test_shares_of_nothing_are_nothing() -> None:
    assert shares([1.0, 3.0]) == [0.25, 0.75]
    assert shares([0.0, 0.0]) == [0.0, 0.0]


def report(first: float, second: float) -> Report:
    return Report(
        simulated=True,
        gpu="Simulated H200",
        mode="temporal",
        total_ratio=0.987,
        vgpus=(
            Sharer("vgpu-00000001", 30.0, 0.3, first, 25.0, 8 << 30, 1),
            Sharer("vgpu-00000002", 70.0, 0.7, second, 25.1, 16 << 30, 0),
        ),
    )


@pytest.mark.parametrize(("achieved", "missed"), [(0.271, False), (0.329, False), (0.269, True), (0.331, True)])
def test_more_than_three_points_is_a_miss(achieved: float, missed: bool) -> None:
    made = report(achieved, 1 - achieved)
    assert made.missed is missed
    assert any("miss" in said for said in made.verdict()) is missed


def test_the_json_object_is_the_documented_one() -> None:
    assert json.loads(json.dumps(report(0.3, 0.7).as_json())) == {
        "simulated": True,
        "gpu": "Simulated H200",
        "mode": "temporal",
        "total_ratio": 0.987,
        "vgpus": [
            {
                "id": "vgpu-00000001",
                "sm_percent": 30.0,
                "requested_ratio": 0.3,
                "achieved_ratio": 0.3,
                "tokens_per_second": 25.0,
                "memory_limit_bytes": 8 << 30,
                "memory_refusals": 1,
            },
            {
                "id": "vgpu-00000002",
                "sm_percent": 70.0,
                "requested_ratio": 0.7,
                "achieved_ratio": 0.7,
                "tokens_per_second": 25.1,
                "memory_limit_bytes": 16 << 30,
                "memory_refusals": 0,
            },
        ],
    }


def test_what_a_workload_says_is_heard() -> None:
    report = WorkloadReport()
    report.take({"event": "memory", "refusals": 1, "bytes_allocated": 5})
    report.take({"event": "started", "gpu": "x"})
    report.take({"event": "progress", "at_ns": 7, "work": 3, "seconds": 1.0, "kernels": 1})
    report.take({"event": "result", "work": 9})
    assert (report.memory_refusals, report.bytes_allocated, report.started) == (1, 5, True)
    assert report.series.samples == [Sample(7, 3)]
    with pytest.raises(VgpuError, match="CUDA_ERROR_NO_DEVICE"):
        report.take({"event": "error", "error": "cuInit failed: CUDA_ERROR_NO_DEVICE (100)", "code": 100})


CLEANING = """
import signal, sys
from pathlib import Path
import trio
from vgpu.harness.signals import ended_by_signals
async def work():
    try:
        print("ready", flush=True)
        await trio.sleep_forever()
    finally:
        print("cleaned", flush=True)
try:
    trio.run(ended_by_signals, work)
except BaseExceptionGroup as group:
    raise group.exceptions[0]
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_everything_cleaned_up(number: signal.Signals) -> None:
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    with (
        subprocess.Popen([sys.executable, "-c", CLEANING], cwd=root, stdout=pipe, text=True) as process,
        ended(process),
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.stdout.read() == "cleaned\n"
        assert process.wait(30) == 128 + number
