"""Whether a program would load the hook. ``vgpuctl`` checks it before the start, because a program without the hook has
the whole GPU.

The dynamic loader of glibc reads LD_PRELOAD. A statically linked program has no loader. Another C library's loader
cannot load the hook. The loader ignores LD_PRELOAD in a program with more privileges than its caller (AT_SECURE).
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from client_hook.binary import Elf, Script, after_env, described
from client_hook.errors import HookError

MACHINES: Final = {3: "i386", 21: "ppc64", 40: "32-bit ARM", 62: "x86-64", 183: "aarch64", 243: "RISC-V"}
UNKNOWN: Final = "and whether it loads the hook is not known"
DEEPEST: Final = 6
"""The longest chain of scripts that are each the interpreter of the one before: the kernel stops at five."""


def check_preloadable(argv: Sequence[str], environment: Mapping[str, str], *, system_hook: bool, command: str) -> None:
    """Raises :class:`HookError` if ``argv`` would start a program outside its vGPU. A program that is not found, or not
    executable, is left to what starts it. ``system_hook``: ``/etc/ld.so.preload`` has the hook, for privileged programs
    too. ``command``: what to type before the option."""
    reason = why_not(argv, environment, system_hook=system_hook)
    if reason:
        raise HookError(
            f"{reason}, so it {'might' if reason.endswith(UNKNOWN) else 'would'} use the GPU outside of its vGPU",
            f"if it only starts other programs, or if that is what you want: {command} --allow-unhooked",
        )


def why_not(argv: Sequence[str], environment: Mapping[str, str], *, system_hook: bool) -> str:
    """Why the program of ``argv`` would not load the hook; "" if it would, or if it does not start at all."""
    words, named, which = list(argv), "", ""
    for _ in range(DEEPEST):
        path = found(words[0], environment) if words else None
        if path is None:
            return ""
        subject = f"{named}{words[0]}{which}"
        try:
            what = _look(path)
        except OSError:
            return f"{subject} cannot be read, {UNKNOWN}"
        if isinstance(what, Script):
            named, which = f"{subject} is a script, and its interpreter ", ""
            words = [what.interpreter, *([what.argument] if what.argument else []), str(path), *words[1:]]
            continue
        if isinstance(what, Elf):
            reason = _of_elf(what, path) or ("" if system_hook else _of_privileges(path))
            if reason:
                return f"{subject} {reason}"
        if path.name != "env":
            return ""
        words = after_env(words[1:])
        # A script that names "env -S x" is passed to env as one word.
        named, which = f"{named}env starts ", ", which"
    return ""


def found(name: str, environment: Mapping[str, str]) -> Path | None:
    """The file that execvp(3) would execute."""
    folders = [""] if "/" in name else environment.get("PATH", os.defpath).split(":")
    for folder in folders if name else []:
        path = Path(folder) / name
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _look(path: Path) -> Elf | Script | None:
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return described(data)  # type: ignore[arg-type]  # read by slices alone, like bytes
        except ValueError:  # empty
            return None


@cache
def _own() -> Elf:
    """This interpreter: a program that the loader of the hook's own C library starts."""
    own = _look(Path("/proc/self/exe"))
    assert isinstance(own, Elf)
    return own


def _of_elf(elf: Elf, path: Path) -> str:
    own = _own()
    if (elf.bits, elf.machine) != (own.bits, own.machine):
        theirs, ours = (MACHINES.get(one.machine, f"machine {one.machine}") for one in (elf, own))
        return f"is built for {theirs}, and the hook for {ours}"
    if not elf.loader:
        if path.resolve() == Path(own.loader).resolve():
            return ""  # the loader itself, started as a program
        return "is statically linked and loads no other library"
    loader = Path(elf.loader).name
    if not loader.startswith(("ld-linux", "ld64.so", "ld.so")):
        return f"is started by {elf.loader}, which is not the loader of glibc"
    return ""


def _of_privileges(path: Path) -> str:
    """The kernel's rule (security/commoncap.c): ids change, or a user other than root gets capabilities."""
    status = path.stat()
    if os.statvfs(path).f_flag & os.ST_NOSUID or _no_new_privileges():
        return ""
    if status.st_mode & stat.S_ISUID and status.st_uid != os.getuid():
        return f"is setuid (it runs as uid {status.st_uid}), and the loader preloads nothing into such programs"
    if status.st_mode & stat.S_ISGID and status.st_mode & stat.S_IXGRP and status.st_gid != os.getgid():
        return f"is setgid (it runs as gid {status.st_gid}), and the loader preloads nothing into such programs"
    if os.getuid() != 0:
        try:
            os.getxattr(path, "security.capability")
        except OSError:
            return ""
        return "has file capabilities, and the loader preloads nothing into such programs"
    return ""


def _no_new_privileges() -> bool:
    return "NoNewPrivs:\t1" in Path("/proc/self/status").read_text()
