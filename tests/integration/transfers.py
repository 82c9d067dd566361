"""A CUDA program that only fills (argv: ``fill``) or copies within the device (``copy``), for so many seconds, never
pausing. Prints "ready", waits for a line, and prints the part of the time that the simulated GPU worked for it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from ctypes import c_size_t, c_uint64
from typing import Final

from tests.hook.app import App

SET_UP_NS: Final = 1500  # of the simulated GPU (cython_ext/sim/cuda/memory/copies.pyx)
BYTES_PER_NS: Final = 4100
QUEUED: Final = 8  # in flight, so that little is left when time is up


def main() -> None:
    what, seconds, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    app = App()
    address = app.allocate(size)
    assert address is not None
    if what == "fill":
        call, each_ns = "cuMemsetD8Async", SET_UP_NS + size / BYTES_PER_NS
        arguments = (c_uint64(address), ctypes.c_ubyte(0), c_size_t(size), app.stream)
    else:  # onto itself: the simulated GPU takes its time, and this machine none
        call, each_ns = "cuMemcpyDtoDAsync_v2", SET_UP_NS + 2 * size / BYTES_PER_NS
        arguments = (c_uint64(address), c_uint64(address), c_size_t(size), app.stream)  # type: ignore[assignment]
    submit = getattr(app.library, call)
    events = [app.event() for _ in range(QUEUED)]
    per_event = max(1, int(500_000 / each_ns))
    print("ready", flush=True)
    input()
    finished = submitted = 0
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        event = events[submitted % QUEUED]
        if submitted >= QUEUED:
            app.wait(event)
            finished += per_event
        for _ in range(per_event):
            assert submit(*arguments) == 0
        app.record(event)
        submitted += 1
    print(finished * each_ns / 1e9 / (time.monotonic() - start), flush=True)


if __name__ == "__main__":
    main()
