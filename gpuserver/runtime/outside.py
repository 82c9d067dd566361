"""Processes on the GPU that are in none of its vGPUs, and books that say more than the driver does.

Preloading is cooperative: a program that was started without the hook, or took it out, is limited by nothing here. But
the driver shows it, so it is seen, named and counted (docs/architecture.md, "What no gate sees").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cython_ext.readings import SlotReading
from vgpu.identity import Process
from vgpu.protocol.peer import start_time
from vgpu.units import format_bytes

MPS_SERVER: Final = "nvidia-cuda-mps"
"""The kernel keeps fifteen characters of a program's name."""
MANAGED: Final = 1
"""Its index among the kinds of memory (cython_ext/layout.pxd)."""
DRIFT_BYTES: Final = 64 << 20
"""The driver's figure lags behind an allocation, and rounds; beyond that the books are wrong, or lie."""


@dataclass(frozen=True, slots=True)
class Outsider:
    """``uid`` −1, ``command`` "": this server cannot see. ``vgpu_id``: what its VGPU_ID says, if anything."""

    process: Process
    uid: int
    command: str
    vgpu_id: str
    memory_bytes: int


def outsiders(by_pid: Mapping[int, int], inside: Iterable[int]) -> tuple[Outsider, ...]:
    """Of the processes that the driver shows (pid → bytes) those whose pid is not ``inside`` any vGPU."""
    known = set(inside)
    found = (describe(pid, amount) for pid, amount in sorted(by_pid.items()) if pid not in known)
    return tuple(outsider for outsider in found if not outsider.command.startswith(MPS_SERVER))


def describe(pid: int, memory_bytes: int) -> Outsider:
    """What /proc tells of it. Of another PID namespace it tells nothing."""
    directory = Path(f"/proc/{pid}")
    began, uid = 0, -1
    command = vgpu_id = ""
    with suppress(ProcessLookupError, OSError):
        began = start_time(pid)
        uid = directory.stat().st_uid
        words = directory.joinpath("cmdline").read_bytes().split(b"\0")[:2]  # arguments may be nobody else's business
        command = b" ".join(words).decode(errors="replace").strip() or directory.joinpath("comm").read_text().strip()
    with suppress(OSError):
        for setting in directory.joinpath("environ").read_bytes().split(b"\0"):
            name, _, value = setting.partition(b"=")
            vgpu_id = value.decode(errors="replace") if name == b"VGPU_ID" else vgpu_id
    return Outsider(Process(pid, began), uid, printable(command), printable(vgpu_id), memory_bytes)


def sentence(outsider: Outsider) -> str:
    """For people."""
    who = f"process {outsider.process.pid}"
    if outsider.command:
        who += f" ({outsider.command}, uid {outsider.uid})"
    text = f"{who} uses {format_bytes(outsider.memory_bytes)} of this GPU in no vGPU"
    if outsider.vgpu_id:
        text += f": its VGPU_ID is {outsider.vgpu_id}, but it was started without the hook"
    return text


def printable(text: str, most: int = 200) -> str:
    """A stranger's words, as one line that no terminal takes for commands."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def drift_by_pid(
    before: Iterable[SlotReading], after: Iterable[SlotReading], by_pid: Mapping[int, int]
) -> dict[int, int]:
    """How much more a process's ledger says than the driver does, pid → bytes, where that is much.

    ``before``, ``after``: the ledgers around the driver's reading; what moved meanwhile is no drift. A process that the
    driver does not show, or shows without a figure (0), has nothing to compare with. Nor has managed memory, which the
    driver keeps where it likes.
    """
    earlier, later = committed_by_pid(before, managed=False), committed_by_pid(after, managed=False)
    shown = {pid: amount for pid, amount in by_pid.items() if amount}
    least = {pid: min(earlier[pid], later[pid]) for pid in earlier.keys() & later.keys() & shown.keys()}
    return {pid: own - shown[pid] for pid, own in least.items() if own - shown[pid] > DRIFT_BYTES}


def committed_by_pid(slots: Iterable[SlotReading], *, managed: bool = True) -> dict[int, int]:
    """What the ledger says that each process owns. A pid with two slots (exec) is counted once."""
    found: dict[int, int] = {}
    for slot in slots:
        owned = sum(slot.committed_bytes) - (0 if managed else slot.committed_bytes[MANAGED])
        found[slot.pid] = found.get(slot.pid, 0) + owned
    return found
