"""Eight models of three kinds on one GPU, as a serving node packs them: 4 ResNet-50, 2 RNN-T, 2 BERT, in spatial mode
with quotas of time, against one exclusive run of each, time slicing and plain MPS of the same eight.

With hard quotas the eight together get 360 % at most, whatever the GPU could do: four times 40, twice 40 and twice 60.
With ``--burst`` the quotas are what each is guaranteed, and what nobody uses is used; that is compared with MPS.

A sharer's normalised throughput is what it does in company over what one of its kind does alone; the total is their
sum. The quotas do not all fit (4·12·0.4 + 2·24·0.4 + 2·50·0.6 is 98 % of the SM-time), so all are ``--overcommit``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.suite.parts.part import (
    BEGIN_S,
    BURST,
    EXCLUSIVE,
    HARDWARE,
    MPS,
    SPATIAL,
    Bench,
    Options,
    Part,
    windows_s,
)
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.tables import Bar, Column, Labels, Row, compared
from benchmarks.suite.stage import Sharer, Stage

KINDS: Final = (
    ("resnet50-infer8", 4, 12.0, 40.0),
    ("rnnt-infer", 2, 24.0, 40.0),
    ("bert-infer", 2, 50.0, 60.0),
)
"""Work, how many, percent of the SMs, guaranteed percent of the time; where quotas are hard, the largest one too."""
MEMORY: Final = "6G"
BLOCK: Final = "4 ResNet-50, 2 RNN-T, 2 BERT"
EIGHT: Final = "8 of them"
MIX: Final = "mix"
ONE: Final = "one"


def _compared(options: Options, way: str) -> bool:
    """Whether it is measured: also for the bars of ours, which are about time slicing and plain MPS of the same run."""
    return options.shared(way) or (way in {HARDWARE, MPS} and options.shared(BURST))


def _quotas(percent: float) -> tuple[str, ...]:
    return "--quota-request", f"{percent:g}", "--quota-limit", f"{percent:g}", "--overcommit"


def measure(bench: Bench) -> None:
    """All that is compared is there before any of it works. Ours and plain MPS take turns, twice and three times: how
    fast eight hosts are changes by 4 % within a minute."""
    options = bench.options
    all_of_them = [kind for kind in KINDS for _ in range(kind[1])]

    def vgpus(stage: Stage, *extra: str) -> list[Sharer]:
        return [
            stage.vgpu(SPATIAL, work, sm, *_quotas(time), *extra, memory=MEMORY) for work, _, sm, time in all_of_them
        ]

    with bench.block(BLOCK) as stage:
        groups = {HARDWARE: [stage.plain(work) for work, *_ in all_of_them]}
        if _compared(options, MPS):
            groups[MPS] = [stage.mps(work) for work, *_ in all_of_them]
        if options.shared(BURST):
            groups[BURST] = vgpus(stage, "--burst")
        stage.ready()
        ways = [way for way in groups if _compared(options, way)]
        ways += [MPS, BURST, MPS] if options.shared(BURST) else []
        first = {kind[0]: groups[HARDWARE][all_of_them.index(kind)] for kind in KINDS}
        for repeat in range(options.repeat):
            for work, sharer in first.items():
                bench.keep(repeat, BLOCK, work, EXCLUSIVE, stage.window([sharer], options.seconds))
            for way in ways:
                bench.keep(repeat, BLOCK, EIGHT, way, stage.window(groups[way], options.seconds))
    if options.shared(SPATIAL):
        with bench.block(f"{BLOCK}, hard") as stage:
            hard = vgpus(stage)
            stage.ready()
            for repeat in range(options.repeat):
                bench.keep(repeat, BLOCK, EIGHT, SPATIAL, stage.window(hard, options.seconds))


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for block in compared(measurements):
        alone = {m.row: m.results[0]["units_per_second"] for m in block if m.way == EXCLUSIVE}
        if set(alone) != {kind[0] for kind in KINDS}:
            continue
        shared = [(m, _normalised(m, alone)) for m in block if m.way != EXCLUSIVE]
        found: dict[str, list[float]] = {}
        for m, parts in shared:
            found.setdefault(m.way, []).append(sum(map(sum, parts.values())))
        totals = {way: statistics.fmean(of_way) for way, of_way in found.items()}
        noise = {f"{MPS}_apart_percent": 100 * (max(found[MPS]) / min(found[MPS]) - 1)} if MPS in found else {}
        rows += [Row(m.row, ONE, m.way, m.figures | {"per_second": alone[m.row]}) for m in block if m.way == EXCLUSIVE]
        for m, parts in shared:
            figures = m.figures | {"total_percent": sum(map(sum, parts.values()))}
            for work, of_kind in parts.items():
                figures[f"{work}_percent"] = sum(of_kind)
            if m.way in (SPATIAL, BURST):  # of the mean, so that what is compared is as long on both sides
                compared_with = {other: totals[other] for other in (MPS, HARDWARE) if other in totals}
                figures |= {
                    f"over_{name}_percent": 100 * totals[m.way] / total for name, total in compared_with.items()
                }
                figures |= noise
            rows.append(Row(MIX, m.row, m.way, figures))
    return rows


def rows(options: Options) -> list[Labels]:
    alone = [(work, ONE, EXCLUSIVE) for work, *_ in KINDS]
    return [*alone, *((MIX, EIGHT, way) for way in (HARDWARE, MPS, BURST, SPATIAL) if _compared(options, way))]


def _normalised(measurement: Measurement, alone: dict[str, float]) -> dict[str, list[float]]:
    """Work → each of its sharers' throughput in percent of one alone."""
    found: dict[str, list[float]] = {}
    for result in measurement.results:
        found.setdefault(result["work"], []).append(100 * result["units_per_second"] / alone[result["work"]])
    return found


def estimate(options: Options) -> float:
    ways = sum(_compared(options, way) for way in (HARDWARE, MPS, SPATIAL, BURST)) + 3 * options.shared(BURST)
    begin = (3 + options.shared(SPATIAL)) * BEGIN_S
    return begin + windows_s(options.repeat * (len(KINDS) + ways), options.seconds)


def _bursts(row: Row) -> bool:
    return row.way == BURST


PART = Part(
    MIX,
    f"{BLOCK} on one GPU: sum of each one's throughput in percent of one of its kind alone",
    10.0,
    (
        Column("total_percent", "total, %", "high"),
        Column("over_mps_percent", "% of plain MPS", "high", 1, (Bar(100.0, _bursts),)),
        Column("over_hardware_percent", "% of time slicing", "high", 1, (Bar(100.0, _bursts),)),
        Column(f"{MPS}_apart_percent", "plain MPS apart from itself, %"),
        *(Column(f"{work}_percent", f"{number} × {work}, %") for work, number, *_ in KINDS),
        Column("per_second", "units/s"),
        Column("nvml_percent", "NVML"),
    ),
    measure,
    derive,
    estimate,
    rows,
)
