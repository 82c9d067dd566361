"""A stream of requests that holds up a trainer while a request is on the GPU: what ``hold_trainer.py`` measures.

    python -m benchmarks.experiments.hold_trainer_pause --work NAME [--simulated]

It speaks like ``sharer.py``. PAUSING_HOW names a file that is read before each window. Empty: nobody is held up. The
number of a process: that gets SIGSTOP when a request arrives and SIGCONT when it is done. "word": the first four bytes
of the file that PAUSING_WORD names are 1 meanwhile, and else 0. A result has ``pauses_made``.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.suite.workloads.catalogue import WORKS
from benchmarks.suite.workloads.program import Mark, Program
from benchmarks.suite.workloads.sharer import Window, build, requests, serve

HOW: Final = "PAUSING_HOW"
WORD: Final = "PAUSING_WORD"
BY_WORD: Final = "word"


class Word:
    """The first four bytes of a file of one page or more, shared with whoever maps it too."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._value = ctypes.c_uint32.from_buffer(self._mapped)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._value)

    def hold(self, held: bool) -> None:
        self._value.value = held


def stop(pid: int, held: bool) -> None:
    """ProcessLookupError if there is no such process."""
    os.kill(pid, signal.SIGSTOP if held else signal.SIGCONT)


class Pausing:
    """``program`` as ``sharer.requests`` uses it: a request begins with its first mark and is over when waited for."""

    def __init__(self, program: Program, hold: Callable[[bool], None]) -> None:
        self._program, self._hold = program, hold
        self._holds = False
        self.made = 0

    def mark(self, timed: bool = False) -> Mark:
        if not self._holds:
            self._hold(True)
            self._holds = True
            self.made += 1
        return self._program.mark(timed)

    def wait(self, mark: Mark) -> None:
        self._program.wait(mark)
        self._hold(False)
        self._holds = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--simulated", action="store_true", help="the stand-in, on a simulated GPU")
    options = parser.parse_args()
    word = Word(os.environ[WORD])

    def answer(program: Program, window: Window) -> dict[str, Any]:
        how = Path(os.environ[HOW]).read_text()
        if not how:
            return {"work": options.work, "pauses_made": 0, **requests(program, window)}
        hold = word.hold if how == BY_WORD else partial(stop, int(how))
        pausing = Pausing(program, hold)
        try:
            result = requests(pausing, window)
        finally:
            hold(False)
        return {"work": options.work, "pauses_made": pausing.made, **result}

    serve(lambda: build(options.work, options.simulated), answer)


if __name__ == "__main__":
    main()
