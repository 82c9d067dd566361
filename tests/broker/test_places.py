"""Places in the MPS server: each vGPU gets those that are kept for it, whoever came before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vgpu.broker.places import has_place, keep_places

SHARES = st.dictionaries(st.integers(0, 255), st.floats(0, 1), max_size=80)


@given(st.integers(0, 64), SHARES, st.integers(0, 100))
def test_no_more_places_are_kept_than_there_are(most: int, shares: dict[int, float], percent: int) -> None:
    kept = keep_places(most, shares, percent)
    assert kept.keys() == shares.keys()
    assert 0 <= sum(kept.values()) <= most
    assert all(places >= 1 for places in kept.values()) or len(shares) > most


def test_a_large_vgpu_has_more_kept_than_a_small_one() -> None:
    assert keep_places(48, {0: 0.01, 1: 0.5, 2: 0.25}, 50) == {0: 1, 1: 12, 2: 6}


@given(st.integers(1, 64), SHARES, st.lists(st.integers(0, 255), max_size=200))
def test_whoever_comes_each_gets_what_is_kept_for_it(most: int, shares: dict[int, float], comers: list[int]) -> None:
    kept = keep_places(most, shares)
    used: dict[int, int] = {}
    for key in (key for key in comers if key in kept):
        trial = used | {key: used.get(key, 0) + 1}
        if has_place(key, trial, kept, most):
            used = trial
        else:
            assert used.get(key, 0) >= kept[key], "it was refused a place that is kept for it"
    assert sum(used.values()) <= most
    for key, places in kept.items():  # and those who come last
        while used.get(key, 0) < places:
            used[key] = used.get(key, 0) + 1
            assert has_place(key, used, kept, most)


@given(st.integers(1, 64), st.dictionaries(st.integers(0, 255), st.integers(0, 9), max_size=9), st.integers(0, 255))
def test_a_server_that_keeps_no_places_is_one_for_all(most: int, used: dict[int, int], key: int) -> None:
    assert has_place(key, used, {}, most) == (sum(used.values()) <= most)
