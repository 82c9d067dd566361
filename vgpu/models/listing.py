"""The models that processes of this user serve now."""

from __future__ import annotations

import socket

from pydantic import ConfigDict, ValidationError

from vgpu.bounds import Bounded
from vgpu.errors import VgpuError
from vgpu.models import places, replica


class ServedModel(Bounded):
    """``replicas``: their pids. ``changed``: tensors that one of them has written to. ``error``: the owner's process
    gave no other answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    vgpu_id: str = ""
    pid: int = 0
    gpu_uuid: str = ""
    total_bytes: int = 0
    tensors: int = 0
    read_only: bool = True
    changed: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    error: str = ""


def served() -> list[ServedModel]:
    """By name. Sockets of owners that have ended are left out."""
    found = []
    for path in sorted(places.folder().glob("*.sock")):
        try:
            with replica.connected(path.stem, 0) as link:
                found.append(_reading(path.stem, link))
        except VgpuError as error:
            if path.exists() and _listens(path.stem):
                found.append(ServedModel(name=path.stem, error=error.message))
    return found


def _listens(name: str) -> bool:
    try:
        replica.connected(name, 0).close()
    except VgpuError:
        return False
    return True


def _reading(name: str, link: socket.socket) -> ServedModel:
    message, _ = replica.asked(link, {"op": "status"})
    try:
        return ServedModel.model_validate(message | {"name": name})
    except ValidationError:
        return ServedModel(name=name, error="its owner is of another release")
