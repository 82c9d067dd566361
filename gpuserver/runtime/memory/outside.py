"""Processes on the GPU that are in none of its vGPUs, and books that say more than the driver does.

Preloading is cooperative: a program that was started without the hook, or took it out, is limited by nothing here. But
the driver shows it, so it is seen, named and counted (docs/internals/gated.md, "What no gate sees").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cython_ext.readings import MANAGED, SlotReading
from gpuserver.runtime.vgpus import away_of, bounded
from vgpu.identity import Process
from vgpu.integrations import cgroups
from vgpu.integrations.cgroups import NOWHERE, Place
from vgpu.printable import command_name
from vgpu.protocol.peer import start_time
from vgpu.units import format_bytes

DRIFT_BYTES: Final = 64 << 20
"""The driver's figure lags behind an allocation, and rounds; beyond that the books are wrong, or lie."""


UNHOOKED_BYTES: Final = 2 << 30
"""Four contexts take as much. A hooked program with more implicit memory uses the driver past the hook, or has set a
large stack."""


@dataclass(frozen=True, slots=True)
class UnmanagedProcess:
    """``uid`` −1, ``command`` "": of another PID namespace, or gone. ``command``: the name that the kernel has for it;
    arguments and environment are its own business, and to read them may mean to wait for its memory. ``place``: its
    container and pod."""

    process: Process
    uid: int
    command: str
    memory_bytes: int
    place: Place = NOWHERE


def outsiders(by_pid: Mapping[int, int], inside: Iterable[int], mps_pid: int | None) -> tuple[UnmanagedProcess, ...]:
    """Of the processes that the driver shows (pid → bytes) those whose pid is not ``inside`` any vGPU. The server of
    our own MPS daemon is none: a child of ``mps_pid``."""
    known = set(inside)
    found = (pid for pid in sorted(by_pid) if pid not in known)
    return tuple(describe(pid, by_pid[pid]) for pid in found if mps_pid is None or parent_of(pid) != mps_pid)


def describe(pid: int, memory_bytes: int) -> UnmanagedProcess:
    """What /proc shows of the process without reading its memory."""
    began, uid, command = 0, -1, ""
    with suppress(ProcessLookupError, OSError):
        began = start_time(pid)
        uid = Path(f"/proc/{pid}").stat().st_uid
        command = command_name(Path(f"/proc/{pid}/comm").read_text(errors="replace").strip())
    return UnmanagedProcess(Process(pid, began), uid, command, memory_bytes, cgroups.of_process(pid))


def parent_of(pid: int) -> int:
    """0: not known."""
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def named(outsider: UnmanagedProcess) -> str:
    """``process 12 (python, uid 0, container 0123456789ab of pod UID)``, as far as that is known."""
    facts = [outsider.command, f"uid {outsider.uid}"] if outsider.command else []
    facts += [str(outsider.place)] if str(outsider.place) else []
    return f"process {outsider.process.pid}" + (f" ({', '.join(facts)})" if facts else "")


def sentence(outsider: UnmanagedProcess) -> str:
    """For people."""
    return (
        f"{named(outsider)} uses {format_bytes(outsider.memory_bytes)} of this GPU in no vGPU: nothing here limits it"
    )


def unhooked_by_pid(implicit: Mapping[int, int], used_bytes: int, limit_bytes: int) -> dict[int, int]:
    """Of the processes in a vGPU (pid → implicit memory) those that hold far more than contexts take, pid → bytes.
    None where the vGPU uses no more than its limit."""
    if used_bytes <= limit_bytes:
        return {}
    return {pid: amount for pid, amount in implicit.items() if amount > UNHOOKED_BYTES}


def unhooked_sentence(pid: int, amount: int, used_bytes: int, limit_bytes: int) -> str:
    """For people."""
    return (
        f"process {pid} holds {format_bytes(amount)} that its hook did not allocate, and the vGPU uses "
        f"{format_bytes(used_bytes)} of {format_bytes(limit_bytes)}: a library in it uses the driver past the hook, or "
        "its stack is large (cudaLimitStackSize)"
    )


def drift_by_pid(
    before: Iterable[SlotReading], after: Iterable[SlotReading], by_pid: Mapping[int, int]
) -> dict[int, int]:
    """How much more a process's ledger says than the driver does, pid → bytes, where that is much.

    ``before``, ``after``: the ledgers around the driver's reading. A process that the driver does not show, or shows
    without a figure (0), has nothing to compare with. Nor has managed memory, which the driver keeps where it likes.
    """
    earlier, later = committed_by_pid(before, managed=False), committed_by_pid(after, managed=False)
    shown = {pid: amount for pid, amount in by_pid.items() if amount}
    least = {pid: min(earlier[pid], later[pid]) for pid in earlier.keys() & later.keys() & shown.keys()}
    return {pid: own - shown[pid] for pid, own in least.items() if own - shown[pid] > DRIFT_BYTES}


def committed_by_pid(slots: Iterable[SlotReading], *, managed: bool = True) -> dict[int, int]:
    """What the ledger says that each process has on the card. A pid with two slots (exec) is counted once."""
    found: dict[int, int] = {}
    for slot in slots:
        owned = sum(slot.committed_bytes) - (0 if managed else slot.committed_bytes[MANAGED])
        owned -= away_of(slot)  # swapped: not on the card
        found[slot.pid] = bounded(found.get(slot.pid, 0) + owned)
    return found
