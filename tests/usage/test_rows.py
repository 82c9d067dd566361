"""Rows of usage: nothing is lost or made when they are split, merged or bounded."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from vgpu.usage.rows import OTHERS, TIERS, Key, Rows, Sums, add, capped, coarser

AMOUNTS = st.integers(0, 2**50)
SUMS = st.builds(Sums, **{field.name: AMOUNTS for field in fields(Sums)})


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    keys = st.builds(
        Key,
        span_s=st.just(60),
        start_unix_s=st.integers(0, 200).map(lambda minute: 60 * minute),
        owner_uid=st.integers(0, 2),
        vgpu_id=st.integers(0, 40).map(lambda number: f"vgpu-{number:08x}") | st.just(OTHERS),
    )
    return draw(st.dictionaries(keys, SUMS, max_size=80))


def whole(found: Rows, owner_uid: int | None = None) -> Sums:
    return sum((sums for key, sums in found.items() if owner_uid in {None, key.owner_uid}), Sums())


@given(SUMS, st.lists(st.integers(0, 2**40), min_size=1, max_size=6).filter(any))
def test_the_parts_of_sums_are_exactly_the_whole(sums: Sums, weights: list[int]) -> None:
    parts = sums.split(weights)
    assert sum(parts, Sums()) == sums
    for weight, part in zip(weights, parts, strict=True):
        for value, share in zip(sums.values, part.values, strict=True):
            assert abs(share - value * weight / sum(weights)) <= 1 + value * 1e-9


@given(rows())
def test_coarser_rows_have_the_same_sums(found: Rows) -> None:
    hours = coarser(found, 3600)
    assert whole(hours) == whole(found)
    assert all(key.span_s == 3600 and key.start_unix_s % 3600 == 0 for key in hours)
    assert coarser(hours, 3600) == hours
    assert coarser(hours, 86_400) == coarser(found, 86_400)


@given(rows())
def test_the_smallest_vgpus_of_a_user_merge_and_the_users_sums_stay(found: Rows) -> None:
    few = capped(coarser(found, 86_400))
    most = TIERS[2].most_vgpus
    for owner in range(3):
        assert whole(few, owner) == whole(found, owner)
        for start in {key.start_unix_s for key in few}:
            own = [key for key in few if key.owner_uid == owner and key.start_unix_s == start]
            named = [key for key in own if key.vgpu_id != OTHERS]
            assert len(named) <= most
            assert len(own) <= most + 1
    merged = coarser(found, 86_400).items() - few.items()
    kept = {key: sums for key, sums in few.items() if key.vgpu_id != OTHERS}
    for key, sums in merged:
        for other, larger in kept.items():
            if key.vgpu_id != OTHERS and key.owner_uid == other.owner_uid and key.start_unix_s == other.start_unix_s:
                assert larger.promised_ns + larger.used_ns >= sums.promised_ns + sums.used_ns


@given(rows(), rows())
def test_adding_keeps_both(some: Rows, more: Rows) -> None:
    before = whole(some) + whole(more)
    add(some, more)
    assert whole(some) == before
