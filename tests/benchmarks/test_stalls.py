"""How late a host lets threads run."""

from __future__ import annotations

import pytest

from benchmarks.suite.stalls import lateness, queued, sleeping, waited_ns, woken

MS = 1_000_000


def test_who_is_more_than_a_millisecond_late_is_counted_by_the_second() -> None:
    late = [50_000] * 97 + [MS, MS + 1, 3 * MS]
    figures = lateness("sleep", late, 4.0)
    assert figures == {
        "sleep_late_per_second": 0.5,
        "sleep_late_p99_us": pytest.approx(1000.001),
        "sleep_late_worst_us": 3000.0,
    }


def test_nothing_is_said_of_who_never_ran() -> None:
    assert lateness("wake", [], 1.0) == {}


def test_another_process_wakes_it_until_the_time_is_over() -> None:
    figures = woken(0.05)
    assert figures.keys() == {"wake_late_per_second", "wake_late_p99_us", "wake_late_worst_us"}
    assert figures["wake_late_worst_us"] >= figures["wake_late_p99_us"] > 0


def test_what_a_late_thread_waited_for_a_core_is_told_apart() -> None:
    assert queued([MS, 3 * MS, 5 * MS], [MS, 2 * MS, 6 * MS]) == {"sleep_late_queued_ratio": 7 / 8}
    assert queued([MS], [MS]) == {}
    assert waited_ns("105 7 3\n") == 7


def test_a_sleeper_is_looked_at() -> None:
    assert sleeping(0.02).keys() >= {"sleep_late_per_second", "sleep_late_p99_us", "sleep_late_worst_us"}
