"""64 vGPUs without CUDA in it: how soon a cold request has a lease, and what CPU the GPU Server and its brokers need.

The GPU is always the simulated one, the host is this machine's (``benchmarks/micro/contention.py``, ``native.py``).
From request to GO by played hooks; by programs, how much longer a launch takes than the same without a vGPU: on a free
GPU their gates do not wait for GO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.micro import contention, native
from benchmarks.suite.parts.part import Bench, Options, Part
from benchmarks.suite.report.records import Measurement
from benchmarks.suite.report.stats import percentile
from benchmarks.suite.report.tables import Bar, Column, Labels, Row
from benchmarks.suite.stage import Outcome

VGPUS: Final = 64
SAMPLES: Final = 1000
PLAYED: Final = "played hooks"
PROGRAMS: Final = "programs"
COLD: Final = "cold"
OF_HOOKS: Final = (f"{COLD}, standby lease", "hand-over")
OF_PROGRAMS: Final = (f"{COLD}, free GPU", "contending")
BLOCK: Final = f"{VGPUS} vGPUs"


def measure(bench: Bench) -> None:
    block = BLOCK
    for repeat in range(bench.options.repeat):
        with bench.block(block):
            with native.card_of(VGPUS) as card:
                for row, latencies in zip(OF_HOOKS, (native.cold_request, native.hand_over), strict=True):
                    bench.keep(repeat, block, row, PLAYED, Outcome((), _latency(latencies, card)))
            measured = contention.measure(VGPUS, SAMPLES, bench.options.seconds)
            for row, figures in zip(OF_PROGRAMS, measured, strict=True):
                bench.keep(repeat, block, row, PROGRAMS, Outcome((), figures))


def _latency(latencies: Callable[[native.Card, int], list[float]], card: native.Card) -> dict[str, float]:
    found = latencies(card, SAMPLES)
    return {"cold_p50_us": percentile(found, 50), "cold_p99_us": percentile(found, 99)}


def rows(options: Options) -> list[Labels]:
    played = [(BLOCK, row, PLAYED) for row in OF_HOOKS]
    return [*played, *((BLOCK, row, PROGRAMS) for row in OF_PROGRAMS)]


def derive(measurements: Sequence[Measurement]) -> list[Row]:
    rows = []
    for m in measurements:
        added = {
            f"added_p{p}_us": m.figures[f"cold_p{p}_us"] - m.figures[f"direct_p{p}_us"]
            for p in (50, 99)
            if f"direct_p{p}_us" in m.figures
        }
        rows.append(Row(m.block, m.row, m.way, m.figures | added))
    return rows


def estimate(options: Options) -> float:
    return options.repeat * (60 + 2 * SAMPLES * 0.005 + options.seconds)


PART = Part(
    "native",
    "Latencies on the host in µs; CPU in percent of one core",
    5.0,
    (
        Column("cold_p99_us", "p99, µs", "low", 1, (Bar(100.0, lambda row: row.row.startswith(COLD)),)),
        Column("cold_p50_us", "p50, µs", "low"),
        Column("added_p99_us", "p99 more than without vGPU", "low"),
        Column("added_p50_us", "p50 more", "low"),
        Column("direct_p50_us", "p50 without"),
        Column("direct_p99_us", "p99 without"),
        Column("leases_per_request", "leases a request", digits=2),
        Column("cpu_percent", "CPU, server and brokers", "low", 1, (Bar(25.0, lambda row: row.row == OF_PROGRAMS[1]),)),
        Column("server_percent", "server"),
        Column("dispatcher_percent", "its dispatcher"),
        Column("brokers_percent", "brokers"),
        Column("leases_per_second", "leases/s", digits=0),
        Column("events_per_second", "events/s", digits=0),
    ),
    measure,
    derive,
    estimate,
    rows,
)
