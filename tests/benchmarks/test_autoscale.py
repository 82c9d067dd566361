"""The autoscaling benchmark on drawn demands and a small trace: its logic, no result."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.autoscale import trace
from benchmarks.autoscale.__main__ import of_one
from benchmarks.autoscale.rules import LEAST, MOST, READING_S, READINGS, RULES, Fixed, replay

ROOT = Path(__file__).parents[2]


def test_a_share_that_suffices_misses_nothing_and_holds_its_size() -> None:
    outcome = replay(Fixed(50), [40.0, 0.0])
    assert outcome.missed == 0
    assert outcome.offered == pytest.approx(0.4 * READINGS * READING_S)
    assert outcome.held == pytest.approx(2 * 0.5 * READINGS * READING_S)
    assert outcome.changes == 0


def test_a_share_that_does_not_suffice_misses_what_waits() -> None:
    outcome = replay(Fixed(20), [40.0])
    assert outcome.missed == pytest.approx(outcome.offered)  # it lacks half of the first reading, too
    short = replay(Fixed(39), [40.0] + [0.0] * 3)
    assert 0 < short.missed < short.offered


def test_the_bound_misses_nothing_with_the_fewest_hours_of_all_that_miss_nothing() -> None:
    for samples in trace.drawn(5, 60, seed=3):
        found = of_one(samples)
        assert found["foreseen"].missed == 0
        assert found["fixed-peak"].missed == pytest.approx(0)
        assert found["foreseen"].held <= found["fixed-peak"].held
        assert {outcome.offered for outcome in found.values()} == {found["ours"].offered}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_stays_within_the_bounds(name: str) -> None:
    for samples in trace.drawn(3, 40, seed=5):
        rule = RULES[name](samples)
        size = rule.start()
        for at, demand in enumerate(sample for sample in samples for _ in range(READINGS)):
            assert LEAST <= size <= MOST + 0.1
            busy = min(demand, size) / 100
            size = rule.next(at * READING_S, size, demand, busy, 1 - size / 100 if demand > size else 0.0)


def test_the_same_seed_draws_the_same_demands() -> None:
    assert trace.drawn(2, 50, seed=1) == trace.drawn(2, 50, seed=1)
    assert trace.drawn(2, 50, seed=1) != trace.drawn(2, 50, seed=2)
    assert all(0 <= demand <= 100 for samples in trace.drawn(2, 50, seed=1) for demand in samples)


def test_a_trace_is_read_and_compared(tmp_path: Path) -> None:
    rows = ["value,timestamp_anon,container_ip"]
    rows += [f"{(at * 7) % 90},{1000 + 57.0 * at},long" for at in reversed(range(trace.LEAST_SAMPLES))]
    rows += ["50,1000,short"]
    text = "\n".join(rows).encode()
    with tarfile.open(tmp_path / trace.ARCHIVE, "w:gz") as archive:
        member = tarfile.TarInfo("pod.csv")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    assert trace.demands(tmp_path) == [[float((at * 7) % 90) for at in range(trace.LEAST_SAMPLES)]]
    drawing = tmp_path / "plot.svg"
    argv = [sys.executable, "-m", "benchmarks.autoscale", "--trace", str(tmp_path), "--json", "--plot", str(drawing)]
    found = json.loads(subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert found["containers"] == 1
    assert found["rules"].keys() == RULES.keys()
    assert drawing.read_text().startswith("<?xml")
