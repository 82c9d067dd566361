"""Where the owners of a user's models listen: a folder in which no other user can write."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.models.table import check_name
from vgpu.paths import default_runtime_dir

FOLDER: Final = "VGPU_MODELS_DIR"
_PRIVATE: Final = 0o700


def folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``VGPU_MODELS_DIR``, or ``vgpu/models`` in the user's runtime directory. It need not exist."""
    return Path(environment.get(FOLDER) or f"{default_runtime_dir(environment, root=False)}/models").absolute()


def private_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The same, made if it is missing. ``VgpuError`` if another user can change what is in it."""
    path = folder(environment)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
        found = path.lstat()
    except OSError as error:
        reason = error.strerror or str(error)
        raise VgpuError(
            ErrorCode.UNAVAILABLE, f"{path} cannot be used: {reason}", f"set {FOLDER} to a directory of your own"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise VgpuError(
            ErrorCode.NOT_YOURS, f"{path} is another user's, or open to others", f"set {FOLDER} to a private directory"
        )
    return path


def socket_of(place: Path, name: str) -> Path:
    return place / f"{check_name(name)}.sock"


def lock_of(place: Path, name: str) -> Path:
    """Its owner holds it from before the loading until its end, and writes its pid into it."""
    return place / f"{check_name(name)}.lock"
