"""Meters with a planted fault: the checks of ``test_meter`` must find every fault, and pass for the real one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cython_ext.testing.bindings_logic import Meter, Usage
from tests.native.meter import test_meter as checks


class ASampleStandsForItself(Meter):
    """The launches between two timed ones are charged by the mean alone."""

    def times(self, tag: int, mean_ns: int, samples: int, now_ns: int, steady: bool = False) -> tuple[int, int]:
        assumed_ns, weight = super().times(tag, mean_ns, samples, now_ns, steady)
        return assumed_ns, min(weight, 1)


class WhatCannotBeTimedIsLost(Meter):
    def carries(self, tag: int, weight: int) -> None:
        """Forgets it."""


class TakesWhatIsNotLeft(Meter):
    def takes(self, tag: int, owing: bool = False) -> bool:
        return super().takes(tag, owing=True)


class NeverDoubts(Meter):
    def doubts(self) -> None:
        """Keeps each key's distance."""


class AllowanceWithoutEnd(Meter):
    def recall(self, most_ns: int) -> None:
        super().recall(2 * most_ns)


class WeightIgnored(Usage):
    def amends(self, lasted_ns: int, assumed_ns: int, weight: int) -> None:
        super().amends(lasted_ns, assumed_ns, 1)


class CountedWhenSubmitted(Usage):
    """Work is used when it is submitted, whether or not the GPU was seen busy."""

    def settle(self, spent_ns: int, busy_ns: int, drained: bool) -> None:
        super().settle(spent_ns, busy_ns + spent_ns, drained)


class KeepsWhatRanSideBySide(Usage):
    def settle(self, spent_ns: int, busy_ns: int, drained: bool) -> None:
        super().settle(spent_ns, busy_ns, False)


class PromisesForgotten(Usage):
    def room_ns(self, allowed_ns: int, others_ns: int, promised_ns: int) -> int:
        return super().room_ns(allowed_ns, others_ns, 0)


@dataclass(frozen=True, slots=True)
class Case:
    fault: type
    replaced: str
    check: Callable[[], None]


CASES = (
    Case(ASampleStandsForItself, "Meter", lambda: checks.test_a_rhythm_hides_nothing(7, 0.06, 1000)),
    Case(
        WhatCannotBeTimedIsLost,
        "Meter",
        lambda: checks.test_what_cannot_be_timed_is_what_the_next_timed_launch_stands_for(),
    ),
    Case(TakesWhatIsNotLeft, "Meter", lambda: checks.test_no_launch_takes_more_than_is_left()),
    Case(NeverDoubts, "Meter", lambda: checks.test_a_kernel_that_becomes_far_longer_is_doubted_and_timed_at_once()),
    Case(AllowanceWithoutEnd, "Meter", lambda: checks.test_what_is_promised_is_what_is_left_of_a_limited_allowance()),
    Case(WeightIgnored, "Usage", lambda: checks.test_what_a_sample_tells_of_launches_that_have_drained_counts()),
    Case(
        CountedWhenSubmitted,
        "Usage",
        checks.test_work_is_used_when_it_is_seen_to_run_not_when_it_is_submitted,
    ),
    Case(KeepsWhatRanSideBySide, "Usage", lambda: checks.test_of_what_ran_side_by_side_no_more_than_a_little_is_kept()),
    Case(PromisesForgotten, "Usage", checks.test_work_is_used_when_it_is_seen_to_run_not_when_it_is_submitted),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault.__name__)
def test_the_fault_is_found(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check()
    monkeypatch.setattr(checks, case.replaced, case.fault)
    with pytest.raises(AssertionError):
        case.check()
