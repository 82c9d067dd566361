"""How long what a person waits for first takes: ``import vgpu``, help, and ``vgpuctl ls`` of a simulated node.

    python -m benchmarks.micro.starts [--rounds 20] [--beside vgpuctl-of-another-version]

Each is a fresh process, from its start to its end; the interpreter's own start is part of it and has a row of its own.
Prints the median, the fastest and the slowest. The first round, which may write byte code, is left out.

``--beside``: runs another ``vgpuctl`` in turn with this one, so that both meet the same load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.__main__ import machine

VGPUCTL: Final = str(Path(sys.executable).with_name("vgpuctl"))
PYTHON: Final = {"python -c ''": (["-c", ""], None), "import vgpu": (["-c", "import vgpu"], 50)}
COMMANDS: Final = {"vgpuctl --help": 100, "vgpuctl ls --help": 100, "vgpuctl ls": None, "vgpuctl ps": None}
"""Each command, and how many ms it should take at most."""
VGPUS: Final = 2


def took_ms(command: list[str]) -> float:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run(command, env=kept, stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - began)


def compare(name: str, commands: dict[str, list[str]], bar_ms: float | None, rounds: int) -> None:
    """One row for each of ``commands``, which take turns."""
    taken: dict[str, list[float]] = {which: [] for which in commands}
    for _ in range(rounds + 1):
        for which, command in commands.items():
            taken[which].append(took_ms(command))
    for which, all_ms in taken.items():
        ms = all_ms[1:]
        bar = "" if bar_ms is None else f"  at most {bar_ms}"
        row = f"{name}{which}"
        print(f"{row:<26} {statistics.median(ms):8.1f} {min(ms):8.1f} {max(ms):8.1f}{bar}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.starts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--beside", metavar="VGPUCTL", help="run this one in turn with our own")
    arguments = parser.parse_args()
    programs = {"": VGPUCTL} | ({", beside": arguments.beside} if arguments.beside else {})
    print(machine())
    print(f"{'':<26} {'median':>8} {'least':>8} {'most':>8}  ms of {arguments.rounds}")
    for name, (words, bar_ms) in PYTHON.items():
        compare(name, {"": [sys.executable, *words]}, bar_ms, arguments.rounds)
    with TemporaryDirectory() as folder:
        os.environ |= {"VGPU_RUNTIME_DIR": f"{folder}/run", "VGPU_STATE_DIR": f"{folder}/state"}
        subprocess.run([VGPUCTL, "serve", "--simulate", "1", "--detach"], check=True, capture_output=True)
        try:
            for _ in range(VGPUS):
                subprocess.run([VGPUCTL, "create", "--sm", "20"], check=True, capture_output=True)
            for name, bar_ms in COMMANDS.items():
                commands = {which: [program, *name.split()[1:]] for which, program in programs.items()}
                compare(name, commands, bar_ms, arguments.rounds)
        finally:
            subprocess.run([VGPUCTL, "stop"], check=False, capture_output=True)


if __name__ == "__main__":
    main()
