"""Which TCP ports the processes of a vGPU listen on, and which connections they have, by /proc.

The processes of a vGPU are those that its broker has admitted, and those that name it in VGPU_ID and that the broker
would admit: a model server often listens in one process and computes in another. What a process says there makes only
its own ports the vGPU's. Containers have network namespaces of their own, so each table is read through a process that
is in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpuserver.core.admission.registry import Owner
from gpuserver.core.observe.sockets import Socket, accepted, connections, listening, parse
from gpuserver.core.states.standby import marks
from gpuserver.runtime.memory.unmanaged import named_in
from vgpu.errors import ErrorCode, VgpuError
from vgpu.identity import Process
from vgpu.paths import NodePaths
from vgpu.protocol.peer import is_alive
from vgpu.protocol.triggers import CALL, TCP

MOST_LISTED: Final = 12
_SOCKET: Final = "socket:["


@dataclass(frozen=True, slots=True)
class SocketOwners:
    """The processes of a vGPU, and their sockets."""

    spaces: Mapping[int, int] = field(default_factory=dict)
    """Network namespace → a process in it."""
    holders: Mapping[int, int] = field(default_factory=dict)
    """Inode of a socket → a process that has it."""
    hidden: bool = False
    """The server may not see the sockets of a program."""

    @property
    def inodes(self) -> frozenset[int]:
        return frozenset(self.holders)


Tables = Mapping[int, list[Socket]]
"""The sockets of network namespaces."""


def survey(vgpu_id: str, programs: Iterable[Process], paths: NodePaths, owner: Owner) -> SocketOwners:
    """``owner``: of the vGPU. Reads other processes' memory, so it may wait: not for an event loop."""
    spaces: dict[int, int] = {}
    holders: dict[int, int] = {}
    hidden = False
    inside = [one.pid for one in programs if is_alive(one)]
    for pid in [*inside, *_named(vgpu_id, inside, paths, owner)]:
        try:
            space = space_of(pid)
            inodes = sockets_of(pid)
        except PermissionError:
            hidden = hidden or pid in inside
            continue
        except OSError:  # it has ended
            continue
        spaces.setdefault(space, pid)
        for inode in inodes:
            holders.setdefault(inode, pid)
    return SocketOwners(spaces, holders, hidden)


def _named(vgpu_id: str, inside: Iterable[int], paths: NodePaths, owner: Owner) -> list[int]:
    """The other processes that name the vGPU, and may attach to it."""
    besides = {*inside, os.getpid()}
    every = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [
        pid for pid in every if pid not in besides and may_attach(pid, owner) and named_in(pid, paths, {}) == vgpu_id
    ]


def may_attach(pid: int, owner: Owner) -> bool:
    """By the rule of the vGPU's broker (``vgpu.broker.core.may_attach``), without a mount. Unlike the environment, what
    is read here waits for no lock of the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:  # it has ended
        return False
    if _ids(status, b"Uid")[1] in {0, owner.uid}:
        return True
    return owner.share_gid in {_ids(status, b"Gid")[1], *_ids(status, b"Groups")}


def _ids(status: bytes, name: bytes) -> list[int]:
    """A line of ``/proc/PID/status``; of users and groups, the second id is the effective one."""
    return [int(number) for number in status.partition(b"\n" + name + b":")[2].partition(b"\n")[0].split()]


def space_of(pid: int) -> int:
    """The network namespace of a process. ``OSError``."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def sockets_of(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open. ``OSError``."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(path.readlink())
            if target.startswith(_SOCKET):
                found.add(int(target[len(_SOCKET) : -1]))
    return found


def read_tables(spaces: Mapping[int, int], ports: Iterable[int] | None = None) -> Tables:
    """``spaces``: namespace → a process in it. One whose process has ended is left out. ``ports``: the sockets with one
    of these; None: all."""
    wanted = None if ports is None else frozenset(ports)
    found = {}
    for space, pid in spaces.items():
        with suppress(OSError):
            sockets = parse(Path(f"/proc/{pid}/net/tcp").read_text(errors="replace"), wanted)
            with suppress(FileNotFoundError):  # a kernel without IPv6
                sockets += parse(Path(f"/proc/{pid}/net/tcp6").read_text(errors="replace"), wanted)
            if space_of(pid) == space:
                found[space] = sockets
    return found


def count_accepted(pid: int) -> int | None:
    """How many connections the network namespace of a process has accepted: a hundredth of the cost of its tables.
    None: it is not known. ``OSError``: the process has ended."""
    return accepted(Path(f"/proc/{pid}/net/snmp").read_text(errors="replace"))


def unheard(seen: SocketOwners, tables: Tables, ports: Iterable[int]) -> tuple[int, ...]:
    """The ports on which no process of the vGPU listens."""
    heard = {port for sockets in tables.values() for port in listening(sockets, seen.inodes)}
    return tuple(port for port in ports if port not in heard)


def known_marks(tables: Tables, ports: Iterable[int]) -> tuple[int, ...]:
    """The connections to these ports that are there now."""
    wanted = tuple(ports)
    return marks(one.mark for sockets in tables.values() for one in connections(sockets, wanted))


def check_heard(vgpu_id: str, seen: SocketOwners, tables: Tables, ports: Iterable[int]) -> None:
    """``VgpuError`` (invalid): no process of the vGPU listens on one of ``ports``."""
    missing = unheard(seen, tables, ports)
    if not missing:
        return
    own = [listening(sockets, seen.inodes) for sockets in tables.values()]
    found = {port: seen.holders[inode] for one in own for port, inode in one.items()}
    text = f"no process of {vgpu_id} listens on port {missing[0]}"
    if seen.hidden:
        text += f", as far as the node (uid {os.geteuid()}) may see: it cannot read the sockets of all its programs"
        raise VgpuError(ErrorCode.INVALID, text, "run the node as root, or as the user of the programs")
    if not found:
        hint = f"start the server in the vGPU first, or: vgpuctl suspend {vgpu_id} --resume-on {CALL}"
        raise VgpuError(ErrorCode.INVALID, f"{text}, nor on another TCP port", hint)
    listed = [f"{port} (process {pid})" for port, pid in sorted(found.items())[:MOST_LISTED]]
    more = ", …" if len(found) > MOST_LISTED else ""
    raise VgpuError(
        ErrorCode.INVALID,
        f"{text}: its processes listen on {', '.join(listed)}{more}",
        f"vgpuctl suspend {vgpu_id} --resume-on {TCP}{min(found)}",
    )
