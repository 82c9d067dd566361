"""Sizes, percentages, fractions, durations and latency targets as people write them, both ways.

Every parser raises ``ValueError`` with a sentence that says what was found and what would be understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_BYTES: Final = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_NANOSECONDS: Final = {
    "ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9,
    "m": 60 * 10**9, "min": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9,
}  # fmt: skip
LONGEST: Final = 64
"""Letters of a size, a percentage, a part or a duration: with more, numbers become too long to reckon with."""
_NUMBER: Final = r"(\d+(?:\.\d*)?|\.\d+)"
_SIZE: Final = re.compile(rf"{_NUMBER}\s*([a-z]*)", re.IGNORECASE)
_PERCENT: Final = re.compile(rf"{_NUMBER}\s*%?")
_DURATION_PART: Final = re.compile(rf"{_NUMBER}\s*(ns|us|µs|ms|min|s|m|h|d)", re.IGNORECASE)
_FRACTION: Final = re.compile(r"(\d+)\s*/\s*(\d+)")


def _check_length(text: str, what: str) -> None:
    if len(text) > LONGEST:
        raise ValueError(f"{text[:LONGEST]!r}… is not a {what}")


def parse_bytes(text: str) -> int:
    """``8G``, ``8GiB``, ``512M`` are powers of 1024; ``8GB`` is the decimal 8·10⁹; a bare number is bytes. Whole bytes,
    rounded down."""
    _check_length(text, "size: write 8G, 8GiB, 512M or a number of bytes")
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError(f"{text!r} is not a size: write 8G, 8GiB, 512M or a number of bytes")
    return int(Fraction(match[1]) * _BYTES[match[2].lower()])


def format_bytes(size: int) -> str:
    """Three significant digits in binary units: ``8 GiB``, ``1.5 GiB``, ``512 MiB``, ``0 B``."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size) >= factor:
            return f"{three_digits(size / factor)} {unit}"
    return f"{size} B"


def three_digits(value: float) -> str:
    """``1.5``, ``512``; whole from a thousand on: ``1480``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def parse_percent(text: str) -> float:
    """``30``, ``30%`` or ``12.5``: percent in (0, 100]. Below 1 it is refused, since ``0.3`` mostly means 30 %."""
    _check_length(text, "percentage: write 30 or 12.5")
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a percentage: write 30 or 12.5")
    return check_percent(float(match[1]), text)


def check_percent(value: float, text: str | None = None) -> float:
    """``value`` if it is a percentage a share can have: 1 ≤ value ≤ 100."""
    shown = text if text is not None else f"{value:g}"
    if 0.01 <= value < 1:
        raise ValueError(f"{shown} is less than 1 percent: for the fraction {value:g} of a GPU write {value * 100:g}")
    if not 1 <= value <= 100:
        raise ValueError(f"{shown} is not between 1 and 100 percent")
    return value


def parse_fraction(text: str) -> Fraction:
    """``1/4``, ``0.25`` or ``25%``: a part of one GPU, in (0, 1]."""
    _check_length(text, "part of a GPU: write 1/4, 0.25 or 25%")
    stripped = text.strip()
    part: Fraction | None = None
    if match := _FRACTION.fullmatch(stripped):
        part = Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    elif stripped.endswith("%") and (match := _PERCENT.fullmatch(stripped)):
        part = Fraction(match[1]) / 100
    elif match := re.fullmatch(_NUMBER, stripped):
        part = Fraction(match[1])
    if part is None or not 0 < part <= 1:
        raise ValueError(f"{text!r} is not a part of a GPU: write 1/4, 0.25 or 25%")
    return part


def bounds(value: object) -> tuple[str, str] | None:
    """The two texts of ``20..60`` or ``8G..16G``; None: ``value`` is no such text."""
    if not isinstance(value, str) or ".." not in value:
        return None
    least, _, most = value.partition("..")
    return least.strip(), most.strip()


def range_text(both: str | Iterable[float], *, is_size: bool) -> str:
    """Bounds as they are typed: ``20..60``, ``8G..16G``. A text is such bounds already."""
    if isinstance(both, str):
        return both
    if is_size:
        return "..".join(format_bytes(int(size)).replace(" ", "").replace("iB", "") for size in both)
    return "..".join(f"{percent:g}" for percent in both)


def counted(number: int, thing: str) -> str:
    """``1 process``, ``2 processes``, ``0 GPUs``."""
    plural = f"{thing}es" if thing.endswith(("s", "ch")) else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


def parse_duration_ns(text: str) -> int:
    """``10ms``, ``8h``, ``1h30m``: nanoseconds. A bare number is refused, because its unit is unknown."""
    _check_length(text, "duration: write 10ms, 90s, 8h or 1h30m")
    stripped = text.strip()
    total, at = Fraction(0), 0
    while match := _DURATION_PART.match(stripped, at):
        total += Fraction(match[1]) * _NANOSECONDS[match[2].lower()]
        at = match.end()
        while stripped[at : at + 1].isspace():
            at += 1
    if at != len(stripped) or at == 0:
        raise ValueError(f"{text!r} is not a duration: write 10ms, 90s, 8h or 1h30m")
    return int(total)


def format_duration(duration_ns: int) -> str:
    """The two largest units: ``1h30m``, ``2d3h``, ``1m30s``, ``10ms``."""
    if duration_ns < 0:
        return "-" + format_duration(-duration_ns)
    parts = []
    left = duration_ns
    for unit in ("d", "h", "m", "s", "ms", "µs", "ns"):
        count, left = divmod(left, _NANOSECONDS[unit])
        if count:
            parts.append(f"{count}{unit}")
        if len(parts) == 2:
            break
    return "".join(parts) or "0s"


SHORTEST_TARGET_NS: Final = 5_000_000
"""Below, the shortest turn of another vGPU (2.5 ms) and the window that drains after it (2 ms) take a whole target."""
LONGEST_TARGET_NS: Final = 3600 * 10**9
_TARGETS: Final = "write tpot=30ms, ttft=500ms, or tpot=30ms,ttft=500ms"


class Slo(NamedTuple):
    """Latency targets (``--slo``). 0: no such target."""

    tpot_ns: int = 0
    ttft_ns: int = 0

    def __str__(self) -> str:
        targets = (("tpot", self.tpot_ns), ("ttft", self.ttft_ns))
        return ",".join(f"{name}={format_duration(value)}" for name, value in targets if value)


@lru_cache(maxsize=1024)
def parse_slo(text: str) -> Slo:
    """The targets in ``text``; ``""`` and ``off``: none. ``ValueError`` says what would be understood."""
    found: dict[str, int] = {}
    if text.strip().lower() in {"", "off"}:
        return Slo()
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        if not equals or name not in {"tpot", "ttft"} or name in found:
            raise ValueError(f"{text[:80]!r} names no target, or one twice: {_TARGETS}; or: off")
        found[name] = parse_duration_ns(value)
        if not SHORTEST_TARGET_NS <= found[name] <= LONGEST_TARGET_NS:
            shortest, longest = format_duration(SHORTEST_TARGET_NS), format_duration(LONGEST_TARGET_NS)
            raise ValueError(f"{name}={value[:40]} is not between {shortest} and {longest}")
    return Slo(found.get("tpot", 0), found.get("ttft", 0))
