"""Light programs side by side on the simulated GPU: without vGPUs, under shared leases, and in turns.

    python -m benchmarks.micro.light [--programs 3] [--seconds 3] [--rounds 3]

Each program launches kernels of 0.1 ms, waits for them, and then sleeps in place of its host's work. Prints steps a
second of all together, and the p99 of a step, as medians of the rounds; the three ways take turns. The host's time is
slept, so that a machine of two cores can run three of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Final

from tests.integration.node import ROOT, SimulatedNode
from vgpu.ctl.programs import attachment
from vgpu.spec import VgpuSpec

WORKS: Final = ((10, 3.0), (20, 5.0), (20, 3.0), (5, 1.0))
"""(Kernels of 0.1 ms, then ms of the host.)"""
WAYS: Final = ("time slicing", "auto", "exclusive")

PROGRAM: Final = """
import json, sys, time
from tests.hook.app import App
kernels, host_ms, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
app = App()
kernel = app.kernel(0.1)
def run(seconds):
    steps, until = [], time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        for _ in range(kernels):
            kernel.launch()
        app.synchronize()
        time.sleep(host_ms / 1e3)
        steps.append(time.monotonic() - began)
    return sorted(steps)
run(1)
steps = run(seconds)
print(json.dumps([len(steps) / seconds, 1e3 * steps[len(steps) * 99 // 100]]))
"""


def once(node: SimulatedNode, way: str, programs: int, work: tuple[int, float], seconds: float) -> tuple[float, float]:
    """Steps a second of all, and the worst program's p99 of a step in ms."""
    with node.link() as link:
        spec = VgpuSpec.parse(sm_percent=99 // programs, memory_bytes="1G", lease="auto" if way == WAYS[0] else way)
        vgpus = [link.create(spec) for _ in range(programs)]
    environments = [attachment([vgpu]).environment(node.environment) for vgpu in vgpus]
    if way == WAYS[0]:
        for environment in environments:
            del environment["LD_PRELOAD"], environment["VGPU_ID"]
    command = [sys.executable, "-c", PROGRAM, str(work[0]), str(work[1]), str(seconds)]
    started = [subprocess.Popen(command, env=e, cwd=ROOT, stdout=subprocess.PIPE, text=True) for e in environments]
    said = [json.loads(one.communicate()[0]) for one in started]
    with node.link() as link:
        for vgpu in vgpus:
            link.remove(vgpu.vgpu_id, force=True)
    return sum(rate for rate, _ in said), max(p99 for _, p99 in said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'kernels, host':<16}" + "".join(f"{way:>26}" for way in WAYS))
    with SimulatedNode() as node:
        for work in WORKS:
            seen: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    seen[way].append(once(node, way, args.programs, work, args.seconds))
            cells = []
            for way in WAYS:
                rate = statistics.median(rate for rate, _ in seen[way])
                ratio = statistics.median(a[0] / b[0] for a, b in zip(seen[way], seen[WAYS[0]], strict=True))
                p99 = statistics.median(p99 for _, p99 in seen[way])
                cells.append(f"{f'{rate:.0f}/s {100 * ratio:.1f} % p99 {p99:.1f}':>26}")
            print(f"{f'{work[0]} x 0.1, {work[1]:g}':<16}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
