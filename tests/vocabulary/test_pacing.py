from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.pacing import Pace, and_more


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 3)), max_size=60))
def test_each_report_is_told_or_counted_once_and_none_comes_early(steps: list[tuple[str, float]]) -> None:
    pace: Pace[str] = Pace(1.0, most_keys=4)
    told: list[float] = []
    seen = reported = 0
    now_s = 0.0
    for key, later_s in steps:
        now_s += later_s
        seen += 1
        missed = pace.due(key, now_s)
        if missed is not None:
            reported += 1 + missed
            told.append(now_s)
        assert len(pace._pauses) <= 5
    assert all(sum(at <= other < at + 1 for other in told) <= 5 for at in told)
    left = sum(pause.missed for pause in pace._pauses.values())
    assert reported + left == seen


def test_what_was_left_out_is_told_once() -> None:
    pace: Pace[str] = Pace(1.0)
    assert [pace.due("a", now_s) for now_s in (0.0, 0.5, 0.9)] == [0, None, None]
    assert (pace.left_out("a"), pace.left_out("a"), pace.left_out("b")) == (2, 0, 0)
    assert [pace.due("a", now_s) for now_s in (0.95, 1.1)] == [None, 1]
    assert (and_more(0), and_more(240)) == ("", " (and 240 more)")
