"""Coverage-guided fuzzing of the wire format and of each page, by Atheris (``pip install atheris``).

    python -m tests.fuzz [--minutes 10] [TARGET…]

Each target (targets.py) is a process of its own, which shares the minutes with the others. A finding ends the run with
exit code 1 and prints the input that made it, in hexadecimal digits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import TARGETS

SEEDS: dict[str, list[bytes]] = {
    "message": [b'{"op": "hello", "role": "control", "version": 2, "oldest_version": 1, "id": 1}'],
    "wire": [b"\xff\x0b\x00\x00\x00\x81\xa2op\xa5hello\xc0"],
}
MOST_BYTES = 4096


def fuzz(name: str, seconds: int, folder: Path) -> bool:
    """Whether the target held. The corpus grows in ``folder``."""
    corpus = folder / name
    corpus.mkdir()
    for number, seed in enumerate(SEEDS.get(name, [])):
        (corpus / str(number)).write_bytes(seed)
    argv = [sys.executable, "-m", "tests.fuzz.one", name, f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}"]
    argv += [f"-artifact_prefix={folder}/found-{name}-", "-timeout=20", "-print_final_stats=1", str(corpus)]
    ran = subprocess.run(argv, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    runs = next((line for line in ran.stderr.splitlines() if "number_of_executed_units" in line), "")
    print(f"{name:10} {runs.split(':')[-1].strip() or 'no'} inputs, exit code {ran.returncode}", flush=True)
    if ran.returncode:
        print(ran.stderr[-6000:], flush=True)
        for found in folder.glob(f"found-{name}-*"):
            print(f"{found.name}: {found.read_bytes().hex()}", flush=True)
    return ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown target {sorted(unknown)[0]!r}; there are {', '.join(TARGETS)}")
    wanted = options.targets or list(TARGETS)
    seconds = max(1, round(60 * options.minutes / len(wanted)))
    with tempfile.TemporaryDirectory(prefix="vgpu-fuzz-") as folder:
        held = [fuzz(name, seconds, Path(folder)) for name in wanted]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
