"""The timeline of a recording as a picture: which vGPU held a lease when, and what the GPU did meanwhile. It needs
matplotlib, which is optional (``vgpu.extras``): nothing else imports this module."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import IO, Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from vgpu.trace.recording import Recording
from vgpu.trace.spans import HandOver, Span, activity, hand_overs

COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""The palette of Okabe and Ito, which colour-blind people can distinguish, too."""
SEVERAL: Final = "#777777"
GAP: Final = "#C00000"
WAIT: Final = "#9A9A9A"
MOST_ROWS: Final = 24
ROUNDS: Final = 3
CLOSE_NS: Final = 1_500_000
"""A close-up shows so much before and after a hand-over, at least."""
DPI: Final = 110


@dataclass(frozen=True, slots=True)
class _Scene:
    recording: Recording
    vgpus: Sequence[str]
    spans: Sequence[Span]
    passed: Sequence[HandOver]
    colours: dict[str, str]

    def colour(self, vgpus: tuple[str, ...]) -> str:
        return self.colours.get(vgpus[0], SEVERAL) if len(vgpus) == 1 else SEVERAL


def draw(recording: Recording, file: IO[bytes]) -> None:
    """A PNG into ``file``: the whole recording, some rounds of it, and a hand-over each way from near."""
    scene = _scene(recording)
    examples = _examples(scene.passed)
    panels: list[Any] = [["all"] * 2, ["rounds"] * 2, *{0: [], 1: [["0", "0"]], 2: [["0", "1"]]}[len(examples)]]
    height = 1.3 + len(panels) * (1.4 + 0.3 * (len(scene.vgpus) + 1))
    figure = Figure(figsize=(13, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title(recording, scene.vgpus), fontsize=12)
    axes = figure.subplot_mosaic(panels)
    _rows(axes["all"], scene, recording.begin_ns, recording.end_ns, 1e9, "s", ticks=True)
    axes["all"].set_title(summary(recording, scene.vgpus, scene.passed, scene.spans), fontsize=9.5)
    begin_ns, end_ns = _some_rounds(scene)
    _rows(axes["rounds"], scene, begin_ns, end_ns, 1e6, "ms", ticks=True)
    axes["rounds"].set_title(f"{(end_ns - begin_ns) / 1e6:.0f} ms of it", fontsize=9.5)
    for number, passed in enumerate(examples):
        _close_up(axes[str(number)], scene, passed)
    figure.legend(handles=_legend(scene), loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(file, format="png")


def _scene(recording: Recording) -> _Scene:
    active = {lease.vgpu_id for lease in recording.leases} | {record.vgpu_id for record in recording.busy}
    vgpus = [vgpu_id for vgpu_id in recording.vgpus if vgpu_id in active] + sorted(active - recording.vgpus.keys())
    colours = dict(zip(vgpus, cycle(COLOURS), strict=False))
    return _Scene(recording, vgpus[:MOST_ROWS], activity(recording), hand_overs(recording), colours)


def title(recording: Recording, vgpus: Sequence[str]) -> str:
    """The subject of the picture: the GPU, its vGPUs and what they were promised."""
    gpu = recording.gpu
    simulated = " (simulated: no figure counts)" if gpu.simulated else ""
    shares = ", ".join(f"{recording.label(v)} {recording.share(v)}" for v in vgpus) or "no vGPU had a lease"
    return f"GPU {gpu.index}, {gpu.name}{simulated}, {gpu.mode} mode: {shares}"


def summary(recording: Recording, vgpus: Sequence[str], passed: Sequence[HandOver], spans: Sequence[Span]) -> str:
    """The recording in figures."""
    figures = [f"{recording.length_ns / 1e9:.3g} s"]
    figures += [f"{recording.label(v)} held {100 * recording.held_ratio(v):.1f} %" for v in vgpus]
    if spans and recording.length_ns:
        busy_ns = sum(min(s.end_ns, recording.end_ns) - max(s.begin_ns, recording.begin_ns) for s in spans)
        figures.append(f"GPU had work {100 * busy_ns / recording.length_ns:.1f} %")
    if passed:
        gap_us = statistics.median(one.gap_ns for one in passed) / 1e3
        figures.append(f"{len(passed)} hand-overs, gap {gap_us:.0f} µs (median)")
    if recording.lost:
        figures.append(f"{recording.lost} events lost")
    return ", ".join(figures)


def _rows(
    axes: Axes, scene: _Scene, begin_ns: int, end_ns: int, unit_ns: float, unit: str, *, ticks: bool = False
) -> None:
    """One row for the leases of each vGPU, one for the GPU; ``ticks``: hand-overs are marked below it."""
    recording, zero_ns = scene.recording, scene.recording.begin_ns

    def bars(row: float, high: float, colour: str, intervals: Sequence[tuple[int, int]], **how: object) -> None:
        shown = [(max(a, begin_ns), min(b, end_ns)) for a, b in intervals if b > begin_ns and a < end_ns]
        axes.broken_barh(
            [((a - zero_ns) / unit_ns, (b - a) / unit_ns) for a, b in shown],
            (row - high / 2, high),
            facecolors=colour,
            **how,  # type: ignore[arg-type] # of matplotlib's collections
        )

    for row, vgpu_id in enumerate(scene.vgpus):
        colour = scene.colours[vgpu_id]
        waits = [(wait.begin_ns, wait.end_ns) for wait in recording.waits if wait.vgpu_id == vgpu_id]
        bars(row, 0.08, WAIT, waits)
        leases, tails = [], []
        for lease in recording.leases:
            if lease.vgpu_id != vgpu_id:
                continue
            drained_ns = recording.end_ns if lease.drained_ns is None else lease.drained_ns
            over_ns = drained_ns if lease.end_ns is None else min(lease.end_ns, drained_ns)
            leases.append((lease.go_ns, over_ns))
            tails.append((over_ns, drained_ns))
        bars(row, 0.62, colour, leases)
        bars(row, 0.62, colour, tails, alpha=0.45, hatch="////", edgecolor=colour, linewidth=0)
    last = len(scene.vgpus)
    for vgpus in sorted({span.vgpus for span in scene.spans}):
        own = [(span.begin_ns, span.end_ns) for span in scene.spans if span.vgpus == vgpus]
        bars(last, 0.62, scene.colour(vgpus), own)
    gaps = [(one.begin_ns, one.end_ns) for one in scene.passed]
    bars(last, 0.62, GAP, gaps)
    if ticks:
        inside = [one.end_ns for one in scene.passed if begin_ns <= one.end_ns <= end_ns]
        axes.vlines([(at - zero_ns) / unit_ns for at in inside], last + 0.36, last + 0.5, colors=GAP, linewidth=0.8)
    names = [f"{scene.recording.label(v)}\n{scene.recording.share(v)}" for v in scene.vgpus]
    axes.set_yticks(range(last + 1), [*names, "GPU\nactivity"])
    axes.set_ylim(last + 0.55, -0.55)
    axes.set_xlim((begin_ns - zero_ns) / unit_ns, (max(end_ns, begin_ns + 1) - zero_ns) / unit_ns)
    axes.set_xlabel(unit, loc="right", labelpad=-2)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _some_rounds(scene: _Scene) -> tuple[int, int]:
    """Some rounds in the middle of the recording."""
    recording = scene.recording
    half_ns = max(ROUNDS * recording.gpu.period_ns, 1_000_000) // 2
    middle_ns = (recording.begin_ns + recording.end_ns) // 2
    return max(recording.begin_ns, middle_ns - half_ns), min(recording.end_ns, middle_ns + half_ns)


def _examples(passed: Sequence[HandOver]) -> list[HandOver]:
    """Of the pair that passed the GPU to each other most, each way the hand-over with the median gap."""
    ways: dict[tuple[str, str], list[HandOver]] = {}
    for one in passed:
        ways.setdefault((one.giver, one.taker), []).append(one)
    if not ways:
        return []
    there = max(ways, key=lambda way: len(ways[way]))
    back = ways.get((there[1], there[0]), [])
    return [_typical(way) for way in (ways[there], back) if way]


def _typical(passed: Sequence[HandOver]) -> HandOver:
    return sorted(passed, key=lambda one: one.gap_ns)[len(passed) // 2]


def _close_up(axes: Axes, scene: _Scene, passed: HandOver) -> None:
    recording = scene.recording
    margin_ns = max(CLOSE_NS, 2 * passed.gap_ns)
    begin_ns, end_ns = passed.begin_ns - margin_ns, passed.end_ns + margin_ns
    _rows(axes, scene, max(begin_ns, recording.begin_ns), min(end_ns, recording.end_ns), 1e6, "ms")
    last = len(scene.vgpus)
    axes.annotate(
        f"{passed.gap_ns / 1e3:.0f} µs",
        (((passed.begin_ns + passed.end_ns) / 2 - recording.begin_ns) / 1e6, last - 0.31),
        (0, 7),
        textcoords="offset points",
        ha="center",
        color=GAP,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )
    for at_ns, style in ((passed.drained_ns, ":"), (passed.go_ns, "--")):
        axes.axvline((at_ns - recording.begin_ns) / 1e6, color="black", linestyle=style, linewidth=0.7)
    giver, taker = recording.label(passed.giver), recording.label(passed.taker)
    axes.set_title(f"{giver} → {taker}: drained (dotted), GO (dashed)", fontsize=9.5)


def _legend(scene: _Scene) -> list[Patch]:
    made = [
        Patch(color=scene.colours[v], label=f"lease and work of {scene.recording.label(v)}") for v in scene.vgpus[:6]
    ]
    tail = Patch(facecolor="#BBBBBB", hatch="////", edgecolor=SEVERAL, label="tail: past its end, until drained")
    made += [tail, Patch(color=WAIT, label="waits for a lease")]
    if scene.recording.gpu.mode == "temporal":
        made.append(Patch(color=GAP, label="hand-over gap"))
    else:
        made.append(Patch(color=SEVERAL, label="work of several"))
    return made
