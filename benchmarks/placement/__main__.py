"""Compares placement rules.

    python -m benchmarks.placement [--trace DIR] [--seeds 10] [--json]

``lists``   percent of the GPUs that are allocated on the openb lists, mean over the seeds (with ``--trace``)
``mixes``   percent of time and of memory in use once as much of either was asked for as there is
``scale``   decisions a second on up to ten thousand GPUs, each with ten vGPUs that come and go
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.placement import mixes, rules, trace
from vgpu.placement import POLICIES, Fleet, Gpu, Kind, Mix, Placement, Room
from vgpu.placement.simulate import MIXES, drawn, fill, offered, sizes_of
from vgpu.share import PPM

ON_LISTS: Final = ("best-fit", "packing", "fgd", "fit")
GPUS_OF_MIXES: Final = 6212
SIZES: Final = (100, 1000, 3000, 10_000)
PER_GPU: Final = 10
PROCESSES: Final = 2


def allocated(folder: Path, name: str, rule: str, seed: int) -> float:
    """Percent of the GPUs, once the tasks have arrived: the mean over the last arrivals, as the published column."""
    listed = trace.tasks(folder, name)
    cluster, arriving = trace.arrivals(trace.nodes(folder), listed, seed)
    if rule == "fgd":
        fleet = Fleet(rules.RULES[rule], cluster, trace.popular(listed))
    elif rule in rules.RULES:
        fleet = Fleet(rules.RULES[rule], cluster, Mix(()))
    else:
        fleet = Fleet(POLICIES[rule], cluster)  # it learns the mix as the tasks arrive
    whole, arrived, used, last = PPM * sum(len(room.gpus) for room in cluster), 0, 0, []
    for task in arriving:
        arrived += task.gpus * task.time_ppm
        if fleet.place(task) is not None:
            used += task.gpus * task.time_ppm
        if arrived >= trace.COUNTED * whole:
            last.append(used)
    return 100 * statistics.fmean(last or [used]) / whole  # a short list may not come that far


def in_use(mix: str, rule: str, seed: int) -> tuple[float, float]:
    """Percent of time and of memory in use, once as much of either was asked for as there is."""
    requests = list(offered(drawn(sizes_of(mix, mixes.CARD), seed), GPUS_OF_MIXES, mixes.CARD))
    filled = fill(mixes.RULES[rule], GPUS_OF_MIXES, mixes.CARD, requests)
    return 100 * filled.time_ratio, 100 * filled.memory_ratio


def scale(gpus: int, decisions: int = 20_000) -> dict[str, float]:
    """A cluster that is filled with about ten vGPUs a GPU, half of it; then vGPUs come, and as many go."""
    kind = Kind("card", mixes.CARD)
    fleet = Fleet(POLICIES["fit"], [Room(kind, (Gpu(PPM, mixes.CARD),))] * gpus)
    parts = {2: 1, 3: 2, 5: 3, 8: 2, 10: 1, 12: 1}
    sizes = {(a * PPM // 100, b * mixes.CARD // 100): parts[a] * parts[b] for a in parts for b in parts}
    requests = drawn(sizes, 1)
    present: list[Placement] = []
    chance = random.Random(2)
    taken: list[float] = []
    filled = time.perf_counter()
    while len(present) < PER_GPU * gpus:
        request = next(requests)
        placed = fleet.place(request)
        if placed is None:
            break
        present.append(placed)
    filled = time.perf_counter() - filled
    count = len(present)
    for _ in range(decisions):
        at = chance.randrange(len(present))
        present[at], present[-1] = present[-1], present[at]
        fleet.remove(present.pop())
        request = next(requests)
        began = time.perf_counter()
        placed = fleet.place(request)
        taken.append(time.perf_counter() - began)
        if placed is not None:
            present.append(placed)
    taken.sort()
    return {
        "gpus": gpus,
        "vgpus": count,
        "filling_per_second": count / filled,
        "decisions_per_second": len(taken) / sum(taken),
        "median_us": 1e6 * statistics.median(taken),
        "p99_us": 1e6 * taken[99 * len(taken) // 100],
    }


def lists(folder: Path, seeds: Sequence[int], pool: ProcessPoolExecutor) -> dict[str, dict[str, float]]:
    asked = {
        (name, rule, seed): pool.submit(allocated, folder, name, rule, seed)
        for name in trace.LISTS
        for rule in ON_LISTS
        for seed in seeds
    }
    return {
        name: {rule: statistics.fmean(asked[name, rule, seed].result() for seed in seeds) for rule in ON_LISTS}
        for name in trace.LISTS
    }


def mixes_in_use(seeds: Sequence[int], pool: ProcessPoolExecutor) -> dict[str, dict[str, list[float]]]:
    asked = {
        (mix, rule, seed): pool.submit(in_use, mix, rule, seed)
        for mix in MIXES
        for rule in mixes.RULES
        for seed in seeds
    }
    return {
        mix: {
            rule: [statistics.fmean(asked[mix, rule, seed].result()[part] for seed in seeds) for part in (0, 1)]
            for rule in mixes.RULES
        }
        for mix in MIXES
    }


def plot(rows: Sequence[dict[str, float]], file: Path) -> None:
    """The time of a decision against the number of GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    gpus = [row["gpus"] for row in rows]
    for name, label in (("median_us", "median"), ("p99_us", "p99")):
        axes.loglog(gpus, [row[name] for row in rows], marker="o", label=label)
    axes.axhline(5000, color="grey", linestyle=":", label="bar for p99: 5 ms")
    axes.set(xlabel="GPUs, each with ten vGPUs", ylabel="µs for a decision")
    axes.legend()
    figure.savefig(file)


def show(found: dict[str, Any]) -> None:
    if "lists" in found:
        print(f"{'percent of GPUs allocated':<26}" + "".join(f"{name:>13}" for name in trace.LISTS))
        for rule in ON_LISTS:
            print(f"{rule:<26}" + "".join(f"{found['lists'][name][rule]:13.2f}" for name in trace.LISTS))
            if rule in trace.PUBLISHED:
                print(f"{'  published':<26}" + "".join(f"{value:13.2f}" for value in trace.PUBLISHED[rule]))
    if "mixes" in found:
        print(f"{'time / memory in use, %':<26}" + "".join(f"{mix:>15}" for mix in MIXES))
        for rule in mixes.RULES:
            cells = (found["mixes"][mix][rule] for mix in MIXES)
            print(f"{rule:<26}" + "".join(f"{f'{a:.2f} / {b:.2f}':>15}" for a, b in cells))
    for row in found.get("scale", ()):
        print(", ".join(f"{name} {value:,.0f}" for name, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="folder with the openb lists")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="how many (default 10)")
    parser.add_argument("--first-seed", type=int, default=trace.FIRST_SEED, metavar="N", help="the others follow it")
    parser.add_argument("--only", choices=["lists", "mixes", "scale"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the time of a decision against the size")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(PROCESSES) as pool:
        if arguments.trace and arguments.only in (None, "lists"):
            found["lists"] = lists(arguments.trace, seeds, pool)
        if arguments.only in (None, "mixes"):
            found["mixes"] = mixes_in_use(seeds[: max(1, len(seeds) // 3)], pool)
    if arguments.only in (None, "scale"):
        found["scale"] = [scale(gpus) for gpus in SIZES]
        if arguments.plot:
            plot(found["scale"], arguments.plot)
    print(json.dumps(found, indent=2)) if arguments.json else show(found)


if __name__ == "__main__":
    main()
