"""Host memory for what is away from the card: a store for each tenant, made and first touched here.

So the server's own cgroup pays for it, and one limit holds for all of it. Each tenant has a store, because every
process that uses a store maps all of it. The vGPUs of one user are one tenant. A vGPU that containers mount is a tenant
of its own (``Vgpu.tenant``). A store keeps its memory while its tenant has programs: they have the memory pinned, and
pinning takes longer than any copy. So no vGPU may own memory for which only another tenant's store has room
(``gpuserver/core/states/residency.py::spare_bytes``).

A process writes its name into each block that it owns (cython_ext/logic/memory/store.pxd). The server takes the blocks
of a process that has ended once the driver has released the process. Until then the GPU may still be copying.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, get_native_id
from typing import Final

import trio

from cython_ext.pages.page import PageError
from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, STORE_TIME_MASK, StorePage
from gpuserver.core.states.residency import HostMemory
from vgpu.identity import Process
from vgpu.loggers import get_logger
from vgpu.protocol.peer import is_running, start_time

log = get_logger(__name__)

GROW_BYTES: Final = 256 << 20
"""A store grows by so much at a time, so a process that waits for a part of it can go on."""
TOUCHING_THREADS: Final = max(1, min(8, (os.cpu_count() or 1) // 4))
"""One clears 3.5 GB a second, the card delivers 50."""
HOST_LEAST_BYTES: Final = 1 << 30
"""So much of the host's memory is left to others."""
HOST_AHEAD_BYTES: Final = 4 << 30
"""... by a store that grows before it is needed; and not less than a tenth of it."""
AHEAD_NICE: Final = 10
"""The priority of a thread that does so. It holds locks that the server needs, so it is not an idle one."""
AHEAD_AGAIN_S: Final = 30.0
"""After the host had no memory for it."""
SWEEP_MOST: Final = 64
"""A sweep checks so many names of owners: a tenant may write any number of them."""
USED_UP: Final = "the host memory for what is away is used up: vgpuctl serve --host-memory gives more"
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class RetiredStore:
    """A store that no process gets any more. ``programs`` may have it mapped and pinned."""

    store: StorePage
    programs: Sequence[Process]


@dataclass(slots=True)
class ReclaimPass:
    """The sweeps of one store. ``begin``: the block at which the next sweep begins. ``ended``: owners that have ended,
    each with the number of readings of the driver until then."""

    begin: int = 0
    ended: dict[Process, int] = field(default_factory=dict)


