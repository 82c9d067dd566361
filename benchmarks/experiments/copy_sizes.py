"""What the size of a copy from pinned host memory costs a swap: GB/s of copies in rows, one after the other.

    python -m benchmarks.experiments.copy_sizes [--gib 4] [--rounds 5]

It runs alone on the GPU, and without a vGPU. The sizes take turns in each round; figures are medians. ``streams``: the
copies go to so many streams by turns. One JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Final

from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX

MIB: Final = 1 << 20
CASES: Final = ((2, 1), (2, 2), (4, 1), (8, 1), (20, 1), (32, 1), (128, 1))
"""MiB of a copy, and streams."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    size: int = args.gib << 30
    gpu = Gpu(PTX)
    host, device = c_void_p(), gpu.allocate(size)
    gpu.call("cuMemHostAlloc", byref(host), c_size_t(size), 0)
    streams = [c_void_p() for _ in range(2)]
    for stream in streams:
        gpu.call("cuStreamCreate", byref(stream), 1)

    def copy(piece: int, count: int, *, out: bool) -> float:
        began = time.perf_counter()
        for number, at in enumerate(range(0, size - piece + 1, piece)):
            place, there, stream = (
                c_uint64((device or 0) + at),
                c_void_p((host.value or 0) + at),
                streams[number % count],
            )
            if out:
                gpu.call("cuMemcpyDtoHAsync_v2", there, place, c_size_t(piece), stream)
            else:
                gpu.call("cuMemcpyHtoDAsync_v2", place, there, c_size_t(piece), stream)
        gpu.call("cuCtxSynchronize")
        seconds = time.perf_counter() - began
        return (size - size % piece) / seconds / 1e9

    rates: dict[tuple[int, int, bool], list[float]] = {}
    for _ in range(args.rounds):
        for mib, count in CASES:
            for out in (False, True):
                rates.setdefault((mib, count, out), []).append(copy(mib * MIB, count, out=out))
    for (mib, count, out), found in rates.items():
        way = "from the card" if out else "to the card"
        print(json.dumps({"mib": mib, "streams": count, "way": way, "gb_s": round(statistics.median(found), 2)}))


if __name__ == "__main__":
    main()
