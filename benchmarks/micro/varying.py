"""What a vGPU of 30 % gets beside one of 70 if its kernel's length depends on its arguments.

    python -m benchmarks.micro.varying [--gpu] [--patterns fifty turns ...] [--seconds 12] [--every 10] [--repeat 1]

One function at one width launches 1 and 10 ms (``--short``, ``--long``): fifty of each, one of each in turns, every
tenth long, either at random, or always long. The other vGPU's kernels take 0.5 ms. Both saturate; ``--every``: the
first synchronises after so many launches, 0: never. Kernels note their beginnings and ends on the device; printed is
the time of each in percent of the window, by what its kernels take alone. Simulated GPU, or with --gpu the real one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Final

from benchmarks.node import Node
from benchmarks.suite.workloads.catalogue import STAMPED, WORKS
from benchmarks.suite.workloads.stamped import ITERATION_NS, START_NS, StampedProgram
from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import BLOCKS_PER_SM, PTX, THREADS

STAMPS: Final = 1 << 16
SHARES: Final = (30, 70)
BESIDE_MS: Final = 0.5
READY_S: Final = 6.0
"""Until the window, in which programs start, learn and come into step."""
DICE: Final = random.Random(1)
PATTERNS: Final[dict[str, Callable[[int], bool]]] = {
    "fifty": lambda n: n // 50 % 2 == 1,
    "turns": lambda n: n % 2 == 1,
    "tenth": lambda n: n % 10 == 9,
    "random": lambda _: DICE.random() < 0.5,
    "long": lambda _: True,
}
"""Whether launch n is a long one."""


class Program:
    """Kernels of the wished length in a vGPU, until the window is over."""

    def __init__(self) -> None:
        self._clock = StampedProgram(WORKS[STAMPED])
        self._gpu = gpu = Gpu(PTX)
        buffer = gpu.allocate(16 * STAMPS)
        if buffer is None:
            raise MemoryError("no room for a buffer of 1 MiB: give the vGPU more memory")
        self._buffer = buffer
        self._index, self._rounds = ctypes.c_uint64(0), ctypes.c_uint32(0)
        parameters = (ctypes.c_uint64(buffer), self._index, self._rounds)
        self._kernel = Kernel(gpu, "stamped", gpu.sm_count * BLOCKS_PER_SM, THREADS, parameters)

    def launch(self, index: int, ms: float) -> None:
        self._index.value = index % STAMPS
        self._rounds.value = max(1, int((ms * 1e6 - START_NS) / ITERATION_NS))
        self._kernel.launch()

    def alone_ns(self, ms: float) -> float:
        """What such a kernel takes: the least of several, for others may be on the GPU."""
        for index in range(10):
            self.launch(index, ms)
            self._gpu.synchronize()
        return min(end - begin for begin, end in self.stamps(10))

    def stamps(self, count: int) -> list[tuple[int, int]]:
        self._gpu.synchronize()
        found = array("Q", self._gpu.read(self._buffer, 16 * min(count, STAMPS)))
        return list(zip(found[::2], found[1::2], strict=True))

    def run(self, start_ns: int, seconds: float, lengths_ms: Callable[[int], float], every: int) -> float:
        """The time of its kernels in percent of the window, which begins at ``start_ns`` of our clock."""
        alone = {ms: self.alone_ns(ms) for ms in {lengths_ms(n) for n in range(100)}}
        look = self._clock.look()
        begin_ns = start_ns + look.theirs - look.ours
        end_ns = start_ns + int(1e9 * seconds)
        launched: list[float] = []
        self._gpu.clear(self._buffer, 16 * STAMPS)
        while time.monotonic_ns() < end_ns:
            ms = lengths_ms(len(launched))
            self.launch(len(launched), ms)
            launched.append(ms)
            if every and len(launched) % every == 0:
                self._gpu.synchronize()
        if len(launched) > STAMPS:
            raise SystemExit(f"{len(launched)} launches, of which {STAMPS} can be noted: choose fewer --seconds")
        total = 0.0
        for ms, (begin, end) in zip(launched, self.stamps(len(launched)), strict=True):
            inside = min(end, begin_ns + int(1e9 * seconds)) - max(begin, begin_ns)
            total += alone[ms] * max(inside, 0) / (end - begin)
        return total / (1e9 * seconds) * 100


def measured(node: Node, pattern: str, args: argparse.Namespace) -> list[float]:
    start_ns = time.monotonic_ns() + int(1e9 * READY_S)
    processes = []
    for share, words in (
        (SHARES[0], [pattern, str(args.short), str(args.long), str(args.every)]),
        (SHARES[1], ["long", "0", str(BESIDE_MS), "0"]),
    ):
        own = [sys.executable, "-m", "benchmarks.micro.varying", "--program"]
        program = [*own, str(start_ns), str(args.seconds), *words]
        command = [*node.vgpuctl, "run", "--sm", str(share), "--mem", "1G", "--", *program]
        processes.append(subprocess.Popen(command, env=node.environment, stdout=subprocess.PIPE, text=True))
    return [json.loads(p.communicate(timeout=120 + args.seconds)[0].splitlines()[-1]) for p in processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on the real GPU")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--short", type=float, default=1.0, metavar="MS")
    parser.add_argument("--long", type=float, default=10.0, metavar="MS")
    parser.add_argument("--every", type=int, default=10, metavar="N", help="launches between synchronisations; 0: none")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--program", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        start_ns, seconds, pattern, short, long, every = args.program
        is_long, lengths = PATTERNS[pattern], (float(short), float(long))
        print(Program().run(int(start_ns), float(seconds), lambda n: lengths[is_long(n)], int(every)))
        return
    with Node(simulate=0 if args.gpu else 1, mode="temporal") as node:
        print(f"{'':10}{f'of {SHARES[0]} %':>12}{f'of {SHARES[1]} %':>12}")
        for _ in range(args.repeat):
            for pattern in args.patterns:
                print(f"{pattern:10}" + "".join(f"{got:10.2f} %" for got in measured(node, pattern, args)), flush=True)


if __name__ == "__main__":
    main()
