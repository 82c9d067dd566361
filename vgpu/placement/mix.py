"""The sizes that were asked for lately, and what of a node those sizes could not use.

A size that does not fit a GPU strands what that GPU has left; the expectation over the mix is a node's stranding. It is
counted in GPUs. Source: the fragmentation measure of Weng et al., Beware of Fragmentation (USENIX ATC 2023), for one
resource of a GPU. Here a GPU has two, time and memory. The node's processors count twice: a size that they cannot serve
strands all of the node, and so does, in part, what the mix as a whole would need of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from vgpu.placement.state import ANY_CORES, Gpu, Kind, Request, Room
from vgpu.share import PPM

HOST_WEIGHT: Final = 0.3
"""Of GPUs that the processors cannot serve, beside GPUs that a size cannot use. Between 0.1 and 3 it hardly matters."""
MOST_SIZES: Final = 400
MOST_KEPT: Final = 200_000

Sizes = list[tuple[int, int, list[float]]]
"""Of each size: area, memory, and a list. Its item N is the probability that a request has this size, and asks for at
most N GPUs."""


class Grid:
    """The probability that a request fits one GPU, by what the GPU has left. It changes only at the times and
    memories of the sizes, so each cell between them is summed once."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._times = sorted({time for time, _, _ in sizes})
        self._memories = sorted({memory for _, memory, _ in sizes})
        self._cells: dict[tuple[int, int], float] = {}
        self.kept: dict[Gpu, float] = {}
        """What GPUs of that kind strand."""

    def usable(self, time_ppm: int, memory_bytes: int) -> float:
        cell = bisect_right(self._times, time_ppm), bisect_right(self._memories, memory_bytes)
        found = self._cells.get(cell)
        if found is None:
            fitting = [p[1] for time, memory, p in self._sizes if time <= time_ppm and memory <= memory_bytes]
            found = self._cells[cell] = sum(fitting)
        return found


