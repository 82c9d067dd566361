"""What so many GPUs hold by each policy, for requests that a seed draws."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

from vgpu.placement.fleet import Fleet
from vgpu.placement.mix import Mix
from vgpu.placement.policies import Policy
from vgpu.placement.state import Gpu, Kind, Request, Room
from vgpu.share import PPM

Sizes = Mapping[tuple[int, int], int]
"""(time in ppm of a GPU, memory in bytes): how often it is asked for."""

# How many GPUs were asked for in parts of this percentage (cluster-trace-gpu-v2023 of alibaba/clusterdata, default).
_OPENB: Final = {
    5: 7, 11: 24, 14: 1, 16: 74, 22: 62, 23: 140, 27: 4, 29: 1, 32: 328, 33: 7, 35: 6, 37: 47, 44: 2, 46: 128, 47: 750,
    48: 19, 55: 72, 59: 75, 65: 253, 81: 1078, 100: 4355,
}  # fmt: skip
_MIXED: Final = {10: 3, 20: 3, 25: 3, 30: 3, 40: 2, 50: 3, 60: 1, 70: 1, 80: 1, 100: 1}
_SMALL: Final = {5: 1, 8: 1, 10: 1, 12: 1, 15: 1, 20: 1, 25: 1}
MIXES: Final[Mapping[str, Mapping[int, int]]] = {"openb": _OPENB, "mixed": _MIXED, "small": _SMALL}
"""Percent of a GPU: weight. Time and memory are drawn apart."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What a fleet holds once as much of its time or of its memory was asked for as there is."""

    placed: int
    refused: int
    time_ratio: float
    """Of the time of all GPUs that is promised."""
    memory_ratio: float
    stranded_gpus: float
    """What the requests cannot use of the rest."""


def sizes_of(mix: str, memory_bytes: int) -> Sizes:
    """The sizes of a mix on cards of so much memory."""
    parts = MIXES[mix].items()
    return {
        (time * PPM // 100, memory * memory_bytes // 100): often * as_often
        for time, often in parts
        for memory, as_often in parts
    }


def drawn(sizes: Sizes, seed: int) -> Iterator[Request]:
    """Requests without end."""
    chance = random.Random(seed)
    requests, weights = [Request(time, memory) for time, memory in sizes], list(sizes.values())
    for _ in repeat(None):
        yield from chance.choices(requests, weights, k=256)


def offered(requests: Iterable[Request], gpus: int, memory_bytes: int) -> Iterator[Request]:
    """Requests until they ask for as much time or as much memory as so many GPUs have."""
    time, memory = gpus * PPM, gpus * memory_bytes
    for request in requests:
        time -= request.time_ppm
        memory -= request.memory_bytes
        if time < 0 or memory < 0:
            return
        yield request


def fill(policy: Policy, gpus: int, memory_bytes: int, requests: Sequence[Request]) -> Filled:
    """Place the requests one after the other on single GPUs; none leaves."""
    kind = Kind(memory_bytes=memory_bytes)
    fleet = Fleet(policy, repeat(Room(kind, (Gpu(PPM, memory_bytes),)), gpus))
    placed = [request for request in requests if fleet.place(request) is not None]
    mix = Mix(requests)
    return Filled(
        len(placed),
        len(requests) - len(placed),
        sum(request.time_ppm for request in placed) / (gpus * PPM),
        sum(request.memory_bytes for request in placed) / (gpus * memory_bytes),
        sum(mix.unusable(fleet.room(node)) for node in range(gpus)),
    )
