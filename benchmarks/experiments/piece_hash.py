"""How fast the kernel reads pieces of swapped memory: their hashes, and which of their parts are zeros. Is it right?

    python -m benchmarks.experiments.piece_hash [--gib 16] [--rounds 9]

Without a vGPU. Some pieces have random bytes, 64 have one word that is not 0, each in another part, and all others are
zeros. The result is one line of JSON: ``ms``, the median for all pieces, ``tb_per_s``, and ``wrong``: pieces with
another hash, or other parts, than cython_ext/logic/memory/piece_hash.pxd computes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
from ctypes import byref, c_float, c_uint64, c_void_p
from pathlib import Path
from statistics import median

import cython_ext
from cython_ext.testing.bindings_memory import hash_of_piece
from vgpu.workload.driver import Gpu

PTX = Path(cython_ext.__file__).parent / "hook" / "swap" / "piece_hash.ptx"
PIECE_BYTES = 2 << 20
LAUNCH_PIECES = 256
THREADS = 256
NOISE = 4
PARTS = 64
RESULT_BYTES = 24


def contents(count: int) -> dict[int, bytes]:
    """By piece, what is not zeros."""
    source = random.Random(1)
    part_bytes = PIECE_BYTES // PARTS
    found = {}
    for part in range(min(PARTS, count)):
        at = part * part_bytes + (part_bytes - 1 if part == PARTS - 1 else source.randrange(part_bytes))
        found[count - 1 - part] = bytes(at) + b"\x80" + bytes(PIECE_BYTES - 1 - at)
    return found | {number * (count - 1) // NOISE: source.randbytes(PIECE_BYTES) for number in range(NOISE)}


def allocated(gpu: Gpu, size: int) -> int:
    address = gpu.allocate(size)
    if address is None:
        sys.exit(f"the GPU has no room for {size >> 20} MiB; try a smaller --gib")
    return address


class Hasher:
    def __init__(self, gpu: Gpu, memory: int, count: int) -> None:
        self.gpu, self.results = gpu, allocated(gpu, RESULT_BYTES * count)
        function = c_void_p()
        gpu.call("cuModuleGetFunction", byref(function), gpu.module, b"vgpu_hash_pieces")
        self.launches = [
            (function, min(LAUNCH_PIECES, count - first), *self.parameters(memory, first))
            for first in range(0, count, LAUNCH_PIECES)
        ]
        self.begin, self.end = c_void_p(), c_void_p()
        for event in (self.begin, self.end):
            gpu.call("cuEventCreate", byref(event), 0)

    def parameters(self, memory: int, first: int) -> tuple[ctypes.Array[c_void_p], object, object]:
        result = c_uint64(self.results + RESULT_BYTES * first)
        places = (c_uint64 * LAUNCH_PIECES)(*(memory + (first + at) * PIECE_BYTES for at in range(LAUNCH_PIECES)))
        return (c_void_p * 2)(ctypes.addressof(result), ctypes.addressof(places)), result, places

    def run(self) -> float:
        """Milliseconds."""
        gpu, passed = self.gpu, c_float()
        gpu.call("cuEventRecord", self.begin, gpu.stream)
        for function, blocks, pointers, *_ in self.launches:
            gpu.call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, gpu.stream, pointers, None)
        gpu.call("cuEventRecord", self.end, gpu.stream)
        gpu.call("cuEventSynchronize", self.end)
        gpu.call("cuEventElapsedTime", byref(passed), self.begin, self.end)
        return passed.value

    def hashes(self, count: int) -> list[tuple[int, int, int]]:
        words = (c_uint64 * (3 * count))()
        self.gpu.call("cuMemcpyDtoH_v2", words, self.results, RESULT_BYTES * count)
        return list(zip(words[::3], words[1::3], words[2::3], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    count = int(args.gib * 2**30) // PIECE_BYTES
    gpu = Gpu(PTX.read_text())
    memory = allocated(gpu, count * PIECE_BYTES)
    gpu.call("cuMemsetD8_v2", memory, 0, count * PIECE_BYTES)
    expected = dict.fromkeys(range(count), hash_of_piece(memoryview(bytes(PIECE_BYTES)).cast("Q")))
    for piece, data in contents(count).items():
        gpu.call("cuMemcpyHtoD_v2", memory + piece * PIECE_BYTES, data, PIECE_BYTES)
        expected[piece] = hash_of_piece(memoryview(data).cast("Q"))
    gpu.call("cuCtxSynchronize")
    hasher = Hasher(gpu, memory, count)
    ms = median(hasher.run() for _ in range(args.rounds))
    wrong = sum(found != expected[piece] for piece, found in enumerate(hasher.hashes(count)))
    print(json.dumps({"ms": round(ms, 3), "tb_per_s": round(count * PIECE_BYTES / ms / 1e9, 2), "wrong": wrong}))


if __name__ == "__main__":
    main()
