"""The process of the simulated MPS daemon. It does nothing; the simulated driver only needs to know that it lives.

``python -m gpuserver.device.simulated.mps_process DIRECTORY`` forks the daemon into a session of its own, and returns
once the daemon has written the marker there. The marker holds the daemon's pid, its start time, which detects a reused
pid, and its PID namespace (cython_ext/sim/mps.pxd). The daemon holds a lock on the marker: a program in another PID
namespace finds by that lock that the daemon lives. The daemon ends when the marker names another one, or is gone.
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
POLL_S: Final = 0.5
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
    identity = f"{os.getpid()} {started} {Path('/proc/self/ns/pid').stat().st_ino}\n"
    new = directory / f".{MARKER}.{os.getpid()}"
    new.write_text(identity)
    new.chmod(0o644)
    held = os.open(new, os.O_RDWR | os.O_CLOEXEC)  # for life
    fcntl.fcntl(held, OFD_SETLK, FIRST_BYTE)
    new.replace(marker)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(writing)
    try:
        while marker.read_text() == identity:
            time.sleep(POLL_S)
    except OSError:
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]))
