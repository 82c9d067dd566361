"""Sizes, shares and times as people write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.units import (
    GIB,
    MIB,
    TIB,
    check_percent,
    counted,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration_ns,
    parse_fraction,
    parse_percent,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8G", 8 << 30), ("8GiB", 8 << 30), ("8gib", 8 << 30), ("8GB", 8 * 10**9), ("512M", 512 << 20),
        ("1.5G", 3 << 29),
        (" 4 k ", 4096), ("0", 0), ("12345", 12345), ("2T", 2 << 40), (".5K", 512),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "8Q", "8 G B", "-1G", "1e3", "0x10", "8G8", "∞", "８Ｇ?"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_a_formatted_size_is_within_half_a_percent(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size)) - size) <= size * 0.005 + 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (512 * MIB, "512 MiB"), (3 * GIB // 2, "1.5 GiB"),
        (1000 * MIB, "1000 MiB"), (999 * GIB, "999 GiB"), (1000 * GIB, "1000 GiB"), (1023 * GIB, "1023 GiB"),
        (5 * TIB // 2, "2.5 TiB"), (2000 * TIB, "2000 TiB"), (9998 * MIB // 10, "1000 MiB"), (-2048, "-2 KiB"),
    ],
)  # fmt: skip
def test_sizes_as_shown(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 2**60), st.sampled_from(["", "K", "MiB", "G", "TB"]))
def test_whole_numbers_are_exact(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count * parse_bytes(f"1{unit}")


@pytest.mark.parametrize(("text", "percent"), [("30", 30), ("30%", 30), ("12.5 %", 12.5), ("100", 100), ("1", 1)])
def test_percentages(text: str, percent: float) -> None:
    assert parse_percent(text) == percent


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.3", "write 30"),
        ("0.001", "between 1 and 100"),
        ("0", "between 1 and 100"),
        ("101", "between"),
        ("-5", "not a percentage"),
        ("a", "write 30"),
        ("nan", "not a percentage"),
        ("0.5%", "write 50"),
    ],
)
def test_percentages_that_cannot_be(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_percent(text)


def test_a_refused_percentage_is_shown_as_it_was_typed() -> None:
    with pytest.raises(ValueError, match=r"^0\.50% is less than 1 percent: for the fraction 0\.5 of a GPU write 50$"):
        parse_percent("0.50%")
    with pytest.raises(ValueError, match=r"^0\.5 is less than 1 percent"):
        check_percent(0.5)
    with pytest.raises(ValueError, match=r"^150\.0 is not between 1 and 100 percent$"):
        check_percent(150, "150.0")


@pytest.mark.parametrize(
    ("text", "part"), [("1/4", "1/4"), ("0.25", "1/4"), ("25%", "1/4"), ("1", "1"), (" 2 / 3 ", "2/3")]
)
def test_fractions(text: str, part: str) -> None:
    assert parse_fraction(text) == Fraction(part)


@pytest.mark.parametrize("text", ["0", "5/4", "1/0", "200%", "", "x", "-1/4", "1/2/3"])
def test_what_is_no_part_of_a_gpu(text: str) -> None:
    with pytest.raises(ValueError, match="part of a GPU"):
        parse_fraction(text)


@pytest.mark.parametrize(
    ("text", "ns"),
    [("10ms", 10**7), ("8h", 8 * 3600 * 10**9), ("1h30m", 5400 * 10**9), ("90s", 90 * 10**9), ("1.5s", 15 * 10**8),
     ("500us", 5 * 10**5), ("500µs", 5 * 10**5), ("2d", 172800 * 10**9), ("1h 5min", 3900 * 10**9), ("7ns", 7)],
)  # fmt: skip
def test_durations(text: str, ns: int) -> None:
    assert parse_duration_ns(text) == ns


@pytest.mark.parametrize("text", ["10", "", "h", "1x", "1h30", "-1s", "1 hour"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration_ns(text)


@given(st.integers(0, 10**17))
def test_a_formatted_duration_loses_only_its_small_units(ns: int) -> None:
    shown = parse_duration_ns(format_duration(ns))
    assert shown <= ns
    assert ns - shown <= max(1, ns // 24)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"), (1, "1ns"), (1500, "1µs500ns"), (10**7, "10ms"), (90 * 10**9, "1m30s"), (5400 * 10**9, "1h30m"),
        (183_845 * 10**9, "2d3h"), (-5400 * 10**9, "-1h30m"),
    ],
)  # fmt: skip
def test_durations_as_shown(ns: int, text: str) -> None:
    assert format_duration(ns) == text


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "GPU", "0 GPUs"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (3, "match", "3 matches"),
        (2, "vGPU", "2 vGPUs"),
    ],
)
def test_things_are_counted_as_people_do(number: int, thing: str, said: str) -> None:
    assert counted(number, thing) == said
