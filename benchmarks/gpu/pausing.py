"""A stream of requests that stops other processes while a request is on the GPU: what ``paused.py`` measures.

    python -m benchmarks.gpu.pausing --work NAME [--simulated]

It speaks like ``sharer.py``. PAUSING_PIDS names a file of process numbers, read before each window: they get SIGSTOP
when a request arrives and SIGCONT when it is done.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.catalogue import WORKS
from benchmarks.gpu.sharer import Window, build, requests, serve
from benchmarks.gpu.works.program import Mark, Program

PAUSED: Final = "PAUSING_PIDS"


class Pausing:
    """``program`` as ``sharer.requests`` uses it: a request begins with its first mark and is over when waited for."""

    def __init__(self, program: Program, pids: Sequence[int]) -> None:
        self._program, self._pids = program, pids
        self._stopped = False

    def _tell(self, number: signal.Signals) -> None:
        self._stopped = number == signal.SIGSTOP
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def mark(self, timed: bool = False) -> Mark:
        if not self._stopped:
            self._tell(signal.SIGSTOP)
        return self._program.mark(timed)

    def wait(self, mark: Mark) -> None:
        try:
            self._program.wait(mark)
        finally:
            self._tell(signal.SIGCONT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--simulated", action="store_true", help="the stand-in, on a simulated GPU")
    options = parser.parse_args()

    def answer(program: Program, window: Window) -> dict[str, Any]:
        pids = [int(pid) for pid in Path(os.environ[PAUSED]).read_text().split()]
        return {"work": options.work, **requests(Pausing(program, pids), window)}

    serve(lambda: build(options.work, options.simulated), answer)


if __name__ == "__main__":
    main()
