"""What a container needs to run its programs in a vGPU: mounts, and nothing else. ``prepare`` makes the files of a
node; all else is pure.

===========================================  ==========================================================================
in the container                             what it is
===========================================  ==========================================================================
``/run/vgpu/here/ID``                        the directory with the broker's socket, read-only
``/run/vgpu/lib/libvgpu_hook.so``            the hook
``/etc/ld.so.preload``                       loads the hook into every program
``/run/vgpu/here/sim``, ``/run/vgpu/lib/…``  simulated node: the files that stand for GPUs, and the stand-in driver
===========================================  ==========================================================================

No variable is set: ``docker exec``, ``env -i`` and a login shell stay inside the vGPU. The hook finds the vGPU by its
directory (cython_ext/hook/attach/mounted.pxd). The path in the preload file and the mount are one constant here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = "/run/vgpu/here"
HOOK: Final = "/run/vgpu/lib/libvgpu_hook.so"
PRELOAD: Final = "/etc/ld.so.preload"
SIMULATED_DRIVER: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
SHARED_MEMORY: Final = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Mount:
    """``source`` on the host is ``target`` in the container."""

    source: str
    target: str
    writable: bool = False

    @property
    def volume(self) -> str:
        """As ``docker run -v`` and ``podman run -v`` take it."""
        return f"{self.source}:{self.target}" + ("" if self.writable else ":ro")


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Where the files of a node are on the host. ``simulated``: the folder of the simulated GPUs; "": real ones."""

    hook: str
    preload: str
    simulated: str = ""
    libraries: str = ""


def edits(vgpu_id: str, directory: str, files: NodeFiles, mps_pipe: str = "") -> list[Mount]:
    """The mounts of a container with this vGPU. ``directory``: of its broker's socket, on the host. ``mps_pipe``: the
    pipe directory of its GPU's MPS daemon; "": temporal mode. The daemon's clients also need its shared memory."""
    mounts = [
        Mount(directory, f"{HERE}/{vgpu_id}"),
        Mount(files.hook, HOOK),
        Mount(files.preload, PRELOAD),
    ]
    if mps_pipe:
        mounts += [Mount(mps_pipe, mps_pipe, writable=True), Mount(SHARED_MEMORY, SHARED_MEMORY, writable=True)]
    if files.simulated:
        mounts.append(Mount(files.simulated, f"{HERE}/sim", writable=True))
        mounts += [Mount(f"{files.libraries}/{name}", _beside_hook(name)) for name in SIMULATED_DRIVER]
    return mounts


def _beside_hook(name: str) -> str:
    return f"{HOOK.rpartition('/')[0]}/{name}"


def preload_text(*, simulated: bool) -> str:
    """The content of the mounted ``/etc/ld.so.preload``. The hook stands before the stand-in driver, whose functions it
    replaces."""
    return "".join(f"{path}\n" for path in (HOOK, *(map(_beside_hook, SIMULATED_DRIVER) if simulated else ())))


def prepare(folder: Path, hook: Path, *, simulated: Path | None, libraries: Path) -> NodeFiles:
    """Copy the hook below ``folder``, where no upgrade replaces it under running containers, and write the preload
    file. The copy's directory carries a digest of its content. Idempotent."""
    content = hook.read_bytes()
    text = preload_text(simulated=simulated is not None)
    directory = folder / hashlib.sha256(content + text.encode()).hexdigest()[:16]
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    copies = {hook.name: content, "ld.so.preload": text.encode()}
    if simulated is not None:
        copies |= {name: (libraries / name).read_bytes() for name in SIMULATED_DRIVER}
    for name, data in copies.items():
        put(directory / name, data, 0o644 if name == "ld.so.preload" else 0o755)
    return NodeFiles(
        str(directory / hook.name),
        str(directory / "ld.so.preload"),
        "" if simulated is None else str(simulated),
        "" if simulated is None else str(directory),
    )


def put(path: Path, data: bytes, mode: int) -> None:
    """Write the file whole or not at all; leave one with this content as it is, since containers may have it."""
    try:
        if path.read_bytes() == data:
            return
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.chmod(mode)
    fresh.replace(path)
