"""SM partitions: what the driver was seen to grant, and what is asked of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.packing.partition import SM_MINIMUM, granted_sms, partition

H200_SMS = 132
cards = st.sampled_from([16, 40, 46, 58, 68, 80, 84, 108, 114, 132, 144, 148])


@pytest.mark.parametrize(
    ("percent", "sms"),
    [
        ("1", 8),
        ("10", 12),
        ("22.7", 28),
        ("23", 30),
        ("25", 32),
        ("30", 38),
        ("33", 42),
        ("50", 66),
        ("75", 98),
        ("100", 132),
    ],
)
def test_the_rule_gives_what_an_h200_gave(percent: str, sms: int) -> None:
    assert granted_sms(Fraction(percent), H200_SMS) == sms


@given(st.floats(1, 100), cards)
def test_the_text_buys_exactly_what_the_partition_says(percent: float, sm_count: int) -> None:
    chosen = partition(percent, sm_count)
    assert granted_sms(Fraction(chosen.percent_text), sm_count) == chosen.granted_sms
    assert SM_MINIMUM <= chosen.granted_sms <= sm_count


@given(st.floats(1, 100), cards)
def test_no_grant_is_nearer_except_where_equal_shares_would_not_fit(percent: float, sm_count: int) -> None:
    exact = percent * sm_count / 100
    chosen = partition(percent, sm_count).granted_sms
    possible = sorted({granted_sms(Fraction(tenth, 10), sm_count) for tenth in range(1, 1001)})
    equal_shares = int(100 / percent)
    fitting = [sms for sms in possible if sms <= exact or sms * equal_shares <= sm_count] or possible[:1]
    nearest = min(abs(sms - exact) for sms in fitting)
    assert abs(chosen - exact) <= nearest + 0.05  # percentages are rational numbers of limited size


@given(st.integers(1, 16), cards)
def test_n_equal_shares_fit_the_card(n: int, sm_count: int) -> None:
    chosen = partition(100 / n, sm_count)
    if sm_count / n >= SM_MINIMUM:
        assert n * chosen.granted_sms <= sm_count
        assert n * chosen.mpercent <= 100_000


def test_thirty_percent_of_an_h200() -> None:
    chosen = partition(30, H200_SMS)
    assert (chosen.granted_sms, chosen.percent_text, chosen.mpercent) == (40, "30.31", 30303)


@pytest.mark.parametrize("n", [10, 5, 3, 2])
def test_whole_partitions_of_an_h200(n: int) -> None:
    assert n * partition(100 / n, H200_SMS).granted_sms <= H200_SMS


@pytest.mark.parametrize(
    ("percent", "sm_count", "sms", "text"),
    [
        (50, 100, 50, "50"),
        (10, 100, 10, "10"),
        (100, 132, 132, "100"),
        (100, 133, 133, "100"),
        (75, 132, 98, "74.25"),  # 99 lies between: the smaller
        (50.4, 114, 58, "50.88"),
        (1, 132, 8, "6.07"),
        (30, 4, 4, "100"),
    ],
)
def test_partitions_and_their_texts(percent: float, sm_count: int, sms: int, text: str) -> None:
    chosen = partition(percent, sm_count)
    assert (chosen.granted_sms, chosen.percent_text) == (sms, text)


def test_only_the_whole_card_has_an_odd_number_of_sms() -> None:
    assert granted_sms(Fraction(100), 133) == 133
    assert granted_sms(Fraction("99.99"), 133) == 132
