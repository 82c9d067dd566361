"""A program in a vGPU that owns some memory, and does what it is told: a line in, a line of JSON out.

python -m tests.kills.program SEED [SIZE…]

check          all that it owns is what it put there, and a kernel runs
touch          it uses its memory, briefly
do NAME TIMES  an operation (operations.py)
free           bytes that it is told are free
take SIZE      whether so much can be had; it is given back
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from ctypes import c_size_t, c_uint64

from tests.hook.app import App
from tests.kills.operations import OPERATIONS, mapped

PIECE = 2 << 20
"""Memory of whole pieces is made and mapped by the program itself."""
PERIOD = 65537
"""No two chunks have the same content."""


class Program:
    def __init__(self, seed: int, sizes: list[int]) -> None:
        self.seed, self.sizes = seed, sizes
        self.blocks: list[tuple[int, bytes]] = []

    def start(self) -> bool:
        self.app = App()
        for number, size in enumerate(self.sizes):
            address = mapped(self.app, size) if size % PIECE == 0 else self.app.allocate(size)
            assert address is not None
            pattern = random.Random(f"{self.seed} {number}").randbytes(PERIOD)
            content = (pattern * (size // PERIOD + 1))[:size]
            self.app.call("cuMemcpyHtoD_v2", c_uint64(address), content, c_size_t(size))
            self.blocks.append((address, content))
        return True

    def check(self) -> bool:
        self.app.kernel(0.1).launch()
        self.app.synchronize()
        return all(self.app.read(address, len(content)) == content for address, content in self.blocks)

    def touch(self) -> bool:
        address, content = self.blocks[0]
        return self.app.read(address, 1) == content[:1]

    def do(self, name: str, times: str = "1") -> bool:
        for _ in range(int(times)):
            OPERATIONS[name](self.app)
        return True

    def free(self) -> int:
        return self.app.memory_info()[0]

    def take(self, size: str) -> bool:
        address = self.app.allocate(int(size))
        if address is not None:
            self.app.free(address)
        return address is not None


def main() -> None:
    seed, *sizes = (int(argument) for argument in sys.argv[1:])
    program = Program(seed, sizes)
    for line in sys.stdin:
        name, *arguments = line.split()
        asked: Callable[..., object] = getattr(program, name)
        print(json.dumps(asked(*arguments)), flush=True)


if __name__ == "__main__":
    main()
