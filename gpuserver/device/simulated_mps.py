"""The simulated MPS daemon: a process that does nothing. That it lives is all that the simulated driver wants to know.

``python -m gpuserver.device.simulated_mps DIRECTORY`` returns once the daemon, a child in a session of its own, has put
its name into the marker there: its pid, its start time, by which the driver also knows a pid that was reused, and its
PID namespace (cython_ext/sim/mps.pxd). It holds a lock on the marker: programs in another PID namespace see by it that
the daemon lives. The daemon ends when the marker names another one, or is gone.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
from pathlib import Path
from typing import Final

MARKER: Final = "simulated-mps"
LOOK_S: Final = 0.5
OFD_SETLK: Final = 37
"""F_OFD_SETLK, which the fcntl module of Python 3.11 does not name."""
FIRST_BYTE: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
"""struct flock."""


def main(directory: Path) -> None:
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1)  # until the child has written, or has died
        return
    os.close(reading)
    os.setsid()
    marker = directory / MARKER
    started = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    name = f"{os.getpid()} {started} {Path('/proc/self/ns/pid').stat().st_ino}\n"
    new = directory / f".{MARKER}.{os.getpid()}"
    new.write_text(name)
    new.chmod(0o644)
    held = os.open(new, os.O_RDWR | os.O_CLOEXEC)  # for life
    fcntl.fcntl(held, OFD_SETLK, FIRST_BYTE)
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
