"""A bundle as a file: written whole or not at all, and readable for no other user."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vgpu.errors import ErrorCode, VgpuError
from vgpu.files import replaced
from vgpu.support.parts import Part

README: Final = """What `vgpuctl support bundle` found on a machine that runs st-vgpu: versions, doctor's findings,
readings, events and logs of its node, a recording of one second. Of the environment: VGPU_*, CUDA_*,
LD_PRELOAD. Of programs: their names, no arguments. {redacted}

"""
REDACTED: Final = "Names and homes of users and the machine's name are replaced."
OPEN: Final = "Names of users and paths stand here as they are (--no-redact)."


@dataclass(frozen=True, slots=True)
class Made:
    """``files``: name and size in bytes of each, uncompressed. ``missing``: name and why it is not there.
    ``size``: of the bundle."""

    files: tuple[tuple[str, int], ...]
    missing: tuple[tuple[str, str], ...]
    size: int


def write(
    path: Path,
    parts: Iterable[Part],
    redact: Callable[[str], str],
    *,
    redacted: bool,
    show: Callable[[str], object] = lambda name: None,
) -> Made:
    """Write the bundle. ``show`` is called with each name before that part is read. ``VgpuError`` (invalid): it cannot
    be written there, and nothing is."""
    if path.is_dir():
        raise VgpuError(ErrorCode.INVALID, f"cannot write {path}: it is a directory", f"-o {path}/vgpu-support.tar.gz")
    folder = path.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz")
    files: list[tuple[str, int]] = []
    missing: list[tuple[str, str]] = []
    with replaced(path, private=True) as file:
        with tarfile.open(fileobj=file, mode="w:gz") as archive:

            def put(name: str, text: str) -> None:
                data = redact(text).encode(errors="backslashreplace")
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
                files.append((name, len(data)))

            for part in parts:
                show(part.name)
                try:
                    text = part.read()
                except Exception as error:  # a maintainer wants to know any error
                    missing.append((part.name, redact(str(error) or repr(error))))
                    continue
                put(part.name, text)
            put("README.txt", _readme(files, missing, redacted=redacted))
        return Made(tuple(files), tuple(missing), file.tell())


def _readme(files: Iterable[tuple[str, int]], missing: Iterable[tuple[str, str]], *, redacted: bool) -> str:
    lines = [README.format(redacted=REDACTED if redacted else OPEN), "Files:\n"]
    lines += [f"  {name}, {size} bytes\n" for name, size in files]
    absent = [f"  {name}: {why}\n" for name, why in missing]
    return "".join(lines + (["\nNot here, and why:\n", *absent] if absent else []))
