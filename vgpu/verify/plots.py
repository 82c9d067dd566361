"""The geometry of the report's plots, as paths and positions for an SVG. Pure.

All plots are ``WIDTH`` units wide, so narrow that their text can be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from vgpu.verify.judge import ALONE, PLANTED_DELAY_NS, TOGETHER
from vgpu.verify.measured import BIN_NS, Evidence, Interval, LaunchRun, ShareRun

WIDTH: Final = 440
_LEFT: Final = 44
_RIGHT: Final = 12
_TOP: Final = 10
_BELOW: Final = 30
"""For the numbers under an axis."""
_TOUCH_NS: Final = 20_000
"""Kernels closer than this are drawn as one."""
_HISTOGRAM_BINS: Final = 48


@dataclass(frozen=True, slots=True)
class Tick:
    """A number at an axis, ``at`` along it."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """What every plot has: its frame, and numbers along it."""

    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A promised share, the band that is allowed around it, what was measured with limits, and without."""

    label: str
    y: float
    promised_x: float
    band: tuple[float, float]
    measured_x: float
    without_x: float
    value: str
    held: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One program: ``path``; ``promised_y``: where its share would be. ``number``: its colour."""

    number: int
    path: str
    promised_y: float
    label: str


@dataclass(frozen=True, slots=True)
class Strip:
    """When kernels of one program ran, as a path of filled boxes."""

    number: int
    label: str
    y: float
    path: str


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    text: str


def _scale(low: float, high: float, begin: float, end: float, value: float) -> float:
    return round(begin + (end - begin) * (value - low) / (high - low), 2)


def bars(evidence: Evidence, tolerance: float) -> tuple[Plot, list[Bar]]:
    """Every program of every share: by GPU time if it ran alone, by work if it ran beside others."""
    step, left = 26, 118.0
    right = float(WIDTH - 52)

    def x(ratio: float) -> float:
        return _scale(0.0, 1.0, left, right, min(max(ratio, 0.0), 1.0))

    made: list[Bar] = []
    for name, run in evidence.shares.items():
        without = _judged_ratios(name, evidence.unlimited_shares[name])
        for promised, measured, free in zip(_promised(name), _judged_ratios(name, run), without, strict=True):
            made.append(
                Bar(
                    label=_label(name, promised),
                    y=_TOP + step * len(made) + step / 2,
                    promised_x=x(promised),
                    band=(x(promised - tolerance), x(promised + tolerance)),
                    measured_x=x(measured),
                    without_x=x(free),
                    value=f"{100 * measured:.1f} %",
                    held=abs(measured - promised) <= tolerance,
                )
            )
    bottom = _TOP + step * len(made)
    ticks = tuple(Tick(x(p / 100), f"{p}") for p in (0, 25, 50, 75, 100))
    return Plot(bottom + _BELOW, left, right, _TOP, bottom, ticks, (), "percent"), made


def _promised(name: str) -> list[float]:
    return [ALONE[name] / 100] if name in ALONE else [percent / 100 for percent in TOGETHER[name]]


def _judged_ratios(name: str, run: ShareRun) -> list[float]:
    return [run.programs[0].device_ratio] if name in ALONE else run.work_ratios


def series(name: str, run: ShareRun) -> tuple[Plot, list[Line]]:
    """Each program's part of the work finished, in every bin of the window."""
    height, bottom, right = 190, 190 - _BELOW, float(WIDTH - 60)
    bins = [*zip(*(program.work_series for program in run.programs), strict=True)]
    seconds = len(bins) * BIN_NS / 1e9

    def x(at_s: float) -> float:
        return _scale(0.0, seconds, _LEFT, right, at_s)

    def y(ratio: float) -> float:
        return _scale(0.0, 1.0, bottom, _TOP, ratio)

    lines = []
    for i, promised in enumerate(_promised(name)):
        points = [
            (x((n + 0.5) * BIN_NS / 1e9), y(one[i] / sum(one) if sum(one) else 0.0)) for n, one in enumerate(bins)
        ]
        lines.append(Line(i, _polyline(points), y(promised), f"{100 * promised:g} %"))
    every = max(1, round(seconds / 6))
    x_ticks = tuple(Tick(x(float(s)), f"{s}") for s in range(0, int(seconds) + 1, every))
    y_ticks = tuple(Tick(y(p / 100), f"{p} %") for p in (0, 25, 50, 75, 100))
    return Plot(height, _LEFT, right, _TOP, bottom, x_ticks, y_ticks, "seconds"), lines


