"""A latency-critical stream of requests beside training of low priority: what each way of sharing costs both.

Requests arrive at random (Poisson) whether or not the GPU keeps up; each runs ResNet-50, as one CUDA graph or eager
(``--works``). Latency on the host's clock runs from arrival to the host's knowing, on the GPU's clock between events
around the request: the latter begins when the GPU reaches the request, so it leaves out the host's queue. The stream
works alone, without a vGPU, and beside the trainer in turns of 20 s, with the same arrivals, and changes about who goes
first; intervals, also those of the ratio, are bootstrapped from blocks of 100 neighbours. The trainer takes what it
gets; alone it is measured first and last. 20,000 requests: ``--seconds 82`` for the graph, 205 for the eager one, and
as long for those alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.suite.parts.part import (
    BEGIN_S,
    BURST,
    CAPPED,
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
from benchmarks.suite.parts.shares import TWO, label
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import bootstrap_ratio, percentile
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Outcome, Sharer, Stage

STREAMS: Final = {"resnet50-graph1": 250.0, "resnet50-infer1": 100.0}
"""Requests a second: a fifth of the GPU's time, a third of the host's."""
TRAINER: Final = "resnet50-train"
TURN_S: Final = 20.0
CAPS: Final = (50.0, 80.0)
SPLITS: Final = ((20.0, 80.0), (30.0, 70.0), (50.0, 50.0))
TEMPORAL_SPLIT: Final = (30.0, 70.0)
BEST: Final = (30.0, 70.0)
BURSTS: Final = {"": (True, True), ", stream bursts": (True, False)}
"""Which of both may use all SMs, and what the row is called then."""
TRAINER_ALONE: Final = "trainer"


def capped(percent: float) -> str:
    return f"trainer {percent:g} %"


def without(row: str) -> str:
    """The same stream in the same vGPU, and nobody beside it."""
    return f"{row}, no trainer"


def _spatial(options: Options) -> list[tuple[str, tuple[float, ...], str, tuple[bool, ...]]]:
    """Row, split, way, which of both burst."""
    splits = [split for split in options.splits or SPLITS if len(split) == 2]
    chosen: list[tuple[str, tuple[float, ...], str, tuple[bool, ...]]] = []
    if options.shared(SPATIAL):
        chosen += [(label(split), split, SPATIAL, (False, False)) for split in splits]
    if options.shared(BURST):
        chosen += [
            (label(split) + name, split, BURST, who) for split in splits[:2][-1:] for name, who in BURSTS.items()
        ]
    return chosen


def measure(bench: Bench) -> None:
    for stream in bench.options.some(tuple(STREAMS)):
        block = f"{stream} + {TRAINER}"
        with bench.block(block) as stage:
            _measure(bench, stage, block, stream)


def _measure(bench: Bench, stage: Stage, block: str, work: str) -> None:
    options = bench.options

    def keep(stage: Stage, repeat: int, row: str, way: str, pair: Sequence[Sharer]) -> None:
        seconds = options.seconds if len(pair) > 1 else min(options.seconds, TURN_S)
        bench.keep(repeat, block, row, way, in_turns(stage, stream, pair, STREAMS[work], seconds))

    stream, trainer = stage.plain(work), stage.plain(TRAINER)
    pairs = {(TWO, HARDWARE): (stream, trainer)}
    if options.shared(MPS) or options.shared(CAPPED):
        beside = stage.mps(work)
        pairs[TWO, MPS] = (beside, stage.mps(TRAINER))
        pairs |= {(capped(cap), CAPPED): (beside, stage.mps(TRAINER, cap)) for cap in CAPS}
    if options.shared(TEMPORAL):
        pairs[label(TEMPORAL_SPLIT), TEMPORAL] = _vgpus(stage, TEMPORAL, work, TEMPORAL_SPLIT, (True, True))
    stage.ready()

    def trainer_alone(repeat: int) -> None:
        outcome = stage.window([trainer], min(options.seconds, TURN_S))
        bench.keep(repeat, block, TRAINER_ALONE, EXCLUSIVE, outcome)

    for repeat in range(options.repeat):
        trainer_alone(repeat)
        for (row, way), pair in pairs.items():
            if options.shared(way):
                keep(stage, repeat, row, way, pair)
        for row, split, way, who in _spatial(options):
            with Stage(bench.ground) as inner:  # SMs are fixed for a process's life, and all splits do not fit
                pair = _vgpus(inner, SPATIAL, work, split, who)
                inner.ready()
                keep(inner, repeat, row, way, pair)
                if who == (False, False):  # what it loses by having fewer SMs
                    keep(inner, repeat, without(row), EXCLUSIVE, pair[:1])
        trainer_alone(repeat)


def in_turns(
    stage: Stage, alone: Sharer, pair: Sequence[Sharer], requests_per_second: float, seconds: float
) -> Outcome:
    """``seconds`` of the stream ``alone`` and as many of the ``pair``, whose first is a stream too."""
    turns = max(1, round(seconds / TURN_S))

    def window(sharers: Sequence[Sharer], turn: int) -> Outcome:
        return stage.window(sharers, seconds / turns, requests_per_second=[requests_per_second], seed=turn)

    before: list[Outcome] = []
    beside: list[Outcome] = []
    for turn in range(turns):
        both = ((before, [alone]), (beside, pair))
        for outcomes, sharers in both[::-1] if turn % 2 else both:
            outcomes.append(window(sharers, turn))
    stream = latencies([o.results[0] for o in before], [o.results[0] for o in beside])
    others = (
        results[-1] | {"units_per_second": statistics.fmean(result["units_per_second"] for result in results)}
        for results in zip(*(o.results[1:] for o in beside), strict=True)
    )
    figures = {name: statistics.fmean(o.figures[name] for o in beside) for name in beside[0].figures}
    return Outcome((stream, *others), figures)


def latencies(before: Sequence[dict[str, Any]], beside: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all windows of one stream, alone and in company."""
    found: dict[str, Any] = dict(beside[-1])
    found["unserved"] = sum(result["unserved"] for result in beside)
    found["requests"] = sum(len(result["host_ms"]) for result in beside)
    for clock in ("host", "gpu"):
        del found[f"{clock}_ms"]
        alone = [took for result in before for took in result[f"{clock}_ms"]]
        samples = [took for result in beside for took in result[f"{clock}_ms"]]
        for percent in (50, 99):
            name, at = f"{clock}_p{percent}", partial(percentile, percent=percent)
            found[f"{name}_alone_ms"], found[f"{name}_ms"] = at(alone), at(samples)
            found[f"{name}_ratio"] = at(samples) / at(alone)
            low, high = bootstrap_ratio(samples, alone, at, block=100, rounds=200)
            found |= {f"{name}_ratio_low": low, f"{name}_ratio_high": high}
    return found


