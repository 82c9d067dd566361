"""Memory that one process exported and others imported (cuMemExportToShareableHandle): its owner is charged with it.

The driver may show it for the importers as well. And it stays on the card after its owner's death, until the last
importer has let it go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cython_ext.readings import SHARED, SlotReading, SlotState
from gpuserver.runtime.memory.outside import committed_by_pid
from vgpu.identity import Process


@dataclass(frozen=True, slots=True)
class Left:
    """What a removed vGPU had shared, and ``holders`` have imported: on the card, and no vGPU is charged with it."""

    uid: int
    bytes_: int
    holders: frozenset[Process]


def shared_bytes(slots: Iterable[SlotReading]) -> int:
    """What their vGPU is charged with for memory that other processes may have, too."""
    return sum(slot.committed_bytes[SHARED] for slot in slots)


def only_shared(slot: SlotReading) -> bool:
    """Nothing else is charged."""
    return slot.charged_bytes == slot.committed_bytes[SHARED]


def importers(slots: Iterable[SlotReading]) -> frozenset[Process]:
    """The living processes that hold memory of others."""
    living = (slot for slot in slots if slot.state is not SlotState.DEAD and slot.imported_bytes)
    return frozenset(Process(slot.pid, slot.start_time) for slot in living)


def without_imports(
    by_pid: Mapping[int, int], slots: Iterable[SlotReading], shared: int, context_bytes: int
) -> dict[int, int]:
    """The driver's figures without what others are charged with.

    ``slots``: of all vGPUs of one user. ``shared``: what these are charged with as shared. An importer's claim counts
    no further than that. ``context_bytes``: what a context takes at least. Whether the driver shows imported memory
    depends on how many processes have it. It does where the figure has room for it beside a context.
    """
    slots = tuple(slots)
    owned = committed_by_pid(slots)
    found = dict(by_pid)
    for slot in slots:
        claimed = min(slot.imported_bytes, shared)
        if claimed and found.get(slot.pid, 0) - owned[slot.pid] >= claimed + context_bytes:
            found[slot.pid] -= claimed
    return found