def _polyline(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if i else 'M'}{x:g} {y:g}" for i, (x, y) in enumerate(points))


def strips(name: str, run: ShareRun, length_ns: int) -> tuple[Plot, list[Strip]]:
    """The program that the GPU worked for, kernel by kernel."""
    step, right = 30, float(WIDTH - _RIGHT)
    bottom = _TOP + step * len(run.programs)

    def x(at_ns: float) -> float:
        return _scale(0.0, length_ns, _LEFT, right, at_ns)

    made = []
    for i, (program, promised) in enumerate(zip(run.programs, _promised(name), strict=True)):
        y = _TOP + step * i + 4
        boxes = [
            f"M{x(a):g} {y:g}H{max(x(b), x(a) + 0.3):g}V{y + step - 8:g}H{x(a):g}Z" for a, b in _joined(program.kernels)
        ]
        made.append(Strip(i, f"{100 * promised:g} %", y + (step - 8) / 2, "".join(boxes)))
    ticks = tuple(Tick(x(ms * 1e6), f"{ms}") for ms in range(0, length_ns // 1_000_000 + 1, 50))
    return Plot(bottom + _BELOW, _LEFT, right, _TOP, bottom, ticks, (), "milliseconds"), made


def _joined(kernels: Sequence[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in kernels:
        if found and begin <= found[-1][1] + _TOUCH_NS:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def kills(evidence: Evidence, limit_ns: float) -> tuple[Plot, list[Dot], float]:
    """Until the lease was back: a dot for each kill, and x of what was allowed. Logarithmic, from 0.1 ms."""
    right, bottom = float(WIDTH - _RIGHT), _TOP + 50.0
    backs = [ending.lease_back_ns for ending in evidence.killed if ending.lease_back_ns is not None]
    most = max([limit_ns * 2, *backs])

    def x(ns: float) -> float:
        return _scale(math.log(1e5), math.log(most), _LEFT, right, math.log(max(ns, 1e5)))

    dots = [Dot(x(ns), _TOP + 25.0, f"{ns / 1e6:.2f} ms") for ns in backs]
    ticks = tuple(Tick(x(ms * 1e6), f"{ms:g}") for ms in (0.1, 1, 10, 100, 1000) if ms * 1e6 <= most)
    return Plot(int(bottom) + _BELOW, _LEFT, right, _TOP, bottom, ticks, (), "milliseconds"), dots, x(limit_ns)


def launches(run: LaunchRun, delayed: LaunchRun) -> tuple[Plot, list[Line]]:
    """How often a turn took so long a launch: straight into the driver, through the gate, with the planted delay."""
    height, bottom, right = 170, 170 - _BELOW, float(WIDTH - _RIGHT)
    shown = [run.direct_ns, run.gated_ns, delayed.gated_ns]
    usual = median(run.direct_ns)
    low, high = min(*run.direct_ns, *run.gated_ns) - PLANTED_DELAY_NS / 8, usual + 2.5 * PLANTED_DELAY_NS

    def x(ns: float) -> float:
        return _scale(low, high, _LEFT, right, ns)

    lines = []
    for i, (turns, label) in enumerate(
        zip(shown, ("driver alone", "through the gate", f"with {PLANTED_DELAY_NS / 1000:g} µs planted"), strict=True)
    ):
        counts = [0] * _HISTOGRAM_BINS
        for ns in turns:
            if low <= ns < high:
                counts[int((ns - low) / (high - low) * _HISTOGRAM_BINS)] += 1
        most = max(counts) or 1
        width = (high - low) / _HISTOGRAM_BINS
        points = [(x(low + (n + 0.5) * width), _scale(0, most, bottom, _TOP, count)) for n, count in enumerate(counts)]
        lines.append(Line(i, _polyline(points), bottom, label))
    step = _round_step((high - low) / 5)
    first = math.ceil(low / step) * step
    ticks = tuple(Tick(x(first + n * step), f"{first + n * step:g}") for n in range(int((high - first) / step) + 1))
    return Plot(height, _LEFT, right, _TOP, bottom, ticks, (), "nanoseconds a launch"), lines


def _round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about)


def _label(name: str, promised: float) -> str:
    """``30 % alone``, ``30 % of 30:70``."""
    if name in ALONE:
        return f"{100 * promised:g} % alone"
    return f"{100 * promised:g} % of {':'.join(f'{percent:g}' for percent in TOGETHER[name])}"
