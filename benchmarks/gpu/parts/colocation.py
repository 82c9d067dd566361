"""A latency-critical stream of requests beside training of low priority: what each way of sharing costs both.

Requests arrive at random (Poisson) whether or not the GPU keeps up; each runs ResNet-50, as one CUDA graph or eager
(``--works``). Latency on the host's clock runs from arrival to the host's knowing, on the GPU's clock between events
around the request: the latter begins when the GPU reaches the request, so it leaves out the host's queue. The trainer
takes what it gets. Intervals are bootstrapped from blocks of 100 neighbours. 20,000 requests: ``--seconds 80`` for the
graph, 200 for the eager one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.gpu.parts.part import (
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
from benchmarks.gpu.parts.shares import label
from benchmarks.gpu.records import Measurement
from benchmarks.gpu.stage import Sharer, Stage
from benchmarks.gpu.tables import Bar, Column, Row, compared

STREAMS: Final = {"resnet50-graph1": 250.0, "resnet50-infer1": 100.0}
"""Requests a second: a fifth of the GPU's time, a third of the host's."""
TRAINER: Final = "resnet50-train"
CAPS: Final = (50.0, 80.0)
SPLITS: Final = ((20.0, 80.0), (30.0, 70.0), (50.0, 50.0))
TEMPORAL_SPLIT: Final = (30.0, 70.0)
BURSTS: Final = {"": (True, True), ", stream bursts": (True, False)}
"""Which of both may use all SMs, and what the row is called then."""


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

    def window(stage: Stage, repeat: int, row: str, way: str, pair: Sequence[Sharer]) -> None:
        outcome = stage.window(pair, options.seconds, requests_per_second=[STREAMS[work]])
        bench.keep(repeat, block, row, way, outcome)

    stream, trainer = stage.plain(work), stage.plain(TRAINER)
    pairs = {("2 of them", HARDWARE): (stream, trainer)}
    if options.shared(MPS) or options.shared(CAPPED):
        beside = stage.mps(work)
        pairs["2 of them", MPS] = (beside, stage.mps(TRAINER))
        pairs |= {(f"trainer {cap:g} %", CAPPED): (beside, stage.mps(TRAINER, cap)) for cap in CAPS}
    if options.shared(TEMPORAL):
        pairs[label(TEMPORAL_SPLIT), TEMPORAL] = _vgpus(stage, TEMPORAL, work, TEMPORAL_SPLIT, (True, True))
    stage.ready()
    for repeat in range(options.repeat):
        window(stage, repeat, "stream", EXCLUSIVE, (stream,))
        bench.keep(repeat, block, "trainer", EXCLUSIVE, stage.window([trainer], min(options.seconds, 20)))
        for (row, way), pair in pairs.items():
            if options.shared(way):
                window(stage, repeat, row, way, pair)
        for row, split, way, who in _spatial(options):
            with Stage(bench.ground) as inner:  # SMs are fixed for a process's life, and all splits do not fit
                pair = _vgpus(inner, SPATIAL, work, split, who)
                inner.ready()
                window(inner, repeat, row, way, pair)


def _vgpus(stage: Stage, mode: str, work: str, split: Sequence[float], bursts: Sequence[bool]) -> tuple[Sharer, Sharer]:
    first, second = (("--burst",) if burst else () for burst in bursts)
    return (
        stage.vgpu(mode, work, split[0], "--priority", "high", *first),
        stage.vgpu(mode, TRAINER, split[1], "--priority", "low", *second),
    )


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        alone = next((m.results[0] for m in block if (m.row, m.way) == ("stream", EXCLUSIVE)), None)
        trainer = next((m.results[0] for m in block if (m.row, m.way) == ("trainer", EXCLUSIVE)), None)
        for m in block:
            figures = dict(m.figures)
            stream = m.results[0]
            if "host_p50_ms" in stream:
                told = (
                    "requests",
                    "unserved",
                    *(f"{clock}_p{p}{end}_ms" for clock in ("host", "gpu") for p in (50, 99) for end in ENDS),
                )
                figures |= {name: stream[name] for name in told}
                if alone is not None and len(m.results) > 1:
                    figures |= {f"p{p}_ratio": stream[f"host_p{p}_ms"] / alone[f"host_p{p}_ms"] for p in (50, 99)}
            if trainer is not None and "units_per_second" in m.results[-1]:
                figures["trainer_percent"] = 100 * m.results[-1]["units_per_second"] / trainer["units_per_second"]
            rows.append(Row(m.block.split()[0], m.row, m.way, figures))
    return rows


ENDS: Final = ("", "_low", "_high")


def estimate(options: Options) -> float:
    count = 2 + sum(options.shared(way) for way in (HARDWARE, MPS, TEMPORAL)) + len(CAPS) * options.shared(CAPPED)
    spatial = len(_spatial(options))
    windows = windows_s(count - 1 + spatial, options.seconds) + windows_s(1, min(options.seconds, 20))
    return len(options.some(tuple(STREAMS))) * (BEGIN_S + options.repeat * (windows + spatial * BEGIN_S * 0.7))


def _ours(row: Row) -> bool:
    return row.way in {TEMPORAL, SPATIAL, BURST}


PART = Part(
    "colocation",
    "A stream of requests beside a trainer of low priority, against each alone",
    20.0,
    (
        Column("p50_ratio", "p50 × alone", "low", 2, (Bar(1.10, _ours),)),
        Column("p99_ratio", "p99 × alone", "low", 2, (Bar(1.10, _ours),)),
        Column("trainer_percent", "trainer, % of exclusive", "high", 1, (Bar(80.0, _ours),)),
        Column("requests", "requests", digits=0),
        Column("unserved", "unserved", "low", 0),
        *(
            Column(
                f"{clock}_p{p}{end}_ms",
                f"{clock} p{p}, ms" if not end else {"_low": "95 % from", "_high": "to"}[end],
                digits=2,
            )
            for clock in ("host", "gpu")
            for p in (50, 99)
            for end in ENDS
        ),
    ),
    measure,
    derive,
    estimate,
)
