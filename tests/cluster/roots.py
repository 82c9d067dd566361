"""Containers without an engine: a root file system of bind mounts, in namespaces of its own, with the mounts of a vGPU.
``pivot_root`` makes it the root.

What an engine does besides (layers, networks, seccomp) is tested with engines themselves, where they are installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

PROBE: Final = Path(__file__).with_name("probe.c")
SHARED: Final = ("bin", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "usr")
REMAPPED: Final = 100_000
_SCRIPT: Final = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$ROOT"
for name in {names}; do
    if [ -L "/$name" ]; then cp -a "/$name" "$ROOT/$name"
    elif [ -d "/$name" ]; then mkdir "$ROOT/$name"; mount --rbind "/$name" "$ROOT/$name"
    fi
done
mkdir -m 755 "$ROOT/etc" "$ROOT/proc" "$ROOT/dev" "$ROOT/run" "$ROOT/var"
mkdir -m 1777 "$ROOT/tmp"
cp -a /etc/passwd /etc/group /etc/ld.so.cache "$ROOT/etc/"
mount --rbind /dev "$ROOT/dev"
mount -t proc proc "$ROOT/proc"
{mounts}
cd "$ROOT"
mkdir old
pivot_root . old
umount -l old
exec {command}
"""


@cache
def is_possible() -> str:
    """Empty: containers of this kind work here. Else why not."""
    if os.geteuid() != 0:
        return "only root makes namespaces and mounts here"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", "mount -t tmpfs tmpfs /mnt && unshare --user true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def build_probe(folder: Path) -> Path:
    return build(PROBE, folder)


def build(source: Path, folder: Path, *options: str) -> Path:
    path = folder / source.stem
    subprocess.run(["gcc", "-O1", "-w", *options, str(source), "-o", str(path), "-ldl"], check=True)
    return path


def _mounted(volume: str) -> str:
    source, target, *options = volume.split(":")
    to = f'"$ROOT"{shlex.quote(target)}'
    make = f"mkdir -p {to}" if Path(source).is_dir() else f'mkdir -p "$(dirname {to})"; touch {to}'
    lines = f"{make}\nmount --bind {shlex.quote(source)} {to}\n"
    return lines + (f"mount -o remount,ro,bind {to}\n" if "ro" in options else "")


def command(
    folder: Path, volumes: Iterable[str], words: Sequence[str], *, uid: int = 0, remapped: bool = False
) -> list[str]:
    """The argv that runs ``words`` in a container with these ``volumes`` (as ``docker run -v`` takes them), with an
    empty environment. ``folder``: an empty directory. ``uid``: of the program. ``remapped``: in a user
    namespace, where the container's root is uid ``REMAPPED`` of the host, as with Docker's ``userns-remap``."""
    inner = ["/usr/bin/env", "-i", *words]
    if remapped:
        inner = ["/usr/bin/unshare", "--user", f"--map-user={uid}", f"--map-group={uid}", *inner]
        uid += REMAPPED
    if uid:
        inner = ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *inner]
    script = _SCRIPT.format(
        names=" ".join(SHARED), mounts="".join(map(_mounted, volumes)), command=shlex.join(inner)
    ).replace("$ROOT", str(folder))
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
