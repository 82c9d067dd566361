"""Demands over time: a public trace, or a seeded generator with its habits.

The trace is ``gentd26_gpu_duty_cycle.tgz`` of alibaba/clusterdata, cluster-trace-v2026-GenAI: the GPU duty cycle of 143
containers of an image-generation service, one value every 57 s for 23 hours.
"""

from __future__ import annotations

import csv
import io
import random
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Final

ARCHIVE: Final = "gentd26_gpu_duty_cycle.tgz"
SAMPLE_S: Final = 57.0
LEAST_SAMPLES: Final = 60
"""Containers with fewer lived for less than an hour."""

Demands = list[float]
"""Percent of a GPU, one value for each ``SAMPLE_S``."""


def demands(folder: Path) -> list[Demands]:
    """The containers of the trace, in the order of their names."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    with tarfile.open(folder / ARCHIVE) as archive:
        [member] = [one for one in archive.getmembers() if one.name.endswith(".csv")]
        file = archive.extractfile(member)
        assert file is not None
        for row in csv.DictReader(io.TextIOWrapper(file, "utf-8")):
            found[row["container_ip"]][float(row["timestamp_anon"])] = float(row["value"])
    series = ([values[at] for at in sorted(values)] for _, values in sorted(found.items()))
    return [one for one in series if len(one) >= LEAST_SAMPLES]


def drawn(containers: int, samples: int, seed: int) -> list[Demands]:
    """Demands with the habits of such services: idle for minutes, then busy for some, at any level."""
    chance = random.Random(seed)
    return [_one(samples, chance) for _ in range(containers)]


def _one(samples: int, chance: random.Random) -> Demands:
    busy_part, found = chance.uniform(0.05, 0.6), list[float]()
    while len(found) < samples:
        if chance.random() < busy_part:
            found += [min(98.0, max(0.0, chance.gauss(60, 30))) for _ in range(chance.randint(1, 4))]
        else:
            found += [0.0] * chance.randint(1, 4)
    return found[:samples]
