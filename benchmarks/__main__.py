"""``python -m benchmarks [--out FOLDER] [NAME …]``: the benchmarks of ``micro/`` that need no GPU.

Prints tables and keeps them, with the machine and the revision they belong to, in FOLDER/NAME.txt; asserts nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

NAMES = ("slicing", "light", "native", "contention", "launch", "siblings", "metrics", "starts")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="default: bench")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    return max(run(name, options.out / f"{name}.txt") for name in options.names or NAMES)


def run(name: str, kept: Path) -> int:
    """Its exit code. What it prints is shown as it comes, and kept."""
    command = [sys.executable, "-u", "-m", f"benchmarks.micro.{name}"]
    with kept.open("w") as copy:

        def tell(line: str) -> None:
            print(line, end="", flush=True)
            copy.write(line)

        tell(f"== {name}, {machine()}\n")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                tell(line)
    return running.returncode


def machine() -> str:
    """What the figures belong to."""
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    cores, load = os.cpu_count(), os.getloadavg()[0]
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y-%m-%d %H:%M} UTC, {cores} cores, load {load:.1f}, Python {platform.python_version()}, " + (
        revision.stdout.strip() or "no git"
    )


if __name__ == "__main__":
    sys.exit(main())
