"""The simulated MPS daemon: a process that does nothing. That it lives is all that the simulated driver wants to know.

``python -m gpuserver.device.simulated_mps DIRECTORY`` returns once the daemon, a child in a session of its own, has put
its name into the marker there: its pid and start time, by which the driver also knows a pid that was reused
(cython_ext/sim/mps.pxd). The daemon ends when the marker names somebody else, or is gone.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

MARKER: Final = "simulated-mps"
LOOK_S: Final = 0.5


def main(directory: Path) -> None:
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the child has written, or has died
        return
    os.close(reading)
    os.setsid()
    marker = directory / MARKER
    name = f"{os.getpid()} {Path('/proc/self/stat').read_bytes().rpartition(b')')[2].split()[19].decode()}\n"
    new = directory / f".{MARKER}.{os.getpid()}"
    new.write_text(name)
    new.replace(marker)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(writing)
    try:
        while marker.read_text() == name:
            time.sleep(LOOK_S)
    except OSError:
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
