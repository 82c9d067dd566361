"""A data-parallel job without NCCL: its ranks compute, then wait for each other on the GPU, step after step.

    python -m tests.integration.ranks FLAGS WORLD STEPS RANK...

runs the given ranks of the job in this process, each on a visible device of its own in a thread of its own. FLAGS is a
file that all processes of the job map: a word per rank. A collective is a short kernel, the rank's word set to the
number of the step, and a wait for everybody else's: like NCCL's kernels, it does not end before all ranks have begun
it. Prints the seconds that each rank took, and the steps that it did.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from ctypes import byref, c_uint, c_uint64, c_void_p
from pathlib import Path

from tests.hook.app import App

KERNELS, KERNEL_MS, COLLECTIVE_MS = 8, 0.5, 0.05
COLLECTIVES = 2  # of a step
AHEAD = 2  # steps that the host is ahead of the GPU at most
PORTABLE, GEQ, ALREADY_REGISTERED = 1, 0, 712


class Rank(App):
    """One rank. ``words``: where the flags are mapped."""

    def __init__(self, rank: int, ordinal: int, world: int, words: int) -> None:
        super().__init__(ordinal)
        self.rank, self.world = rank, world
        code = self.result("cuMemHostRegister_v2", c_void_p(words), ctypes.c_size_t(mmap.PAGESIZE), c_uint(PORTABLE))
        assert code in {0, ALREADY_REGISTERED}, code
        pointer = c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", byref(pointer), c_void_p(words), c_uint(0))
        self.words = pointer.value
        self.compute, self.collective = self.kernel(KERNEL_MS), self.kernel(COLLECTIVE_MS)
        self.done = 0

    def word(self, rank: int) -> c_uint64:
        return c_uint64(self.words + 64 * rank)

    def all_reduce(self) -> None:
        self.done += 1
        self.collective.launch()
        self.call("cuStreamWriteValue32_v2", self.stream, self.word(self.rank), c_uint(self.done), c_uint(0))
        for other in range(self.world):
            if other != self.rank:
                self.call("cuStreamWaitValue32_v2", self.stream, self.word(other), c_uint(self.done), c_uint(GEQ))

    def run(self, steps: int) -> None:
        self.call("cuCtxSetCurrent", self.context)
        events = [self.event() for _ in range(AHEAD)]
        for step in range(steps):
            if step >= AHEAD:
                self.wait(events[step % AHEAD])
            for _ in range(COLLECTIVES):
                for _ in range(KERNELS // COLLECTIVES):
                    self.compute.launch()
                self.all_reduce()
            self.record(events[step % AHEAD])
        self.synchronize()


def main(flags: Path, world: int, steps: int, mine: list[int]) -> None:
    with flags.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    words = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    ranks = [Rank(rank, ordinal, world, words) for ordinal, rank in enumerate(mine)]
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    threads = [threading.Thread(target=rank.run, args=(steps,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(time.monotonic() - began, *(rank.done // COLLECTIVES for rank in ranks), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [int(rank) for rank in sys.argv[4:]])
