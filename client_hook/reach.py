"""Whether other users can run this installation: its interpreter, its code, and the hook that lies beside that."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from client_hook import interpreter

ELSEWHERE: Final = "/usr/bin/python3 -m venv /opt/vgpu, then /opt/vgpu/bin/pip install the wheel"


def closed_directories(path: Path) -> list[Path]:
    """The directories above ``path``, and it itself if it is one, that only their owner and group can pass through."""
    return [part for part in (path, *path.parents) if part.is_dir() and not part.stat().st_mode & stat.S_IXOTH]


def closed_to_others(files: Iterable[Path] | None = None) -> Path | None:
    """The first directory that keeps other users from running this installation (``files``), None if all can run it. An
    interpreter may be a link into a home."""
    for file in files or map(Path, interpreter.files()):
        for one in (file, file.resolve()):
            if closed := closed_directories(one):
                return closed[0]
    return None
