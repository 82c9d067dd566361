"""Replays demands on rules that size a vGPU.

    python -m benchmarks.autoscale [--trace DIR] [--containers N] [--json] [--plot FILE]

For each rule, over all containers: the part of the demand that missed its objective, the GPU-hours that the sizes held,
and how often a size changed. Without ``--trace``, a seeded generator draws the demands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any, Final

from benchmarks.autoscale import trace
from benchmarks.autoscale.rules import READING_S, RULES, Outcome, replay

PROCESSES: Final = 2
DRAWN_CONTAINERS, DRAWN_SAMPLES, SEED = 8, 200, 1


def of_one(samples: Sequence[float]) -> dict[str, Outcome]:
    return {name: replay(rule(samples), samples) for name, rule in RULES.items()}


def compared(series: Sequence[Sequence[float]], pool: ProcessPoolExecutor) -> dict[str, Any]:
    """The sums over all containers."""
    outcomes = list(pool.map(of_one, series, chunksize=4))
    hours = sum(map(len, series)) * trace.SAMPLE_S / 3600
    rules = {}
    for name in RULES:
        total = reduce(Outcome.__add__, (outcome[name] for outcome in outcomes))
        rules[name] = {
            "missed_percent": 100 * total.missed / total.offered if total.offered else 0.0,
            "gpu_hours": total.held / 3600,
            "used_percent": 100 * (total.offered - total.missed) / total.held,
            "changes_per_hour": total.changes / hours,
        }
    return {"containers": len(series), "container_hours": hours, "reading_s": READING_S, "rules": rules}


def plot(found: dict[str, Any], file: Path) -> None:
    """GPU-hours against misses: nearer to the lower left corner is better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, row in found["rules"].items():
        axes.scatter([row["gpu_hours"]], [row["missed_percent"]])
        axes.annotate(name, (row["gpu_hours"], row["missed_percent"]), xytext=(5, 5), textcoords="offset points")
    axes.set(xlabel="GPU-hours held", ylabel="demand that missed its objective, %", yscale="symlog")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    figure.savefig(file)


def show(found: dict[str, Any]) -> None:
    print(f"{found['containers']} containers, {found['container_hours']:.0f} container-hours")
    print(f"{'rule':<12}{'missed, %':>11}{'GPU-hours':>11}{'used, %':>9}{'changes/h':>11}")
    for name, row in found["rules"].items():
        print(
            f"{name:<12}{row['missed_percent']:11.2f}{row['gpu_hours']:11.1f}{row['used_percent']:9.1f}"
            f"{row['changes_per_hour']:11.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.autoscale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help=f"folder with {trace.ARCHIVE}")
    parser.add_argument("--containers", type=int, metavar="N", help="the first N alone")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw GPU-hours against misses")
    arguments = parser.parse_args()
    drawn = trace.drawn(DRAWN_CONTAINERS, DRAWN_SAMPLES, SEED)
    series = trace.demands(arguments.trace) if arguments.trace else drawn
    with ProcessPoolExecutor(PROCESSES) as pool:
        found = compared(series[: arguments.containers], pool)
    if arguments.plot:
        plot(found, arguments.plot)
    print(json.dumps(found, indent=2)) if arguments.json else show(found)


if __name__ == "__main__":
    main()
