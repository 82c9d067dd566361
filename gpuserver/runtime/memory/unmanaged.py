"""Which vGPU a process belongs to that no vGPU has admitted, by /proc; and stopping or ending it.

What /proc says of an environment is the program's own word. A program that lies there ties only itself to a
vGPU. A signal goes through a pidfd whose owner was read again after it was opened.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

from gpuserver.core.observe.unmanaged import Respond, Response, Sighting, Unmanaged
from gpuserver.runtime.memory.outside import UnmanagedProcess, parent_of
from gpuserver.runtime.state import GpuState
from vgpu.event_types import EventType
from vgpu.identity import Process
from vgpu.integrations import cgroups
from vgpu.paths import VGPU_ID, NodePaths
from vgpu.protocol.peer import start_time
from vgpu.spec import NAME
from vgpu.units import format_bytes

JUDGE_S: Final = 1.0
"""At least so long between two readings of ``/proc``."""
MOST_PARENTS: Final = 32
MOST_ENVIRONMENT_BYTES: Final = 1 << 20
_SIGNALS: Final = {Response.SUSPEND: signal.SIGSTOP, Response.KILL: signal.SIGKILL}
_DONE: Final = {Response.REPORT: "nothing here limits it", Response.SUSPEND: "stopped", Response.KILL: "killed"}


class UnmanagedWatch:
    """``judge`` finds the programs of vGPUs that use the GPU past the hook, and acts on them."""

    def __init__(self, state: GpuState) -> None:
        self._state = state
        self._unmanaged = Unmanaged(state.settings.unmanaged)
        self._judged_at = float("-inf")

    async def judge(self, outside: Sequence[UnmanagedProcess], inside: Mapping[int, str]) -> None:
        """``outside``: the processes that no vGPU has admitted; ``inside``: pid → vGPU of the others. A thread reads
        /proc, because a process that holds its memory's lock makes its readers wait."""
        if trio.current_time() - self._judged_at < JUDGE_S:
            return
        self._judged_at = trio.current_time()
        paths = self._state.settings.paths
        seen = await trio.to_thread.run_sync(sightings, outside, inside, paths, self._sole_users())
        for command in self._unmanaged.see(seen, time.monotonic_ns()):
            text = await trio.to_thread.run_sync(respond, command)
            vgpu = self._state.vgpus.get(command.sighting.vgpu_id)
            self._state.record_event(EventType.UNMANAGED, vgpu, text, pid=command.sighting.process.pid)

    def _sole_users(self) -> dict[str, int]:
        """vGPU → owner, of the vGPUs that are shared with no group."""
        records = [vgpu.record for vgpu in self._state.vgpus.values()]
        return {record.vgpu_id: record.owner.uid for record in records if record.owner.share_gid < 0}


def sightings(
    outside: Iterable[UnmanagedProcess], inside: Mapping[int, str], paths: NodePaths, owners: Mapping[str, int]
) -> list[Sighting]:
    """``inside``: pid → vGPU of each process that a vGPU has admitted; ``owners``: vGPU → its sole user.
    Reads other processes' memory, so it may wait: not for an event loop."""
    outside = tuple(outside)
    by_container = vgpus_of_containers(inside) if any(one.place.containers for one in outside) else {}
    return [
        Sighting(
            one.process,
            one.uid,
            one.command,
            one.memory_bytes,
            by_container.get(one.place.containers[-1:]) or vgpu_of(one.process.pid, inside, paths, owners),
            str(one.place),
        )
        for one in outside
    ]


def vgpus_of_containers(inside: Mapping[int, str]) -> dict[tuple[str, ...], str]:
    """The innermost container → the vGPU of its processes, where that is one. Which container a process is in is the
    kernel's word, unlike its environment."""
    found: dict[tuple[str, ...], set[str]] = {}
    for pid, vgpu_id in inside.items():
        if container := cgroups.of_process(pid).containers[-1:]:
            found.setdefault(container, set()).add(vgpu_id)
    return {container: vgpu_id for container, (vgpu_id, *others) in found.items() if not others}


def vgpu_of(pid: int, inside: Mapping[int, str], paths: NodePaths, owners: Mapping[str, int]) -> str:
    """By its own environment, else by the nearest of its parents that is in a vGPU or says so; "": none."""
    for _ in range(MOST_PARENTS):
        if pid <= 1:
            return ""
        if found := inside.get(pid) or named_in(pid, paths, owners):
            return found
        pid = parent_of(pid)
    return ""


def named_in(pid: int, paths: NodePaths, owners: Mapping[str, int]) -> str:
    """The first vGPU of this node that VGPU_ID names there, by its id or by its owner's name for it. Not one that the
    process may not use: it would write into another user's history."""
    with suppress(OSError):
        uid = Path(f"/proc/{pid}").stat().st_uid
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            entries = file.read(MOST_ENVIRONMENT_BYTES).split(b"\0")
        for entry in entries:
            name, _, value = entry.partition(b"=")
            if name != b"VGPU_ID":
                continue
            for given in value.decode(errors="replace").split(","):
                vgpu_id = given if VGPU_ID.fullmatch(given) else id_of(given, uid, paths)
                if vgpu_id and uid in {0, owners.get(vgpu_id, uid)} and paths.vgpu_dir(vgpu_id).is_dir():
                    return vgpu_id
    return ""


def id_of(name: str, uid: int, paths: NodePaths) -> str:
    """Of the vGPU to which that user gave that name; "": there is none."""
    if not NAME.fullmatch(name):
        return ""
    with suppress(OSError):
        target = str(paths.name_link(uid, name).readlink())
        return target if VGPU_ID.fullmatch(target) else ""
    return ""


def respond(command: Respond) -> str:
    """Do it; what to say of it."""
    seen = command.sighting
    what = _DONE[command.response]
    if command.response is not Response.REPORT:
        reason = send_signal(seen.process, seen.uid, _SIGNALS[command.response])
        what = f"not {what}: {reason}" if reason else what
    used = format_bytes(seen.memory_bytes)
    facts = [seen.command, f"uid {seen.uid}", *([seen.place] if seen.place else [])]
    named = f"process {seen.process.pid} ({', '.join(facts)}) of {seen.vgpu_id}"
    return f"{named} uses {used} of this GPU past the hook: {what}"


def send_signal(process: Process, uid: int, number: signal.Signals) -> str:
    """To this very process, if it is still that user's; "" or why not."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    try:
        if start_time(process.pid) != process.start_time or Path(f"/proc/{process.pid}").stat().st_uid != uid:
            return "another process has its pid"
        signal.pidfd_send_signal(pidfd, number)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        os.close(pidfd)
    return ""
