"""Cgroups that are named as the kubelet and its engine name those of a pod's container."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from tests.integration.node import eventually

ROOT = Path("/sys/fs/cgroup")
CONTAINER = "0123456789abcdef" * 4


def hierarchy() -> Path | None:
    """The top of a hierarchy in which cgroups can be made: of version 2, alone or beside version 1, or of version 1."""
    for top in (ROOT / "unified", ROOT, ROOT / "pids", ROOT / "freezer"):
        if (top / "cgroup.procs").exists() and os.access(top, os.W_OK):
            return top
    return None


@contextmanager
def cgroup_of(top: Path, pod: str) -> Iterator[Path]:
    """The cgroup of a container of the pod."""
    above = top / f"vgpu-tests-{uuid4().hex[:8]}"
    below = above / f"pod{pod}" / CONTAINER
    below.mkdir(parents=True)
    try:
        yield below
    finally:
        for folder in (below, below.parent, above):
            eventually(lambda folder=folder: _is_gone(folder), "the processes of the cgroup have ended")


def _is_gone(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError:  # busy
            return False
    return True


def inside(cgroup: Path, words: Sequence[str]) -> list[str]:
    """The argv that runs ``words`` in this cgroup."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs"), *words]
