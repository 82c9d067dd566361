"""Which vGPUs are reclaimed: a warning first, never one that was used, never too early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.quotas.idle import RETRY_S, IdleWatch, Observed, Reclaim, Warn


def seen(work: int = 0, *, active: bool = False, limit_s: float = 100, warning_s: float = 20) -> Observed:
    return Observed("a", (work,), active, limit_s, warning_s)


def test_first_a_warning_then_the_reclaim() -> None:
    watch = IdleWatch()
    assert watch.observe(0, [seen()]) == []
    assert watch.observe(79, [seen()]) == []
    assert watch.observe(80, [seen()]) == [Warn("a", 80, 20)]
    assert watch.warned() == {"a"}
    assert watch.observe(99, [seen()]) == []
    assert watch.observe(100, [seen()]) == [Reclaim("a", 100)]
    assert watch.observe(101, [seen()]) == []
    assert watch.observe(100 + RETRY_S, [seen()]) == [Reclaim("a", 100 + RETRY_S)]


def test_a_late_observation_warns_with_the_whole_time() -> None:
    watch = IdleWatch()
    watch.observe(0, [seen()])
    assert watch.observe(500, [seen()]) == [Warn("a", 500, 20)]
    assert watch.observe(519, [seen()]) == []
    assert watch.observe(520, [seen()]) == [Reclaim("a", 520)]


def test_use_takes_a_warning_back() -> None:
    watch = IdleWatch()
    watch.observe(0, [seen()])
    watch.observe(90, [seen()])
    assert watch.observe(95, [seen(1)]) == []
    assert watch.warned() == frozenset()
    assert watch.observe(170, [seen(1)]) == []
    assert watch.observe(175, [seen(1)]) == [Warn("a", 80, 20)]


def test_no_limit_no_reclaim_and_a_new_limit_begins_anew() -> None:
    watch = IdleWatch()
    for now in (0, 1000, 2000):
        assert watch.observe(now, [seen(limit_s=0)]) == []
    assert watch.observe(2001, [seen()]) == []
    assert watch.observe(2090, [seen()]) == [Warn("a", 90, 20)]


STEPS = st.lists(
    st.tuples(st.floats(0.1, 60), st.booleans(), st.booleans(), st.sampled_from([0.0, 50.0, 100.0])), max_size=60
)


@given(STEPS)
def test_nothing_is_reclaimed_before_its_limit_and_its_warning(steps: list[tuple[float, bool, bool, float]]) -> None:
    watch, now, work, used, warned = IdleWatch(), 0.0, 0, 0.0, None
    for pause, uses, active, limit in steps:
        now += pause
        work += uses
        if uses or active or not limit or now == pause:
            used, warned = now, None
        for due in watch.observe(now, [seen(work, active=active, limit_s=limit)]):
            if isinstance(due, Warn):
                assert warned is None
                warned = now
                assert now - used >= limit - 20 - 1e-6
                assert due.left_s >= 20
            else:
                assert warned is not None
                assert now - warned >= 20 - 1e-6
                assert now - used >= limit - 1e-6
