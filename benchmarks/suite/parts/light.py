"""Programs that use a small part of the GPU's time: replicas of services, and streams of requests beside training.

Each scene is measured in five ways: one of them alone, all of them without vGPUs (*hardware*: the GPU's own time
slicing), under MPS, and in vGPUs in temporal and in spatial mode. The same programs take turns of 5 s in the order
A B B A, so that what the host does meets all ways alike. Ratios are of the same turn's time slicing; their interval is
bootstrapped over the turns. Latencies are of all requests, or steps, of all turns of all replicas together.

One vGPU alone under its limit, which does not bind, shows what the limit costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.suite.parts.part import (
    BEGIN_S,
    EXCLUSIVE,
    HARDWARE,
    MPS,
    SPATIAL,
    TEMPORAL,
    Bench,
    Options,
    Part,
    windows_s,
)
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import bootstrap, percentile
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Outcome, Sharer, Stage

TRAINER: Final = "vit-train"
STREAM: Final = "resnet50-infer1"
REQUESTS: Final = 60.0
"""A second, of each stream: 5 % of an H100's time."""
TURN_S: Final = 5.0
MEMORY: Final = "8G"
TOGETHER: Final = "together"
ALONE: Final = "alone"
TRAINER_ALONE: Final = "trainer alone"
SLACK: Final = 1.0
"""A bar holds if the interval's lower end is at most so many percent below it: so much do hosts differ."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Programs that share a GPU. ``shares``: percent of each one's vGPU; ``streams``: how many of the first ones answer
    requests that arrive at random. ``least``: the bar, in percent of what time slicing gives them together. Trainers
    may use what others leave (``--burst``): without vGPUs they do."""

    name: str
    works: tuple[str, ...]
    shares: tuple[float, ...]
    streams: int = 0
    least: float = 98.0

    @property
    def trains(self) -> bool:
        return self.works[-1] == TRAINER

    @property
    def requests(self) -> tuple[float, ...]:
        return (REQUESTS,) * self.streams


def _replicas(count: int, work: str, share: float, least: float = 98.0) -> Scene:
    return Scene(f"{count} × {work}", (work,) * count, (share,) * count, least=least)


def _beside(streams: int, *shares: float) -> Scene:
    """Beside a trainer for each of ``shares``."""
    trainers = f"{len(shares)} × {TRAINER}" if len(shares) > 1 else TRAINER
    name = f"{streams} stream{'s' if streams > 1 else ''} beside {trainers}"
    return Scene(name, (STREAM,) * streams + (TRAINER,) * len(shares), (10.0,) * streams + shares, streams)


SCENES: Final = (
    _replicas(3, STREAM, 33.0),
    _replicas(3, "resnet50-infer8", 33.0),
    _replicas(3, "bert-infer", 33.0),
    _replicas(3, "decode-eager", 33.0),
    _replicas(2, "decode-graph", 50.0, 98.5),
    Scene(f"3 × {STREAM}, {REQUESTS:g} requests/s", (STREAM,) * 3, (33.0,) * 3, 3),
    _beside(1, 70.0),
    _beside(3, 70.0),
    _beside(3, 40.0, 30.0),
)
BY_NAME: Final = {scene.name: scene for scene in SCENES}
WORKS: Final = tuple(dict.fromkeys(scene.works[-1] for scene in SCENES))
"""A scene is chosen by its last one."""


def scenes(options: Options) -> list[Scene]:
    return [scene for scene in SCENES if scene.works[-1] in (options.works or WORKS)]


def _outside(options: Options) -> list[str]:
    """The ways that take turns on one stage. Those in spatial mode need a node of their own."""
    return [HARDWARE, *(way for way in (MPS, TEMPORAL) if options.shared(way))]


def measure(bench: Bench) -> None:
    for scene in scenes(bench.options):
        with bench.block(scene.name) as stage:
            _measure(bench, stage, scene)


def _measure(bench: Bench, stage: Stage, scene: Scene) -> None:
    options = bench.options
    plain = [stage.plain(work) for work in scene.works]
    groups: dict[tuple[str, str], list[Sharer]] = {(ALONE, EXCLUSIVE): plain[:1], (TOGETHER, HARDWARE): plain}
    if scene.trains:
        groups[TRAINER_ALONE, EXCLUSIVE] = plain[-1:]
    if options.shared(MPS):
        groups[TOGETHER, MPS] = [stage.mps(work) for work in scene.works]
    if options.shared(TEMPORAL):
        ours = _vgpus(stage, TEMPORAL, scene)
        groups |= {(ALONE, TEMPORAL): ours[:1], (TOGETHER, TEMPORAL): ours}
    stage.ready()
    for repeat in range(options.repeat):
        _keep(bench, stage, repeat, scene, groups)
        if options.shared(SPATIAL):
            with Stage(bench.ground) as inner:
                pair = {(TOGETHER, HARDWARE): plain, (TOGETHER, SPATIAL): _vgpus(inner, SPATIAL, scene)}
                inner.ready()
                _keep(bench, inner, repeat, scene, pair)


