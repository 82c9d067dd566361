"""Dying at an exact moment: a driver in front of the simulated one, which counts calls and kills its process at one."""

from __future__ import annotations

import mmap
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from client_hook.environment import simulation_libraries

SOURCE: Final = Path(__file__).with_name("fatal.c")
HEADER_WORDS: Final = 4  # of its page, before the counts
LOOKS: Final = frozenset(
    {
        "cuCtxGetCurrent",
        "cuCtxPopCurrent_v2",
        "cuCtxPushCurrent_v2",
        "cuCtxSetCurrent",
        "cuEventElapsedTime",
        "cuEventElapsedTime_v2",
        "cuEventQuery",
        "cuMemGetInfo_v2",
        "cuPointerGetAttribute",
        "cuPointerGetAttributes",
        "cuStreamIsCapturing",
        "cuStreamQuery",
        "cuThreadExchangeStreamCaptureMode",
    }
)
"""They leave nothing behind that outlives the thread: who dies at one dies as after whatever was called before it. And
they are seldom made as often as the time before."""


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """Before or after the ``call``-th call (from 1) of a function, since calls are counted."""

    function: str
    call: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.function} #{self.call}"


def moments(calls: Counter[str]) -> Iterator[Moment]:
    """All that there are in an operation which makes these calls; of those that only look, the first ones."""
    for function, count in sorted(calls.items()):
        for call in range(1, (1 if function in LOOKS else count) + 1):
            yield Moment(function, call, after=False)
            yield Moment(function, call, after=True)


class FatalDriver:
    """Built into a folder, for one process at a time: that with ``environment``."""

    def __init__(self, folder: Path) -> None:
        behind = simulation_libraries() / "libcuda.so.1"
        listed: list[str | Path] = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", behind]
        self._functions = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
        (folder / "functions.h").write_text("".join(f"FUNCTION({name})\n" for name in self._functions))
        flags = ["-w", "-O1", "-shared", "-fPIC", f"-I{folder}", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["gcc", *flags, "-o", folder / "libcuda.so.1", SOURCE], check=True)
        page = folder / "page"
        page.write_bytes(bytes(4 * (HEADER_WORDS + len(self._functions))))
        with page.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("I")
        self.environment = {
            "FATAL_DRIVER": str(behind),
            "FATAL_PAGE": str(page),
            "LD_LIBRARY_PATH": f"{folder}:{simulation_libraries()}",
        }

    @contextmanager
    def armed(self, moment: Moment | None = None) -> Iterator[Counter[str]]:
        """Calls are counted, and the process dies at ``moment``. What is given has the counts afterwards."""
        calls: Counter[str] = Counter()
        for at in range(len(self._words)):
            self._words[at] = 0
        if moment is not None:
            self._words[1] = self._functions.index(moment.function)
            self._words[2] = moment.call
            self._words[3] = moment.after
        self._words[0] = 1
        try:
            yield calls
        finally:
            self._words[0] = 0
            counted = zip(self._functions, self._words[HEADER_WORDS:], strict=True)
            calls.update({name: count for name, count in counted if count})
