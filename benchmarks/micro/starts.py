"""How long what a person waits for first takes: ``import vgpu``, and the commands that need no node.

    python -m benchmarks.micro.starts [--rounds 20]

Each is a fresh process, from its start to its end; the interpreter's own start is part of it and has a row of its own.
Prints the median, the fastest and the slowest. The first round, which may write byte code, is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.__main__ import machine

VGPUCTL: Final = str(Path(sys.executable).with_name("vgpuctl"))
STARTS: Final = {
    "python -c ''": ([sys.executable, "-c", ""], None),
    "import vgpu": ([sys.executable, "-c", "import vgpu"], 50),
    "vgpuctl --help": ([VGPUCTL, "--help"], 100),
    "vgpuctl ls --help": ([VGPUCTL, "ls", "--help"], None),
}
"""Each command, and how many ms it should take at most."""


def took_ms(command: list[str]) -> float:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run(command, env=kept, stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.starts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(machine())
    print(f"{'':<16} {'median':>8} {'least':>8} {'most':>8}  ms of {rounds}")
    for name, (command, bar_ms) in STARTS.items():
        taken = [took_ms(command) for _ in range(rounds + 1)][1:]
        bar = "" if bar_ms is None else f"  at most {bar_ms}"
        print(f"{name:<16} {statistics.median(taken):8.1f} {min(taken):8.1f} {max(taken):8.1f}{bar}", flush=True)


if __name__ == "__main__":
    main()