def _vgpus(stage: Stage, mode: str, scene: Scene) -> list[Sharer]:
    pairs = zip(scene.works, scene.shares, strict=True)
    return [
        stage.vgpu(mode, work, share, *(["--burst"] if work == TRAINER else []), memory=MEMORY) for work, share in pairs
    ]


def _keep(
    bench: Bench, stage: Stage, repeat: int, scene: Scene, groups: Mapping[tuple[str, str], Sequence[Sharer]]
) -> None:
    """All groups in turns, there and back."""
    turns = max(2, round(bench.options.seconds / TURN_S))
    found: dict[tuple[str, str], list[Outcome]] = {labels: [] for labels in groups}
    for turn in range(turns):
        for labels in list(groups)[:: -1 if turn % 2 else 1]:
            sharers = groups[labels]
            requests = () if labels[0] == TRAINER_ALONE else scene.requests[: len(sharers)]
            seconds = bench.options.seconds / turns
            found[labels].append(stage.window(sharers, seconds, samples=True, requests_per_second=requests, seed=turn))
    for (row, way), outcomes in found.items():
        shares = scene.shares[: len(outcomes[0].results)] if way in (TEMPORAL, SPATIAL) else ()
        bench.keep(repeat, scene.name, row, way, condensed(outcomes), shares)


def condensed(outcomes: Sequence[Outcome]) -> Outcome:
    """Of all turns of one way: each sharer's units a second, turn by turn, and percentiles of all its latencies."""
    results = []
    for same in zip(*(outcome.results for outcome in outcomes), strict=True):
        samples = [took for result in same for took in result["samples_ms"]]
        one: dict[str, Any] = {"work": same[0]["work"], "samples_ms": samples, "unserved": 0}
        if "units_per_second" in same[0]:
            one["turns"] = [result["units_per_second"] for result in same]
            one["units_per_second"] = statistics.fmean(one["turns"])
        else:
            one["unserved"] = sum(result["unserved"] for result in same)
        results.append(one)
    figures = {name: statistics.fmean(o.figures[name] for o in outcomes) for name in outcomes[0].figures}
    streams = [result for result in results if "turns" not in result] or results
    pooled = [took for result in streams for took in result["samples_ms"]]
    if pooled:
        figures |= {f"p{percent}_ms": percentile(pooled, percent) for percent in (50, 99)}
    figures["samples"] = len(pooled)
    for result in results:
        result["samples"] = len(result.pop("samples_ms"))
    return Outcome(tuple(results), figures)


def rows(options: Options) -> list[Labels]:
    found: list[Labels] = []
    for scene in scenes(options):
        found += [(scene.name, ALONE, EXCLUSIVE), (scene.name, TOGETHER, HARDWARE)]
        found += [(scene.name, TRAINER_ALONE, EXCLUSIVE)] * scene.trains
        found += [(scene.name, TOGETHER, MPS)] * options.shared(MPS)
        found += [(scene.name, row, TEMPORAL) for row in (ALONE, TOGETHER) if options.shared(TEMPORAL)]
        found += [(scene.name, TOGETHER, SPATIAL)] * options.shared(SPATIAL)
    return found


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    """Each way against time slicing of the same turns, which is the ``HARDWARE`` before it in the block."""
    found = []
    for block in compared(measurements):
        scene = BY_NAME[block[0].block]
        alone = trainer = None
        for m in block:
            if (m.row, m.way) == (ALONE, EXCLUSIVE):
                alone = m
            elif m.row == TRAINER_ALONE:
                trainer = m
        for index, m in enumerate(block):
            base = alone if m.row == ALONE else _nearest(block, index)
            found.append(Row(scene.name, m.row, m.way, _figures(scene, m, base, trainer)))
    return found


def _nearest(block: Sequence[Measurement], index: int) -> Measurement | None:
    """The time slicing that took turns with this measurement: the last one before it."""
    before = [m for m in block[: index + 1] if (m.row, m.way) == (TOGETHER, HARDWARE)]
    return before[-1] if before else None


def _totals(m: Measurement) -> list[float]:
    """Units a second of all that run in closed loops, turn by turn."""
    return [sum(turn) for turn in zip(*(result["turns"] for result in m.results if "turns" in result), strict=True)]


