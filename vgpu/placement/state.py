"""What a request asks for, what a node has left, and the node after a placement."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeVar

from vgpu.packing.admission import fits
from vgpu.packing.fractional import STEPS
from vgpu.packing.knapsack import Work
from vgpu.share import CARD_MPERCENT, PPM, Mode, Share

Ordered = TypeVar("Ordered", str, tuple[int, int])
ANY_CORES: Final = 1 << 60
"""Of a node whose processors are of no concern."""
_STEP_PPM: Final = PPM // 100


class Gpu(NamedTuple):
    """What one GPU has left. GPUs that are equal here are interchangeable."""

    time_ppm: int
    """Temporal mode: of its time. Spatial mode: of its area, SMs × time."""
    memory_bytes: int
    shares: tuple[tuple[int, int], ...] = ()
    """Spatial mode: (SMs in thousandths of a percent, guarantee in ppm) of its vGPUs, sorted."""
    labels: tuple[str, ...] = ()
    """Of its vGPUs that have one, sorted."""


@dataclass(frozen=True)
class Request:
    """What one vGPU asks for, or so many vGPUs on as many GPUs of one node."""

    time_ppm: int
    """The guaranteed time, on its SMs."""
    memory_bytes: int = 0
    sm_mpercent: int = CARD_MPERCENT
    """Its SMs. A GPU in temporal mode gives all SMs for a shorter time instead."""
    gpus: int = 1
    """0: it asks for processors alone."""
    cores: int = 0
    """Thousandths of a processor."""
    host_bytes: int = 0
    models: frozenset[str] = frozenset()
    """Empty: any GPU."""
    label: str = ""
    """``mutex`` keeps vGPUs of one label apart."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.time_ppm, self.memory_bytes, self.sm_mpercent, self.gpus, self.cores, self.models))

    @cached_property
    def area_ppm(self) -> int:
        """SMs × time of a GPU."""
        return self.time_ppm * self.sm_mpercent // CARD_MPERCENT

    @cached_property
    def rounded_up(self) -> Request:
        """With its time in whole percent and its memory in 16ths of the next lower power of two, both rounded up."""
        step = 1 << max(0, self.memory_bytes.bit_length() - 5)
        time_ppm = min(PPM, -(-self.time_ppm // _STEP_PPM) * _STEP_PPM)
        memory_bytes = -(-self.memory_bytes // step) * step
        if (time_ppm, memory_bytes) == (self.time_ppm, self.memory_bytes):
            return self
        return replace(self, time_ppm=time_ppm, memory_bytes=memory_bytes)


@dataclass(frozen=True, eq=False)
class Kind:
    """What nodes of one kind have in common. A fleet keeps one object of each kind, which is faster to compare."""

    model: str = ""
    memory_bytes: int = 0
    """Of each GPU."""
    mode: Mode = Mode.TEMPORAL


Allows = Callable[[Request, Gpu], bool]


class Room(NamedTuple):
    """What one node has left. Nodes that are equal here are interchangeable."""

    kind: Kind
    gpus: tuple[Gpu, ...]
    """Sorted."""
    cores: int = ANY_CORES
    host_bytes: int = ANY_CORES

    def takes(self, asked: Request) -> bool:
        """Whether the request fits the node."""
        return bool(self.options(asked))

    def options(self, asked: Request, allows: Allows | None = None) -> Sequence[Option]:
        """The different ways to place the request: on each GPU that has room and that ``allows`` it; several of them on
        the fullest, or on the emptiest. GPUs that are equal make one option."""
        if asked.cores > self.cores or asked.host_bytes > self.host_bytes:
            return ()
        if asked.models and self.kind.model not in asked.models:
            return ()
        if asked.gpus == 0:
            return (Option(self, asked, ()),)
        time, memory = asked.area_ppm, asked.memory_bytes
        able = [gpu for gpu in self.gpus if gpu.time_ppm >= time and gpu.memory_bytes >= memory]
        if self.kind.mode is Mode.SPATIAL:
            able = [gpu for gpu in able if _packs(_with(gpu.shares, (asked.sm_mpercent, asked.time_ppm)))]
        if allows is not None:
            able = [gpu for gpu in able if allows(asked, gpu)]
        if len(able) < asked.gpus:
            return ()
        if asked.gpus == 1:
            return [Option(self, asked, (gpu,)) for gpu in dict.fromkeys(able)]
        ways = {tuple(able[: asked.gpus]): None, tuple(able[-asked.gpus :]): None}
        return [Option(self, asked, gpus) for gpus in ways]


class Option:
    """One way to place a request on a node."""

    __slots__ = ("after", "asked", "before", "left", "used")

    def __init__(self, before: Room, asked: Request, used: tuple[Gpu, ...]) -> None:
        self.before = before
        self.asked = asked
        self.used = used
        """What the GPUs that it takes have left before."""
        self.left = tuple([taken(before.kind, gpu, asked) for gpu in used])
        """What they have left after."""
        gpus = self.left or before.gpus
        if len(before.gpus) > 1:
            rest = list(before.gpus)
            for old, new in zip(used, self.left, strict=True):
                rest[rest.index(old)] = new
            rest.sort()
            gpus = tuple(rest)
        self.after = Room(before.kind, gpus, before.cores - asked.cores, before.host_bytes - asked.host_bytes)


@lru_cache(4096)
def _packs(shares: tuple[tuple[int, int], ...]) -> bool:
    """Whether these vGPUs fit the SMs and the time of one GPU, as far as bounded work shows."""
    return fits(Mode.SPATIAL, [Share(time, sm_mpercent=width) for width, time in shares], Work(STEPS))


def taken(kind: Kind, gpu: Gpu, asked: Request) -> Gpu:
    """The GPU with one more vGPU."""
    shares = _with(gpu.shares, (asked.sm_mpercent, asked.time_ppm)) if kind.mode is Mode.SPATIAL else ()
    labels = _with(gpu.labels, asked.label) if asked.label else gpu.labels
    return Gpu(gpu.time_ppm - asked.area_ppm, gpu.memory_bytes - asked.memory_bytes, shares, labels)


def given_back(kind: Kind, gpu: Gpu, asked: Request) -> Gpu:
    """The GPU without that vGPU."""
    shares = _without(gpu.shares, (asked.sm_mpercent, asked.time_ppm)) if kind.mode is Mode.SPATIAL else ()
    labels = _without(gpu.labels, asked.label) if asked.label else gpu.labels
    return Gpu(gpu.time_ppm + asked.area_ppm, gpu.memory_bytes + asked.memory_bytes, shares, labels)


def _with(several: tuple[Ordered, ...], one: Ordered) -> tuple[Ordered, ...]:
    more = list(several)
    insort(more, one)
    return tuple(more)


def _without(several: tuple[Ordered, ...], one: Ordered) -> tuple[Ordered, ...]:
    rest = list(several)
    rest.remove(one)
    return tuple(rest)
