"""A CUDA program that does everything at once: three threads with streams of their own (one the legacy stream) launch
in bursts, allocate, free, synchronise, and make and destroy streams, for as many seconds as argv says. Prints how often
each thread launched.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time

from tests.hook.app import LEGACY, App

LENGTHS_MS = (0.02, 0.1, 0.4)


def main() -> None:
    app = App()
    context = ctypes.c_void_p()
    app.call("cuCtxGetCurrent", ctypes.byref(context))
    end = time.monotonic() + float(sys.argv[1])
    launches = [0, 0, 0]

    def work(thread: int) -> None:
        app.call("cuCtxSetCurrent", context)
        source = random.Random(thread)
        stream = ctypes.c_void_p(LEGACY) if thread == 0 else app.new_stream(thread % 2)
        while time.monotonic() < end:
            kernels = [app.kernel(ms, stream) for ms in LENGTHS_MS]
            for _ in range(source.randrange(1, 40)):
                source.choice(kernels).launch()
                launches[thread] += 1
            match source.randrange(5):
                case 0:
                    app.call("cuStreamSynchronize", stream)
                case 1:
                    block = app.allocate(1 << 20)
                    assert block is not None
                    app.free(block)
                case 2:
                    app.synchronize()
                case 3 if thread:
                    app.call("cuStreamDestroy_v2", stream)
                    stream = app.new_stream(thread % 2)
                case _:
                    time.sleep(source.random() * 0.01)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    app.synchronize()
    print(*launches)


if __name__ == "__main__":
    main()