def _figures(scene: Scene, m: Measurement, base: Measurement | None, trainer: Measurement | None) -> dict[str, float]:
    figures = dict(m.figures)
    totals = _totals(m)
    if totals and not scene.streams:
        figures["per_second"] = statistics.fmean(totals)
    if totals and m.row == TOGETHER and trainer is not None:
        exclusive = trainer.results[0]["units_per_second"]
        figures["trainer_percent"] = 100 * statistics.fmean(totals) / exclusive
        if base is not None and base is not m:
            figures["trainer_over_points"] = (
                100 * (statistics.fmean(totals) - statistics.fmean(_totals(base))) / exclusive
            )
        if m.asked and len(scene.works) - scene.streams > 1:
            figures["split_off_points"] = _split_error(m, scene)
    if scene.streams and m.row != TRAINER_ALONE:
        figures["unserved"] = sum(result["unserved"] for result in m.results)
    if base is None or base is m or m.row == TRAINER_ALONE:
        return figures
    if totals and not scene.streams:
        ratios = [100 * ours / theirs for ours, theirs in zip(totals, _totals(base), strict=True)]
        figures["percent"] = statistics.median(ratios)
        figures["percent_low"], figures["percent_high"] = bootstrap(ratios, statistics.median)
    for percent in (50, 99):
        name = f"p{percent}"
        if f"{name}_ms" in figures and f"{name}_ms" in base.figures:
            figures[f"{name}_ratio"] = figures[f"{name}_ms"] / base.figures[f"{name}_ms"]
    return figures


def _split_error(m: Measurement, scene: Scene) -> float:
    """How far the trainers' parts of what they do together are from those of their shares."""
    done: list[float] = [result["units_per_second"] for result in m.results[scene.streams :]]
    asked = scene.shares[scene.streams :]
    return max(abs(100 * d / sum(done) - 100 * a / sum(asked)) for d, a in zip(done, asked, strict=True))


def estimate(options: Options) -> float:
    turns = max(2, round(options.seconds / TURN_S))
    total = 0.0
    for scene in scenes(options):
        groups = 2 + scene.trains + options.shared(MPS) + 2 * options.shared(TEMPORAL)
        windows = windows_s(turns * (groups + 2 * options.shared(SPATIAL)), options.seconds / turns)
        total += BEGIN_S * 1.5 + options.repeat * (windows + BEGIN_S * 0.8 * options.shared(SPATIAL))
    return total


def _together(*, streams: bool) -> Callable[[Row], bool]:
    return lambda row: (row.row, row.way) == (TOGETHER, TEMPORAL) and bool(BY_NAME[row.work].streams) == streams


def _decodes(row: Row) -> bool:
    return (row.row, row.way) == (TOGETHER, TEMPORAL) and BY_NAME[row.work].least > 98


def _limited(row: Row) -> bool:
    """Its limit does not bind: the graph of a decoder keeps the GPU busy, and may have half of it."""
    scene = BY_NAME[row.work]
    return (row.row, row.way) == (ALONE, TEMPORAL) and not scene.streams and not _decodes(replace(row, row=TOGETHER))


def _split(row: Row) -> bool:
    scene = BY_NAME[row.work]
    return _trained(row) and len(scene.works) - scene.streams > 1


def _trained(row: Row) -> bool:
    return (row.row, row.way) == (TOGETHER, TEMPORAL) and BY_NAME[row.work].trains


PART = Part(
    "light",
    "Programs that use a small part of the GPU, against the GPU's own time slicing; one under a limit, against itself",
    20.0,
    (
        Column("percent", "% of time slicing, or of alone", "high"),
        Column(
            "percent_low",
            "95 % from",
            "high",
            1,
            (Bar(98.5 - SLACK, _decodes), Bar(98.0 - SLACK, _together(streams=False)), Bar(98.0 - SLACK, _limited)),
        ),
        Column("percent_high", "to"),
        Column("p50_ratio", "p50 × time slicing", "low", 2, (Bar(1.15, _together(streams=True)),)),
        Column("p99_ratio", "p99 × time slicing", "low", 2, (Bar(1.15, _together(streams=True)),)),
        Column("trainer_over_points", "trainer, points over time slicing", "high", 1, (Bar(-1.0, _trained),)),
        Column("trainer_percent", "trainer, % of exclusive", "high"),
        Column("split_off_points", "split among trainers off, points", "low", 2, (Bar(1.0, _split),)),
        Column("per_second", "units/s", digits=0),
        Column("p50_ms", "p50, ms", digits=1),
        Column("p99_ms", "p99, ms", digits=1),
        Column("samples", "requests or steps", digits=0),
        Column("unserved", "unserved", "low", 0),
        Column("nvml_percent", "NVML"),
    ),
    measure,
    derive,
    estimate,
    rows,
    WORKS,
)
