"""What vGPUs give back when another one is promised their room."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.autoscale.test_plan import reading
from vgpu.autoscale import Reading, Room
from vgpu.autoscale.reclaim import reclaimed, spare_bytes, spare_sm
from vgpu.autoscale.size import MEMORY_STEP_BYTES

GIB = 1 << 30


def grown(vgpu: str, sm: float, memory: int = 8, used: int = 0) -> Reading:
    known = reading(vgpu, size=sm, demand=sm, memory_range=(4 * GIB, 32 * GIB), memory_used_bytes=used * GIB)
    return replace(known, memory_bytes=memory * GIB)


def test_the_one_with_most_beyond_its_guarantee_gives_first() -> None:
    [command] = reclaimed([grown("a", 30), grown("b", 50)], Room(0, 10, 64 * GIB), 35, GIB) or []
    assert (command.vgpu, command.sm_percent, command.memory_bytes) == ("b", 25, None)
    assert "beyond its lower bound" in command.reason


def test_several_give_where_one_does_not_suffice() -> None:
    found = reclaimed([grown("a", 30), grown("b", 50)], Room(0, 10, 64 * GIB), 45, GIB)
    assert found is not None
    assert {one.vgpu: one.sm_percent for one in found} == {"a": 25, "b": 20}


def test_nothing_is_taken_if_it_does_not_suffice() -> None:
    assert reclaimed([grown("a", 30), grown("b", 50)], Room(0, 10, 64 * GIB), 51, GIB) is None
    assert reclaimed([grown("a", 20, memory=16, used=12)], Room(0, 90, 0), 10, 2 * GIB) is None


SIZES = st.tuples(st.floats(20, 60), st.integers(4, 32), st.integers(0, 32))


@given(st.lists(SIZES, max_size=4), st.floats(0, 100), st.integers(0, 80), st.floats(1, 100), st.integers(0, 80))
def test_guarantees_and_memory_in_use_stay_and_what_is_asked_for_fits(
    sizes: list[tuple[float, int, int]], free: float, left: int, sm: float, memory: int
) -> None:
    vgpus = [grown(str(at), round(size, 1), mem, min(mem, used)) for at, (size, mem, used) in enumerate(sizes)]
    found = reclaimed(vgpus, Room(0, free, left * GIB), sm, memory * GIB)
    if found is None:
        assert free + sum(map(spare_sm, vgpus)) < sm + 1e-3 or left * GIB + sum(map(spare_bytes, vgpus)) < memory * GIB
        return
    before = {vgpu.vgpu: vgpu for vgpu in vgpus}
    freed_sm, freed_bytes = 0.0, 0
    for one in found:
        old = before[one.vgpu]
        if one.sm_percent is not None:
            assert 20 <= one.sm_percent < old.sm_percent
            freed_sm += old.sm_percent - one.sm_percent
        if one.memory_bytes is not None:
            assert max(4 * GIB, old.memory_used_bytes) <= one.memory_bytes < old.memory_bytes
            freed_bytes += old.memory_bytes - one.memory_bytes
    assert free + freed_sm >= sm - 1e-3
    assert left * GIB + freed_bytes >= memory * GIB
    assert freed_bytes < max(0, memory - left) * GIB + MEMORY_STEP_BYTES