class Stores:
    """``limit_bytes``: the most that all of them may have. ``numa_node``: from which they get memory while it has
    some; None: from any."""

    def __init__(self, limit_bytes: int, numa_node: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._numa_node = numa_node
        self._stores: dict[int, list[StorePage]] = {}
        """By tenant, the one that is handed out last; others were handed out by servers before this one."""
        self._left: dict[int, tuple[Process, ...]] = {}
        self._dropped: list[RetiredStore] = []
        self._growing = trio.Lock()
        self._ahead_after_s = 0.0
        self._urgent = 0
        """How many wait for a store to grow."""
        self._sweeps: dict[StorePage, ReclaimPass] = {}
        self._myself = Process(os.getpid(), start_time(os.getpid()))

    def of(self, tenant: int) -> StorePage:
        """The store of a tenant, from now on."""
        if tenant not in self._stores:
            self._stores[tenant] = [StorePage.create(max(1, self.limit_bytes // STORE_BLOCK_BYTES), self._numa_node)]
        return self._stores[tenant][-1]

    def take(self, tenant: int, descriptor: int) -> None:
        """One that a broker kept over a server's end. ``PageError`` if it is none."""
        known = self._stores.setdefault(tenant, [])
        if not any(os.path.sameopenfile(descriptor, store.fileno()) for store in known):
            known.insert(0, StorePage.map(descriptor))

    def leave(self, tenant: int, programs: Iterable[Process]) -> None:
        """The vGPU of a tenant's ``programs`` was removed. They have its store mapped until they end."""
        left = dict.fromkeys((*self._left.get(tenant, ()), *programs))
        self._left[tenant] = tuple(process for process in left if is_running(process))

    def drop(self, tenant: int) -> None:
        """The tenant has no swapped vGPU any more. What its programs have mapped is in use until they end."""
        left = self._left.pop(tenant, ())
        self._dropped += (RetiredStore(store, left) for store in self._stores.pop(tenant, ()))
        self._close_dropped()

    def _close_dropped(self) -> None:
        self._dropped = [dropped for dropped in self._dropped if not _close(dropped)]

    # --- how much there is

    @property
    def ready_bytes(self) -> int:
        """Of all together."""
        return sum(store.ready * STORE_BLOCK_BYTES for store in self._everything())

    @property
    def host(self) -> HostMemory:
        """The limits by which the server decides what may be away."""
        dropped = sum(d.store.ready * STORE_BLOCK_BYTES for d in self._dropped if not d.store.closed)
        return HostMemory(self.limit_bytes - dropped, {tenant: self._ready_bytes_of(tenant) for tenant in self._stores})

    def _ready_bytes_of(self, tenant: int) -> int:
        return sum(store.ready * STORE_BLOCK_BYTES for store in self._stores.get(tenant, ()))

    @property
    def used_bytes(self) -> int:
        return sum(store.used * STORE_BLOCK_BYTES for store in self._everything())

    def _everything(self) -> Iterable[StorePage]:
        yield from (store for stores in self._stores.values() for store in stores)
        yield from (dropped.store for dropped in self._dropped if not dropped.store.closed)

    def lacks(self, tenant: int, bytes_: int) -> str:
        """Why a tenant's store could not have so much, whatever the host has; empty: it could."""
        others = self.ready_bytes - self._ready_bytes_of(tenant)
        return USED_UP if bytes_ > self.limit_bytes - others else ""

    async def have(self, tenant: int, bytes_: int) -> str:
        """See to it that a tenant's store has got so much. Empty, or why it has not."""
        self._urgent += 1
        try:
            return await self._grow(self.of(tenant), bytes_)
        finally:
            self._urgent -= 1

    async def _grow(self, store: StorePage, bytes_: int) -> str:
        async with self._growing:
            while store.ready * STORE_BLOCK_BYTES < bytes_:
                if store.closed:
                    return "it is not needed any more"
                left = self._left_blocks
                if store.ready == store.blocks or not left:
                    return USED_UP
                missing = -(-bytes_ // STORE_BLOCK_BYTES) - store.ready
                blocks = min(GROW_BYTES // STORE_BLOCK_BYTES, missing, left)
                if host_room_bytes() < HOST_LEAST_BYTES + GROW_BYTES:
                    return "the host has no memory left for what is away"
                try:
                    await trio.to_thread.run_sync(store.grow, blocks, TOUCHING_THREADS)
                except (MemoryError, PageError) as error:
                    return str(error)
        return ""

    @property
    def _left_blocks(self) -> int:
        """What all of them may grow by, in whole segments."""
        left = max(0, self.limit_bytes - self.ready_bytes) // STORE_BLOCK_BYTES
        return left - left % STORE_SEGMENT_BLOCKS

    def have_room_for(self, wanted: Mapping[int, int]) -> bool:
        """Whether the limit has room for stores of such sizes, by tenant, beside what the stores have already."""
        others = sum(self._ready_bytes_of(tenant) for tenant in self._stores if tenant not in wanted)
        mine = sum(max(bytes_, self._ready_bytes_of(tenant)) for tenant, bytes_ in wanted.items())
        return others + mine <= self.host.limit_bytes

    async def have_ahead(self, tenant: int, bytes_: int) -> bool:
        """Grow a tenant's store by one segment towards so much, at low priority. False: there is nothing to do, or no
        memory for it, or another growth is under way."""
        store = self.of(tenant)
        if self._urgent or self._growing.locked() or store.ready * STORE_BLOCK_BYTES >= bytes_:
            return False
        if store.closed or store.ready == store.blocks or not self._left_blocks:
            return False
        if trio.current_time() < self._ahead_after_s or host_room_bytes() < ahead_reserve_bytes():
            return False
        async with self._growing:
            try:
                await trio.to_thread.run_sync(in_nice_thread, lambda: self._touch_segment(store))
            except (MemoryError, OSError, PageError, RuntimeError) as error:
                log.warning("host memory for swap is not set aside ahead", tenant=tenant, reason=str(error))
                self._ahead_after_s = trio.current_time() + AHEAD_AGAIN_S
                return False
        return True

    def _touch_segment(self, store: StorePage) -> None:
        begin = store.ready
        for at in range(begin, min(begin + STORE_SEGMENT_BLOCKS, store.blocks)):
            if self._urgent:  # a store that is needed now waits for no more than a block
                return
            store.touch(at, at + 1)
        store.grow(STORE_SEGMENT_BLOCKS)

    async def give_back(self, busy: Container[int]) -> None:
        """Give empty stores back to the host: those of tenants without programs, and those that no process gets any
        more. ``busy``: tenants that may have programs in a vGPU. A program that was on the card when its server and
        broker died has a store of that time pinned until it leaves."""
        for tenant, stores in list(self._stores.items()):
            pinned = tenant in busy or any(is_running(program) for program in self._left.get(tenant, ()))
            for store in stores[:-1] if pinned else list(stores):
                if store.ready and not store.used and not self._growing.locked():  # else soon: it may take seconds
                    await self._clear(store)

    async def _clear(self, store: StorePage) -> None:
        async with self._growing:
            if store.closed:
                return
            try:
                await trio.to_thread.run_sync(store.clear, self._myself.pid, self._myself.start_time)
            except OSError as error:
                log.warning("host memory is not given back", reason=str(error))

    # --- owners of blocks

    def take_first(self, tenant: int, programs: Sequence[Process]) -> None:
        """A tenant's programs in the order in which the store gives their copies to others: those of programs that
        have ended before all others."""
        for store in self._stores.get(tenant, ()):
            kept = store.kept()
            known = [(program.pid, program.start_time & STORE_TIME_MASK) for program in programs]
            store.take_first([*(kept.keys() - known), *(name for name in known if name in kept)])

    def release(self, process: Process) -> None:
        """The process has ended, or its program was replaced, and the driver has released it."""
        for store in self._everything():
            store.give_back([(process.pid, process.start_time)])

    def sweep(self, readings: int, shown: Container[int]) -> None:
        """Take blocks of processes whose end no broker has reported, too. ``readings``: of the driver so far.
        ``shown``: pids in the last one."""
        self._close_dropped()
        self._sweeps = {store: self._sweeps.get(store, ReclaimPass()) for store in self._everything()}
        for store, sweep in self._sweeps.items():
            # Of the readings until then the last may have begun before it ended.
            gone = [p for p, before in sweep.ended.items() if readings >= before + 2 and p.pid not in shown]
            if gone:
                store.give_back([(process.pid, process.start_time) for process in gone])
            for process in gone:
                del sweep.ended[process]
            names, sweep.begin = store.owners(sweep.begin, SWEEP_MOST - len(sweep.ended))
            for process in (Process(*name) for name in names):
                if process not in sweep.ended and not is_running(process):
                    sweep.ended[process] = readings


def ahead_reserve_bytes() -> int:
    return max(HOST_AHEAD_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10)


def in_nice_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of low priority, and wait for it. Its error is raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with suppress(OSError):  # a container may forbid it
                os.setpriority(os.PRIO_PROCESS, get_native_id(), AHEAD_NICE)
            work()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="grows-ahead", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _close(dropped: RetiredStore) -> bool:
    if any(is_running(program) for program in dropped.programs):
        return False
    try:
        dropped.store.close()
    except PageError:  # it is growing
        return False
    return True


def host_room_bytes() -> int:
    """How much more memory this process could have: as the host has it, and as its cgroups let it."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    room = next(1024 * int(value.split()[0]) for key, _, value in lines if key == "MemAvailable")
    try:
        name = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
    except OSError:
        return room
    group = _CGROUPS / name.lstrip("/")
    for place in (group, *group.parents):
        if not place.is_relative_to(_CGROUPS):
            break
        try:
            most, has = (place / "memory.max").read_text().strip(), int((place / "memory.current").read_text())
        except (OSError, ValueError):
            continue
        if most != "max":
            room = min(room, max(0, int(most) - has))
    return room
