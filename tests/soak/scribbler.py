"""A hostile process of a vGPU: attaches, and writes at random into the activity page. ``… DOOR SEED``."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path
from random import Random

from tests.integration.process import attach_request, knock


def main(door: Path, random: Random) -> None:
    reply, descriptors = knock(door, attach_request())
    assert reply["ok"], reply
    page = mmap.mmap(descriptors[1], 0)
    words = (0, 1, 0xFFFF, 0xFFFF_FFFF, 1 << 62, (1 << 64) - 1, os.getpid(), 1)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        for _ in range(100):
            at = random.randrange(0, len(page) // 8) * 8
            value = random.choice(words) if random.random() < 0.5 else random.getrandbits(64)
            page[at : at + 8] = value.to_bytes(8, "little")
    if random.random() < 0.5:
        os.abort()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Random(int(sys.argv[2])))
