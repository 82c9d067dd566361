"""A size from what was observed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vgpu.autoscale.advise import Observed, advised
from vgpu.autoscale.size import UP_AT

GIB = 1 << 30
USUAL = Observed(
    seconds=600, busy_percent=12, limit_percent=40, sm_percent=40, memory_bytes=16 * GIB, memory_peak_bytes=2 * GIB
)


def test_a_size_that_is_too_large_falls_to_what_is_used() -> None:
    found = advised(USUAL)
    assert (found.sm_percent, found.memory_bytes) == (15, int(2.5 * GIB))
    assert found.why == "in 95 of 100 s of work it used 12 % of the GPU or less; it had 2 GiB at most"


def test_one_at_its_limit_needs_more() -> None:
    found = advised(replace(USUAL, busy_percent=39))
    assert found.sm_percent == 65
    assert "its limit" in found.why
    assert advised(replace(USUAL, busy_percent=99, limit_percent=100, sm_percent=100)).sm_percent is None


def test_refused_memory_is_added() -> None:
    found = advised(replace(USUAL, memory_peak_bytes=15 * GIB, refusals=1, refused_bytes=5 * GIB))
    assert found.memory_bytes == 25 * GIB


def test_too_little_is_said_to_be_too_little() -> None:
    found = advised(replace(USUAL, seconds=12, memory_peak_bytes=0))
    assert (found.sm_percent, found.memory_bytes) == (None, None)
    assert found.why == "12s with work observed, too little for --sm"


def test_a_size_that_the_node_scales_is_left_to_it() -> None:
    found = advised(replace(USUAL, sm_percent=None, memory_bytes=None))
    assert (found.sm_percent, found.memory_bytes) == (None, None)


@given(st.floats(0, 100), st.integers(1, 100))
def test_the_advised_size_is_advised_again(busy: float, size: int) -> None:
    """With that size there is no other advice for the same demand, and it suffices."""
    used = min(busy, size)
    found = advised(replace(USUAL, busy_percent=used, limit_percent=size, sm_percent=size)).sm_percent
    if found is None or found > size:
        return
    assert used <= UP_AT * found
    assert advised(replace(USUAL, busy_percent=used, limit_percent=found, sm_percent=found)).sm_percent is None
