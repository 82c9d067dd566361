"""``python -I bootstrap.py MODULE ARGUMENT…``: runs a module of this very copy of st-vgpu in an isolated interpreter.

An isolated interpreter searches no user site. If ``pip install --user`` has put st-vgpu there, its directory is added,
before the system's packages as Python does. Root runs nothing from a directory that another user can write to.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import site
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).absolute().parent
PACKAGES = frozenset({"gpuserver", "vgpu", "client_hook", "cython_ext"})


def main() -> None:
    if not is_found():
        root = HERE.parent
        if os.geteuid() == 0 and (foreign := next(foreign_parts(root), None)) is not None:
            sys.exit(
                f"vgpuctl: root does not run st-vgpu from {root}: another user can write to {foreign}\n"
                "  → python3 -m venv /opt/vgpu && /opt/vgpu/bin/pip install st-vgpu"
            )
        add(root)
    _, module, *arguments = sys.argv
    sys.argv = [sys.argv[0], *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise
        sys.exit(
            f"vgpuctl: {error}; st-vgpu at {HERE.parent} imports nothing from PYTHONPATH\n"
            "  → install st-vgpu with its dependencies: python3 -m venv vgpu && vgpu/bin/pip install st-vgpu"
        )


def is_found() -> bool:
    """Whether an import would find this copy, and not another."""
    spec = importlib.util.find_spec("client_hook")
    return spec is not None and spec.origin is not None and Path(spec.origin).parent.samefile(HERE)


def add(directory: Path) -> None:
    """``directory`` becomes a site directory, before those that there are."""
    before = list(sys.path)
    site.addsitedir(str(directory))
    added = [entry for entry in sys.path if entry not in before]
    at = next((i for i, entry in enumerate(before) if Path(entry).name in {"site-packages", "dist-packages"}), None)
    at = len(before) if at is None else at
    sys.path[:] = [*before[:at], *added, *before[at:]]


def foreign_parts(directory: Path) -> Iterator[Path]:
    """Those of ``directory`` and the directories above it that a user other than root can write to."""
    real = directory.resolve()
    for part in dict.fromkeys((directory, *directory.parents, real, *real.parents)):
        found = part.stat()
        others = stat.S_IMODE(found.st_mode) & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid != 0 or others:
            yield part


if __name__ == "__main__":
    main()
