"""The timeline that ``docs/explanation/scheduling.md`` works through, against the scheduler on the simulated GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core.model import MS, Run, S, Work
from vgpu.share import PPM, Share

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "scheduling.md"
GUARANTEES = {"A": 0.3, "B": 0.7}
ROW = re.compile(r"^\| (\d+) \| (\w?) ?\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\S+) \| (\S+) \| (\w)", re.MULTILINE)


def rows() -> list[tuple[int, str, float, float, float, float, float, str]]:
    found = ROW.findall(PAGE.read_text())
    return [(int(at), holder, *(float(n.replace("−", "-")) for n in numbers), to) for at, holder, *numbers, to in found]


def test_the_table_follows_from_the_formulas() -> None:
    times = dict.fromkeys(GUARANTEES, 0.0)
    before = 0
    assert len(rows()) == 5
    for at, holder, of_a, of_b, clock, lag_of_a, lag_of_b, _ in rows():
        if holder:
            times[holder] += (at - before) / GUARANTEES[holder]
        before = at
        assert times == pytest.approx({"A": of_a, "B": of_b})
        assert clock == pytest.approx(sum(GUARANTEES[name] * times[name] for name in times))
        lags = {name: GUARANTEES[name] * (clock - times[name]) for name in times}
        assert lags == pytest.approx({"A": lag_of_a, "B": lag_of_b})


def test_the_scheduler_does_what_the_table_says() -> None:
    """From a turn of A on, lags change as in the table. At that turn they are what the first leases have left."""
    shares = [Share(round(guarantee * PPM)) for guarantee in GUARANTEES.values()]
    run = Run(TemporalScheduler(), shares, [Work(MS, jitter=0, refill_ns=0)] * 2).run(2 * S)
    period_ns = rows()[2][0] * MS
    start = next(record.go_ns for record in reversed(run.records) if record.key == 0) + period_ns
    first: list[int] = []
    for at, *_, lag_of_a, lag_of_b, to in rows():
        now_ns = start + at * MS
        run.run(now_ns)
        lags = [snapshot.lag_ns for snapshot in run.scheduler.snapshot(now_ns)]
        first = first or lags
        added = [(now - then) / MS for now, then in zip(lags, first, strict=True)]
        assert added == pytest.approx([lag_of_a, lag_of_b], abs=0.01)
        assert (run.records[-1].key, run.records[-1].go_ns) == ("AB".index(to), now_ns)
