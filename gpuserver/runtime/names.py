"""The links by which ``VGPU_ID=NAME`` finds a vGPU: ``names/UID/NAME`` in the runtime directory leads to its id.

A user finds their own vGPUs by name; the hook follows the link (``cython_ext/hook/attach/paths.pxd``). ``vgpuctl`` also
finds a name that cannot be linked, so no change of a vGPU fails for it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from vgpu.loggers import get_logger
from vgpu.paths import NodePaths

log = get_logger(__name__)


def link_name(paths: NodePaths, owner_uid: int, name: str | None, vgpu_id: str) -> None:
    """The owner's vGPU ``vgpu_id`` is found by ``name`` from now on."""
    if name is None:
        return
    link = paths.name_link(owner_uid, name)
    try:
        for directory in (link.parent.parent, link.parent):
            directory.mkdir(mode=0o711, exist_ok=True)
        fresh = link.with_name(f".{vgpu_id}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(vgpu_id)
        fresh.replace(link)
    except OSError as error:
        log.warning("the name is not linked", vgpu=vgpu_id, name=name, reason=str(error))


def unlink_name(paths: NodePaths, owner_uid: int, name: str | None, vgpu_id: str) -> None:
    """Unless another vGPU has the name by now."""
    if name is None:
        return
    link = paths.name_link(owner_uid, name)
    with suppress(OSError):
        if link.readlink() == Path(vgpu_id):
            link.unlink()
