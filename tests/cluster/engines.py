"""Container engines with everything below a folder of their own, and a root file system without any image."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cython_ext import __file__ as extension
from tests.cluster import roots

REQUIRED: Final = bool(os.environ.get("REQUIRE_ENGINES"))
"""Releases: an engine that is missing is a failure."""
_CONFIG: Final = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
netns = "none"
"""
_PROGRAMS: Final = ("sh", "env", "sleep")
_LIBRARIES: Final = Path(extension).parent / "lib"


def make_root(folder: Path, probe: Path) -> Path:
    """A root with a shell, the probe, and the libraries that they and the hook need."""
    root = folder / "rootfs"
    for name in ("bin", "etc", "proc", "dev", "sys", "tmp", "run"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    programs = [Path(found) for name in _PROGRAMS if (found := shutil.which(name))]
    for program in (*programs, probe):
        shutil.copy(program, root / ("bin" if program in programs else "") / program.name)
    hooked = (_LIBRARIES / "libvgpu_hook.so", *(_LIBRARIES / "sim").glob("*.so.1"))
    for library in _libraries((*programs, probe, *hooked)):
        target = root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    return root


def _libraries(files: Iterable[Path]) -> set[Path]:
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=True).stdout
    return {Path(path) for path in re.findall(r"(?:=> |^\t)(/\S+)", listed, re.MULTILINE)}


def podman(folder: Path) -> Path:
    """A podman that keeps to ``folder``, under its own name."""
    config, command = folder / "containers.conf", folder / "podman"
    config.write_text(_CONFIG)
    words = ["podman", "--root", folder / "store", "--runroot", folder / "run", "--tmpdir", folder / "tmp"]
    words[0] = shutil.which("podman") or ""
    line = shlex.join(map(str, [*words, "--runtime", "runc", "--cgroup-manager", "cgroupfs"]))
    command.write_text(f'#!/bin/sh\nCONTAINERS_CONF={config} exec {line} "$@"\n')
    command.chmod(0o755)
    return command


def why_no_podman(folder: Path, probe: Path) -> str:
    """Empty: podman runs containers here. Else why not."""
    if why := roots.is_possible():
        return why
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "podman and runc are not installed"
    root = make_root(folder / "trial", probe)
    words = [podman(folder), "run", "--rm", "--rootfs", f"{root}:O", "/bin/env"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    return "" if tried.returncode == 0 else f"podman runs no container here: {tried.stderr.strip()[-200:]}"
