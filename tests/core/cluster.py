"""Several simulated GPUs, their servers' messages about gangs, and jobs whose ranks wait for each other.

Each GPU is a ``model.Run``; all go by one clock. A job has one vGPU on each of its GPUs; each of its ranks runs serial
kernels, and every ``COLLECTIVE``-th of them ends only once all ranks have begun theirs. Messages between servers take
``delay_ns``, more or less, may be lost, and none leaves or reaches a server that is stopped. A link is a stream: what
was said first arrives first, and what changes within ``REST_NS`` is told together; neither holds where ``overtaking``.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuserver.core.scheduler.gangs import Gangs
from gpuserver.core.scheduler.leases import Event, GangMemberStatus
from gpuserver.core.scheduler.temporal.scheduler import TemporalScheduler
from tests.core import oracle
from tests.core.model import MS, App, Published, Run, Work
from tests.core.timeline import Agenda
from vgpu.share import Share

COLLECTIVE = 4
BEAT_NS = 100 * MS
REST_NS = MS // 2


@dataclass(frozen=True)
class Job:
    """vGPU ``key`` on each of ``gpus``, with this share there. ``ranks``: whether its kernels wait for each other."""

    key: int
    gpus: tuple[int, ...]
    shares: tuple[Share, ...]
    work: Work = field(default_factory=Work)
    gang: bool = True
    ranks: bool = True


@dataclass
class Progress:
    """How far each rank of a job has come, by GPU, and what waits for it."""

    begun: dict[int, int]
    waiting: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    @property
    def done(self) -> int:
        return min(self.begun.values())

    def begin(self, gpu: int) -> None:
        self.begun[gpu] += 1
        ready = [resume for number, resume in self.waiting if number <= self.done]
        self.waiting = [(number, resume) for number, resume in self.waiting if number > self.done]
        for resume in ready:
            resume()


class Gpu(Run):
    """One GPU of a ``Cluster``."""

    def __init__(self, cluster: Cluster, index: int, scheduler: TemporalScheduler, jobs: Sequence[Job], seed: int):
        self.cluster, self.index, self.stopped = cluster, index, False
        self.kept: list[Event] = []
        self.progress = {job.key: cluster.progress[job.key] for job in jobs if job.ranks}
        shares = [job.shares[job.gpus.index(index)] for job in jobs]
        works, keys = [job.work for job in jobs], [job.key for job in jobs]
        watch, together = oracle.Watch(scheduler), cluster.together
        super().__init__(scheduler, shares, works, seed=seed, keys=keys, watch=watch, together=together)

    def _deliver(self, event: Event) -> None:
        if self.stopped:
            self.kept.append(event)
            return
        super()._deliver(event)
        self.cluster.look(self)

    def _deliver_all(self) -> None:
        if not self.stopped:
            super()._deliver_all()
            self.cluster.look(self)

    def _launch(self, app: App, held: Published) -> None:
        before = app.running
        super()._launch(app, held)
        if app.running and not before and app.key in self.progress:
            self.progress[app.key].begin(self.index)

    def _complete(self, app: App, held: Published, begun: int) -> None:
        progress = self.progress.get(app.key)
        if progress is not None:
            number = progress.begun[self.index]
            if number % COLLECTIVE == 0 and progress.done < number:
                progress.waiting.append((number, lambda: Run._complete(self, app, held, begun)))
                return
        super()._complete(app, held, begun)


class Cluster(Agenda):
    """``run`` until a time; ``progress[key].done`` kernels is what a job has achieved."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        seed: int = 0,
        delay_ns: int = MS // 2,
        lost_ratio: float = 0.0,
        overtaking: bool = False,
        together: bool = False,
        kind: type[TemporalScheduler] = TemporalScheduler,
        gangs: type[Gangs] = Gangs,
    ) -> None:
        super().__init__()
        self.jobs, self.seed = jobs, seed
        count = 1 + max(gpu for job in jobs for gpu in job.gpus)
        self.random = random.Random(seed)
        self.delay_ns, self.lost_ratio, self.overtaking = delay_ns, lost_ratio, overtaking
        self.together = together
        self.arrives: dict[tuple[int, int], int] = {}
        """By sender and receiver: when the last message does."""
        self.told: dict[int, dict[str, GangMemberStatus]] = {}
        self.rests: dict[int, int] = {}
        """By GPU: until when its server tells nothing more."""
        self.messages = 0
        self.kernel_ns = {job.key: job.work.kernel_ns for job in jobs}
        self.grouped = {job.key for job in jobs if job.gang}
        self.progress = {job.key: Progress(dict.fromkeys(job.gpus, 0)) for job in jobs if job.ranks}
        self.gangs = [gangs(index) for index in range(count)]
        self.ready = False
        self.gpus = [
            Gpu(self, index, kind(), [job for job in jobs if index in job.gpus], seed + index) for index in range(count)
        ]
        self.ready = True
        for gpu in self.gpus:
            members = {str(job.key): job.key for job in jobs if job.gang and gpu.index in job.gpus}
            for event in self.gangs[gpu.index].enroll(members, 0):
                gpu._deliver(event)
            self.beat(gpu)

    def __repr__(self) -> str:
        """What makes it again."""
        rest = f"seed={self.seed}, delay_ns={self.delay_ns}, lost_ratio={self.lost_ratio}, overtaking={self.overtaking}"
        return f"Cluster({list(self.jobs)}, {rest}, together={self.together})"

    def run(self, until_ns: int) -> Cluster:
        while True:
            heaps = [heap for heap in (self.heap, *(gpu.heap for gpu in self.gpus)) if heap]
            heap = min(heaps, key=lambda h: h[0][0])
            if heap[0][0] > until_ns:
                break
            now_ns, _, do = heapq.heappop(heap)
            self._set(now_ns)
            do()
        self._set(until_ns)
        return self

    def _set(self, now_ns: int) -> None:
        self.now_ns = now_ns
        for gpu in self.gpus:
            gpu.now_ns = now_ns

    def violations(self) -> list[str]:
        """Where a scheduler broke the contract with its dispatcher, or two leases of one GPU were in force at once."""
        found = []
        for gpu in self.gpus:
            assert isinstance(gpu.watch, oracle.Watch)
            found += [*gpu.watch.found, *oracle.one_holder(gpu)]
        return found

    # --- messages

    def beat(self, gpu: Gpu) -> None:
        self.tell(gpu)
        self.at(self.now_ns + BEAT_NS, lambda: self.beat(gpu))

    def outlooks(self, gpu: Gpu) -> dict[str, GangMemberStatus]:
        return {gang: gpu.scheduler.outlook(key) for gang, key in self.gangs[gpu.index].members.items()}

    def look(self, gpu: Gpu) -> None:
        if self.ready and self.outlooks(gpu) != self.told.get(gpu.index):
            self.tell(gpu)

    def tell(self, gpu: Gpu) -> None:
        if gpu.stopped:
            return
        if not self.overtaking:
            if self.now_ns < self.rests.get(gpu.index, 0):
                return
            self.rests[gpu.index] = self.now_ns + REST_NS
            self.at(self.now_ns + REST_NS, lambda: self.look(gpu))
        outlooks = self.told[gpu.index] = self.outlooks(gpu)
        self.messages += 1
        for other in self.gpus:
            if other is not gpu and self.random.random() >= self.lost_ratio:
                at_ns = self.now_ns + round(self.delay_ns * self.random.uniform(0.5, 2))
                if not self.overtaking:
                    at_ns = max(at_ns, self.arrives.get((gpu.index, other.index), 0))
                self.arrives[gpu.index, other.index] = at_ns
                self.at(at_ns, lambda other=other: self.receive(other, gpu, outlooks))  # type: ignore[misc]

    def receive(self, gpu: Gpu, sender: Gpu, outlooks: dict[str, GangMemberStatus]) -> None:
        if gpu.stopped:
            return
        for event in self.gangs[gpu.index].receive(sender.index, outlooks, self.now_ns):
            gpu._deliver(event)

    def stop(self, index: int) -> None:
        """Its server is stopped: its dispatcher's reports wait, and it says nothing."""
        self.gpus[index].stopped = True

    def resume(self, index: int) -> None:
        gpu = self.gpus[index]
        gpu.stopped = False
        gpu._deliver_all()
        kept, gpu.kept = gpu.kept, []
        for event in kept:
            gpu._deliver(event)
