"""Host memory for what is away from the card: a store for each user of swapped vGPUs, made and first touched here.

So the server's own cgroup pays for it, and one limit holds for all of it. Not one for all users: a store is mapped
whole by every process that uses it. What it has got it keeps until the last such vGPU of its user is removed, since it
is pinned by then, which takes longer than any copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import psutil
import structlog
import trio

from cython_ext.page import PageError
from cython_ext.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, StorePage
from vgpu.identity import Process

log = structlog.get_logger(__name__)

GROW_BYTES: Final = 256 << 20
"""As much at a time: who waits for it goes on meanwhile."""
TOUCHING_THREADS: Final = max(1, min(8, (os.cpu_count() or 1) // 4))
"""One clears 3.5 GB a second, the card delivers 50."""
HOST_LEAST_BYTES: Final = 1 << 30
"""So much of the host's memory is left to others."""
USED_UP: Final = "the host memory for what is away is used up: vgpuctl serve --host-memory gives more"
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Stores:
    """``limit_bytes``: the most that all of them may have."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._stores: dict[int, list[StorePage]] = {}
        """By uid, the one that is handed out last; others were handed out by servers before this one."""
        self._dropped: list[StorePage] = []
        self._growing = trio.Lock()

    def of(self, uid: int) -> StorePage:
        """The store of a user, from now on."""
        if uid not in self._stores:
            self._stores[uid] = [StorePage.create(max(1, self.limit_bytes // STORE_BLOCK_BYTES))]
        return self._stores[uid][-1]

    def take(self, uid: int, descriptor: int) -> None:
        """One that a broker kept over a server's end. ``PageError`` if it is none."""
        known = self._stores.setdefault(uid, [])
        if not any(os.path.sameopenfile(descriptor, store.fileno()) for store in known):
            known.insert(0, StorePage.map(descriptor))

    def drop(self, uid: int) -> None:
        """The user has no swapped vGPU any more. Processes keep their own mappings until they end."""
        self._dropped += self._stores.pop(uid, ())
        self._close_dropped()

    def _close_dropped(self) -> None:
        still_growing = []
        for store in self._dropped:
            try:
                store.close()
            except PageError:
                still_growing.append(store)
        self._dropped = still_growing

    # --- how much there is

    @property
    def ready_bytes(self) -> int:
        """Of all together."""
        return sum(store.ready * STORE_BLOCK_BYTES for store in self._everything())

    @property
    def used_bytes(self) -> int:
        return sum(sum(store.owners().values()) * STORE_BLOCK_BYTES for store in self._everything())

    def _everything(self) -> Iterable[StorePage]:
        return (store for stores in self._stores.values() for store in stores)

    def lacks(self, uid: int, bytes_: int) -> str:
        """Why a user's store could not have so much, whatever the host has; empty: it could."""
        others = self.ready_bytes - sum(store.ready * STORE_BLOCK_BYTES for store in self._stores.get(uid, ()))
        return USED_UP if bytes_ > self.limit_bytes - others else ""

    async def have(self, uid: int, bytes_: int) -> str:
        """See to it that a user's store has got so much. Empty, or why it has not."""
        store = self.of(uid)
        async with self._growing:
            while store.ready * STORE_BLOCK_BYTES < bytes_:
                if store.closed:
                    return "it is not needed any more"
                blocks = min(GROW_BYTES, self.limit_bytes - self.ready_bytes) // STORE_BLOCK_BYTES
                blocks -= blocks % STORE_SEGMENT_BLOCKS
                if store.ready == store.blocks or blocks <= 0:
                    return USED_UP
                if host_room_bytes() < HOST_LEAST_BYTES + GROW_BYTES:
                    return "the host has no memory left for what is away"
                try:
                    await trio.to_thread.run_sync(store.grow, blocks, TOUCHING_THREADS)
                except (MemoryError, PageError) as error:
                    return str(error)
        return ""

    # --- who has it

    def release(self, process: Process) -> None:
        """It has ended."""
        for store in self._everything():
            store.give_back(process.pid, process.start_time)

    def sweep(self, is_running: Callable[[Process], bool]) -> None:
        """Also of those whose end nobody has told."""
        self._close_dropped()
        for store in self._everything():
            for pid, start_time in store.owners():
                if not is_running(Process(pid, start_time)):
                    store.give_back(pid, start_time)


def host_room_bytes() -> int:
    """How much more memory this process could have: as the host has it, and as its cgroups let it."""
    room = int(psutil.virtual_memory().available)
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
