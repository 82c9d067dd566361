"""vGPUs as devices for container engines: one file each, by the Container Device Interface (SPEC.md of
cncf-tags/container-device-interface).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from vgpu.integrations.container import Mount, put

KIND: Final = "vgpu.dev/vgpu"
VERSION: Final = "0.5.0"
"""The oldest version of the format that has all that is used here."""


def _edit(mount: Mount) -> dict[str, Any]:
    options = ["rw" if mount.writable else "ro", "nosuid", "nodev", "bind"]
    return {"hostPath": mount.source, "containerPath": mount.target, "options": options}


def file_of(folder: Path, vgpu_id: str) -> Path:
    return folder / f"vgpu.dev-vgpu_{vgpu_id}.json"


def spec_of(vgpu_id: str, name: str | None, mounts: Iterable[Mount]) -> Mapping[str, Any]:
    """The device of one vGPU, by its id and, where it has one, by its name."""
    container_edits = {"mounts": [_edit(mount) for mount in mounts]}
    names = [vgpu_id] if name is None else [vgpu_id, name]
    devices = [{"name": each, "containerEdits": container_edits} for each in names]
    return {"cdiVersion": VERSION, "kind": KIND, "devices": devices}


def write(folder: Path, vgpu_id: str, name: str | None, mounts: Iterable[Mount]) -> None:
    """Write the vGPU's device, whole or not at all. An engine refuses a name that two devices have, and two users may
    give the same: the first device keeps it, and the other has its id alone. ``OSError``."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    file = file_of(folder, vgpu_id)
    free = None if name is None or any(name in _names(one) for one in _files(folder) if one != file) else name
    text = json.dumps(spec_of(vgpu_id, free, mounts), indent=2) + "\n"
    put(file, text.encode(), 0o644)


def _files(folder: Path) -> Iterable[Path]:
    return folder.glob("vgpu.dev-vgpu_*.json")


def _names(file: Path) -> list[str]:
    """The names of a file's devices; none of a file that cannot be read."""
    try:
        return [str(device["name"]) for device in json.loads(file.read_bytes())["devices"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def remove(folder: Path, vgpu_id: str) -> None:
    file_of(folder, vgpu_id).unlink(missing_ok=True)


def sweep(folder: Path) -> list[str]:
    """Remove the devices whose vGPU's directory is gone, as after a node that was killed and its vGPUs lost. Else an
    engine would refuse the name of each of them for a new vGPU. Returns the names of the removed files. A file that is
    not ours is left alone."""
    removed = []
    for file in _files(folder):
        try:
            first = json.loads(file.read_bytes())["devices"][0]["containerEdits"]["mounts"][0]["hostPath"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if not Path(first).exists():
            file.unlink(missing_ok=True)
            removed.append(file.name)
    return removed
