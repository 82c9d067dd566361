"""Several processes in one vGPU: does each get the same, and does their vGPU get no more and no less than its share?

    python -m benchmarks.micro.siblings [--gpu] [--seconds 8]      (about two minutes; simulated unless --gpu)

Two vGPUs of 50 %, everybody saturating: one, two and three processes in the first, one in the second; in temporal and
in spatial mode. *Each*: parts of the first vGPU's finished work. *Vgpu*: what it got of the work of both. *Total*: the
work of both, against that of one process in each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from benchmarks.node import Node

START_S = 6.0  # from now, for all: context, module, calibration


def measure(node: Node, seconds: float, siblings: int) -> tuple[list[float], float]:
    """Work per second of each process of the first vGPU, and of the second's."""
    vgpus = [node.run("create", "--sm", "50", "--mem", "16G").strip() for _ in range(2)]
    start_ns = time.monotonic_ns() + int(START_S * 1e9)
    work = [
        sys.executable,
        "-m",
        "vgpu.workload",
        "--seconds",
        str(seconds),
        "--start-at-ns",
        str(start_ns),
        "-o",
        "json",
    ]
    processes = [
        subprocess.Popen(
            [*node.vgpuctl, "exec", vgpu, "--", *work], env=node.environment, stdout=subprocess.PIPE, text=True
        )
        for vgpu in [vgpus[0]] * siblings + [vgpus[1]]
    ]
    rates = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1])["work_per_second"] for p in processes]
    node.run("rm", "-f", *vgpus)
    return rates[:-1], rates[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the real GPU instead of a simulated one")
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    print(f"{'mode':10}{'processes':>10}  {'each':24}{'vgpu':>8}{'total':>8}")
    for mode in ("temporal", "spatial"):
        with Node(mode, 0 if options.gpu else 1) as node:
            alone = 0.0
            for siblings in (1, 2, 3):
                each, other = measure(node, options.seconds, siblings)
                mine = sum(each)
                alone = alone or mine + other
                parts = " ".join(f"{rate / mine:.1%}" for rate in each)
                print(
                    f"{mode:10}{siblings:>10}  {parts:24}{mine / (mine + other):>8.1%}{(mine + other) / alone:>8.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
