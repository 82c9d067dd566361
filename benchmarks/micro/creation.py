"""How long creations take side by side, and how much memory a broker has to itself. On a simulated GPU.

    python -m benchmarks.micro.creation [--many 20] [--rounds 3]

Prints, for each round, the time from the first request to the last answer, and then of the brokers' memory the
median: private (of that broker alone) and proportional (what is shared counted in parts), by /proc/PID/smaps_rollup.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.node import SimulatedNode
from vgpu.spec import VgpuSpec


def smaps_kib(pid: int) -> dict[str, int]:
    """KiB by name, of all mappings together."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.creation", description=__doc__)
    parser.add_argument("--many", type=int, default=20, help="vGPUs that are created at once")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with SimulatedNode() as node, ThreadPoolExecutor(arguments.many) as pool:
        spec = VgpuSpec.parse(sm_percent=1, memory_bytes="256M")

        def create(_: int) -> int:
            with node.link() as link:
                return link.create(spec).broker_pid or 0

        for number in range(arguments.rounds):
            began = time.monotonic()
            pids = list(pool.map(create, range(arguments.many)))
            print(f"round {number}: {arguments.many} creations in {time.monotonic() - began:.2f} s")
            if number == arguments.rounds - 1:
                found = [smaps_kib(pid) for pid in pids]
                private = statistics.median(one["Private_Dirty"] + one["Private_Clean"] for one in found)
                shared = statistics.median(one["Pss"] for one in found)
                print(f"a broker: {private / 1024:.1f} MiB private, {shared / 1024:.1f} MiB proportional")
            node.clear()


if __name__ == "__main__":
    main()