class Mix:
    """An immutable mix. ``of``: what was asked for, how often."""

    def __init__(self, asked: Mapping[Request, float] | Iterable[Request]) -> None:
        counted = Counter(asked).most_common(MOST_SIZES)
        total = sum(count for _, count in counted)
        self.sizes = [(request, count / total) for request, count in counted]
        time = sum(part * size.area_ppm * size.gpus for size, part in self.sizes) / PPM
        memory = sum(part * size.memory_bytes * size.gpus for size, part in self.sizes)
        cores = sum(part * size.cores for size, part in self.sizes)
        self.bytes_per_gpu = memory / time if time else 0.0
        """Memory that the mix asks for with each GPU's time."""
        self.cores_per_gpu = cores / time if time else 0.0
        self._steps = sorted({size.cores for size, _ in self.sizes})
        self._tables: dict[tuple[Kind, int], Sizes] = {}
        self._known: dict[tuple[Kind, int, tuple[Gpu, ...]], float] = {}
        self._grids: dict[tuple[Kind, int], Grid] = {}
        self._is_single = all(size.gpus <= 1 for size, _ in self.sizes)
        """No request takes several GPUs, so what each GPU strands adds up."""

    def differs(self, other: Mix) -> float:
        """The part of the requests for which the two mixes do not agree: 0 to 1."""
        mine, theirs = dict(self.sizes), dict(other.sizes)
        return sum(abs(mine.get(size, 0.0) - theirs.get(size, 0.0)) for size in mine.keys() | theirs.keys()) / 2

    def stranded(self, room: Room) -> float:
        """What the mix cannot use of the node, in GPUs."""
        return self.unusable(room) + HOST_WEIGHT * self._unserved(room)

    def alone(self, kind: Kind, gpu: Gpu) -> tuple[float, float]:
        """``stranded`` of a node with this GPU alone, whose processors are of no concern, and its ``imbalance``."""
        grid = self._grid(kind)
        left = self._worth(kind, gpu) * (1 - grid.usable(gpu.time_ppm, gpu.memory_bytes))
        return left, self.imbalance(kind, gpu)

    def stranded_alone(self, kind: Kind, gpu: Gpu) -> float:
        """The first of ``alone``, kept: the same GPU is asked about for many requests."""
        kept = self._grid(kind).kept
        found = kept.get(gpu)
        if found is None:
            if len(kept) > MOST_KEPT:
                kept.clear()
            found = kept[gpu] = self.alone(kind, gpu)[0]
        return found

    def _grid(self, kind: Kind, step: int | None = None) -> Grid:
        step = len(self._steps) if step is None else step
        grid = self._grids.get((kind, step))
        if grid is None:
            grid = self._grids[kind, step] = Grid(self._served(kind, step))
        return grid

    def unusable(self, room: Room) -> float:
        """The expectation over the sizes of what each cannot use, in GPUs."""
        step = bisect_right(self._steps, room.cores)
        key = room.kind, step, room.gpus
        found = self._known.get(key)
        if found is None:
            if len(self._known) > MOST_KEPT:
                self._known.clear()
            found = self._known[key] = self._expected(room.kind, step, room.gpus)
        return found

    def _expected(self, kind: Kind, step: int, gpus: tuple[Gpu, ...]) -> float:
        """``step``: of the processors that are left, among those that sizes ask for."""
        table = self._served(kind, step)
        if len(gpus) == 1:
            [(free_time, free_memory, *_)] = gpus
            usable = sum([p[1] for time, memory, p in table if time <= free_time and memory <= free_memory])
            return self._worth(kind, gpus[0]) * (1 - usable)
        if self._is_single:
            grid = self._grid(kind, step)
            return sum([self._worth(kind, gpu) * (1 - grid.usable(gpu.time_ppm, gpu.memory_bytes)) for gpu in gpus])
        worth = [self._worth(kind, gpu) for gpu in gpus]
        total, hosted, sum_ = sum(worth), 0.0, 0.0
        for time, memory, at_most in table:
            able, unusable = 0, 0.0
            for gpu, left in zip(gpus, worth, strict=True):
                if gpu.time_ppm >= time and gpu.memory_bytes >= memory:
                    able += 1
                else:
                    unusable += left
            part = at_most[min(able, len(at_most) - 1)]
            hosted += part
            sum_ += part * unusable
        return sum_ + total * (1 - hosted)

    def _served(self, kind: Kind, step: int) -> Sizes:
        table = self._tables.get((kind, step))
        if table is None:
            table = self._tables[kind, step] = self._table(kind, step)
        return table

    def _table(self, kind: Kind, step: int) -> Sizes:
        """The sizes that a node of this kind serves with so many processors."""
        cores = self._steps[step - 1] if step else -1
        by_size: dict[tuple[int, int], Counter[int]] = {}
        most = max((size.gpus for size, _ in self.sizes), default=0)
        for size, part in self.sizes:
            if size.gpus and size.cores <= cores and (not size.models or kind.model in size.models):
                by_size.setdefault((size.area_ppm, size.memory_bytes), Counter())[size.gpus] += part  # type: ignore[assignment]
        return [
            (time, memory, [sum(part for gpus, part in parts.items() if gpus <= n) for n in range(most + 1)])
            for (time, memory), parts in sorted(by_size.items())
        ]

    def _worth(self, kind: Kind, gpu: Gpu) -> float:
        """What the GPU has left, in GPUs: the greater of time and memory, if the mix asks for memory."""
        time = gpu.time_ppm / PPM
        return max(time, gpu.memory_bytes / kind.memory_bytes) if self.bytes_per_gpu and kind.memory_bytes else time

    def _unserved(self, room: Room) -> float:
        """The GPUs that the processors cannot serve, if the mix goes on as it is."""
        if room.cores >= ANY_CORES >> 1 or not self.cores_per_gpu:
            return 0.0
        return max(0.0, sum([gpu.time_ppm for gpu in room.gpus]) / PPM - room.cores / self.cores_per_gpu)

    def imbalance(self, kind: Kind, gpu: Gpu) -> float:
        """What of the GPU's time or memory is left over once the mix has used up the other, in GPUs."""
        if not self.bytes_per_gpu or not kind.memory_bytes:
            return 0.0
        time = gpu.time_ppm / PPM
        served = gpu.memory_bytes / self.bytes_per_gpu
        return time - served if time > served else (served - time) * self.bytes_per_gpu / kind.memory_bytes
