"""The openb lists (alibaba/clusterdata, cluster-trace-gpu-v2023): nodes and tasks.

Method of the published columns: tasks in an order that the seed shuffles, cut or drawn again from the list until they
ask for 1.3 times the cluster's GPUs. Each arrives, stays, and is refused if it does not fit.
"""

from __future__ import annotations

import csv
import gzip
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from vgpu.placement import Gpu, Kind, Mix, Request, Room
from vgpu.share import PPM

LISTS: Final = ("default", "gpushare40", "gpushare100", "multigpu50", "gpuspec33")
PUBLISHED: Final = {
    "best-fit": (93.08, 91.69, 85.01, 95.74, 93.09),
    "packing": (92.00, 90.03, 82.57, 96.18, 93.22),
    "fgd": (95.39, 94.15, 86.90, 97.18, 94.55),
}
"""In percent, in the order of LISTS: expected_results of hkust-adsl/kubernetes-scheduler-simulator."""
OFFERED: Final = 1.3
COUNTED: Final = 1.295
"""A published figure is the mean over the arrivals whose sum, in whole percent of the GPUs, is 130."""
FIRST_SEED: Final = 42
POPULAR: Final = 0.95


def _rows(file: Path) -> Iterator[dict[str, str]]:
    with gzip.open(file, "rt") as text:
        yield from csv.DictReader(text)


def nodes(folder: Path) -> list[Room]:
    """The cluster, empty."""
    kinds: dict[str, Kind] = {}
    found = []
    for row in _rows(folder / "openb_node_list_gpu_node.csv.gz"):
        kind = kinds.setdefault(row["model"], Kind(row["model"]))
        gpus = (Gpu(PPM, 0),) * int(row["gpu"])
        found.append(Room(kind, gpus, int(row["cpu_milli"]), int(row["memory_mib"]) << 20))
    return found


def tasks(folder: Path, name: str) -> list[Request]:
    found: dict[tuple[str, ...], Request] = {}
    listed = []
    for row in _rows(folder / f"openb_pod_list_{name}.csv.gz"):
        key = tuple(row.get(column) or "" for column in ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec"))
        if key not in found:
            cores, memory, gpus, part, models = key
            found[key] = Request(
                int(part or 0) * 1000 if int(gpus) else 0,
                gpus=int(gpus),
                cores=int(cores),
                host_bytes=int(memory) << 20,
                models=frozenset(filter(None, models.split("|"))),
            )
        listed.append(found[key])
    return listed


def arrivals(cluster: Sequence[Room], listed: Sequence[Request], seed: int) -> tuple[list[Room], list[Request]]:
    """The cluster in an order of its own, since rules prefer the first node, and the tasks as they arrive."""
    chance = random.Random(seed)
    most = OFFERED * PPM * sum(len(room.gpus) for room in cluster)
    order = chance.sample(listed, len(listed))
    asked = sum(task.gpus * task.time_ppm for task in order)
    while asked > most:
        task = order.pop(chance.randrange(len(order)))
        asked -= task.gpus * task.time_ppm
    while asked + (task := chance.choice(listed)).time_ppm <= most:  # of one GPU, as the authors count here
        order.append(task)
        asked += task.gpus * task.time_ppm
    return chance.sample(cluster, len(cluster)), order


def popular(listed: Sequence[Request]) -> Mix:
    """What FGD knows of the list: the most frequent sizes, node memory aside."""
    sizes = Counter(
        Request(task.time_ppm, gpus=task.gpus, cores=task.cores, models=task.models) for task in listed
    ).most_common()
    kept, known = {}, 0
    for size, count in sizes:
        if known >= POPULAR * len(listed):
            break
        kept[size] = float(count)
        known += count
    return Mix(kept)
