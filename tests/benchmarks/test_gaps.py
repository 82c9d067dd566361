"""What two hooks logged and what their kernels noted, brought together: where the time of a hand-over went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.experiments.gaps import Passed, brought_together, in_force, report
from benchmarks.experiments.hook_logs import Held, leases, parse

GIVER = """\
attached, and nothing that is a line
900 queues ahead of epoch, behind ns 7 0
1000 lease begins 7 50000
1010 released: launches, ns 2 1000000
1020 lease has GO since ns, flags 990 3
46000 lease ends 7 50000
46500 queues ahead of epoch, behind ns 9 400
47000 tail of epoch, ns 7 150
52000 drained epoch, overrun ns 7 2000
52010 window ns, busy ns 1000000 5
99000 lease begins 9 140000
"""
TAKER = """\
2000 queues ahead of epoch, behind ns 8 0
48000 lease begins 8 90000
48800 opened without the lock: epoch, launches 8 2
49000 released: launches, ns 2 1000000
49500 lease has GO since ns, flags 47500 3
"""


def test_a_log_is_told_lease_by_lease() -> None:
    first, second = leases(parse(GIVER.splitlines()))
    assert first == Held(7, 1000, 990, 1010, 50_000, 46_000, 46_500, 47_000, 52_000)
    assert second == Held(9, 99_000)
    (taken,) = leases(parse(TAKER.splitlines()))
    assert (taken.go_ns, taken.begins_ns, taken.released_ns) == (47_500, 48_000, 49_000)


def test_a_word_that_moved_without_the_lock_has_moved_then() -> None:
    lines = TAKER.splitlines()
    (taken,) = leases(parse(lines[:3] + lines[4:]))
    assert taken.released_ns == 48_800


def test_the_drain_of_a_lease_is_its_own_also_when_the_next_one_has_begun() -> None:
    log = (
        "1 lease begins 7 10\n11 lease begins 8 20\n15 drained epoch, overrun ns 7 5\n25 drained epoch, overrun ns 8 5"
    )
    assert [held.drained_ns for held in leases(parse(log.splitlines()))] == [15, 25]


def test_a_lease_is_in_force_from_its_beginning_on() -> None:
    first, second = leases(parse(GIVER.splitlines()))
    assert [in_force([first, second], at) for at in (999, 1000, 98_999, 99_000)] == [None, first, first, second]


def test_what_both_say_is_told_from_the_last_end_on_and_on_one_clock() -> None:
    """The device's clock is 10⁶ ns ahead of ours, and as fast."""
    looks = [(1_000_000, 0), (2_000_000, 1_000_000)]
    given = {"kernels_ns": [(1_030_000, 1_040_000), (1_040_000, 1_051_000)], "looks": looks}
    taken = {"kernels_ns": [(1_060_000, 1_070_000)], "looks": looks}
    logs = [leases(parse(log.splitlines())) for log in (GIVER, TAKER)]
    found, (gap,) = brought_together([given, taken], logs)
    assert [each.gap for each in found] == [9_000]
    assert gap == Passed(
        at_s=51e-6, giver=0, taker=1, start=9.0, end=-1.0, over=-5.0, queues=-4.5, tail=-4.0, drained=1.0, go=-3.5,
        begins=-3.0, released=-2.0,
    )  # fmt: skip
    assert gap.steps() == {"start": 9.0}, "the GPU had everything before the last end"


def test_kernels_that_overlap_leave_no_gap_to_tell_of() -> None:
    looks = [(0, 0), (100, 100)]
    found, gaps = brought_together(
        [{"kernels_ns": [(0, 10)], "looks": looks}, {"kernels_ns": [(5, 15)], "looks": looks}], [[], []]
    )
    assert (len(found), gaps) == (1, [])


LATE = Passed(1.0, 0, 1, 2200.0, tail=None, drained=40.0, go=100.0, begins=2050.0, released=2060.0)


@pytest.mark.parametrize(
    ("gap", "took"),
    [
        (LATE, {"told": 40.0, "go": 60.0, "begins": 1950.0, "released": 10.0, "start": 140.0}),
        (replace(LATE, tail=-100.0), {"go": 100.0, "begins": 1950.0, "released": 10.0, "start": 140.0}),
        (replace(LATE, begins=None, released=None), {"told": 40.0, "go": 60.0, "start": 2100.0}),
        (replace(LATE, released=2300.0), {"told": 40.0, "go": 60.0, "begins": 1950.0, "released": 150.0}),
    ],
    ids=["told by its drain", "told at its tail", "nothing known of the taker", "logged after the first kernel began"],
)
def test_the_steps_after_the_last_end_add_up_to_the_gap(gap: Passed, took: dict[str, float]) -> None:
    assert gap.steps() == took
    assert sum(took.values()) == gap.start


def test_the_report_names_the_step_that_took_longest() -> None:
    usual = Passed(2.0, 1, 0, 145.0, tail=-120.0, drained=20.0, go=-60.0, begins=-50.0, released=-40.0)
    lines = report([usual, LATE, usual], 1000.0)
    assert lines[0] == "3 gaps, 1 over 1000 µs; µs after the giver's last end"
    assert lines[2].split()[:4] == ["1.0000", "0", "→", "1"]
    assert lines[3].split()[-2:] == ["-40", "145"], "medians of all"
    over, of_all = "\n".join(lines).split("\n\n")[1:]
    assert [text.split()[-3:] for text in over.splitlines()[1:]] == [
        ["0", "40", "40"],
        ["0", "60", "60"],
        ["1", "1950", "1950"],
        ["0", "10", "10"],
        ["0", "140", "140"],
    ]
    assert [text.split()[-3] for text in of_all.splitlines()[1:]] == ["0", "0", "1", "0", "2"]


def test_without_a_gap_nothing_is_claimed() -> None:
    assert report([], 1000.0)[0].startswith("0 gaps, 0 over")