def _vgpus(stage: Stage, mode: str, work: str, split: Sequence[float], bursts: Sequence[bool]) -> tuple[Sharer, Sharer]:
    first, second = (("--burst",) if burst else () for burst in bursts)
    return (
        stage.vgpu(mode, work, split[0], "--priority", "high", *first),
        stage.vgpu(mode, TRAINER, split[1], "--priority", "low", *second),
    )


def rows(options: Options) -> list[Labels]:
    found: list[Labels] = []
    for stream in options.some(tuple(STREAMS)):
        found.append((stream, TRAINER_ALONE, EXCLUSIVE))
        found += [(stream, TWO, way) for way in (HARDWARE, MPS) if options.shared(way)]
        found += [(stream, capped(cap), CAPPED) for cap in CAPS if options.shared(CAPPED)]
        found += [(stream, label(TEMPORAL_SPLIT), TEMPORAL)] * options.shared(TEMPORAL)
        for row, _, way, who in _spatial(options):
            found.append((stream, row, way))
            found += [(stream, without(row), EXCLUSIVE)] * (who == (False, False))
    return found


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        trainer = [m.results[0]["units_per_second"] for m in block if (m.row, m.way) == (TRAINER_ALONE, EXCLUSIVE)]
        for m in block:
            figures = m.figures | {name: value for name, value in m.results[0].items() if name in FIGURES}
            if trainer and "units_per_second" in m.results[-1]:
                figures["trainer_percent"] = 100 * m.results[-1]["units_per_second"] / statistics.fmean(trainer)
            rows.append(Row(m.block.split()[0], m.row, m.way, figures))
    return rows


def estimate(options: Options) -> float:
    count = sum(options.shared(way) for way in (HARDWARE, MPS, TEMPORAL)) + len(CAPS) * options.shared(CAPPED)
    spatial = len(_spatial(options))
    turns = max(1, round(options.seconds / TURN_S))
    windows = windows_s(2, min(options.seconds, TURN_S))
    windows += windows_s(2 * turns * (count + spatial), options.seconds / turns)
    windows += windows_s(2 * sum(way == SPATIAL for _, _, way, _ in _spatial(options)), min(options.seconds, TURN_S))
    return len(options.some(tuple(STREAMS))) * (BEGIN_S + options.repeat * (windows + spatial * BEGIN_S * 0.7))


def _best(row: Row) -> bool:
    """The way, and the split, that cost both the least; the others show how one is traded for the other."""
    return row.way == SPATIAL and row.row == label(BEST)


def _clock(clock: str) -> list[Column]:
    columns = []
    for percent in (50, 99):
        name = f"{clock}_p{percent}"
        if clock == "gpu":  # the host's has a bar, and stands in front
            columns.append(Column(f"{name}_ratio", f"GPU p{percent} × alone", "low", 2))
        columns.append(Column(f"{name}_alone_ms", f"{clock} p{percent} alone, ms", "low", 2))
        columns.append(Column(f"{name}_ms", "beside, ms", "low", 2))
    return columns


PART = Part(
    "colocation",
    "A stream of requests beside a trainer of low priority, against each alone",
    20.0,
    (
        Column("host_p50_ratio", "p50 × alone", "low", 2, (Bar(1.10, _best),)),
        Column("host_p50_ratio_low", "95 % from", digits=2),
        Column("host_p50_ratio_high", "to", digits=2),
        Column("host_p99_ratio", "p99 × alone", "low", 2, (Bar(1.10, _best),)),
        Column("host_p99_ratio_low", "95 % from", digits=2),
        Column("host_p99_ratio_high", "to", digits=2),
        Column("trainer_percent", "trainer, % of exclusive", "high", 1, (Bar(80.0, _best),)),
        Column("requests", "requests", "high", 0, (Bar(20_000, _best),)),
        Column("unserved", "unserved", "low", 0),
        *_clock("host"),
        *_clock("gpu"),
    ),
    measure,
    derive,
    estimate,
    rows,
    tuple(STREAMS),
    SPLITS,
)
FIGURES: Final = {column.figure for column in PART.columns}
