"""What a vGPU adds to the start of a container and of a Slurm job, with podman and Slurm themselves, simulated GPUs.

    python -m benchmarks.micro.engines [--rounds 10] [--many 20]

Each row is the time from the command to the first output of the program, which only calls cuInit. The ways take turns;
the first round is left out. ``many``: so many containers at once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests.cluster import engines, roots
from tests.cluster.slurm import Cluster, why_no_slurm
from tests.integration.node import SimulatedNode
from vgpu.integrations.slurm import HOOKS
from vgpu.spec import VgpuSpec

Way = Callable[[int], float]
VGPUCTL = str(Path(sys.executable).with_name("vgpuctl"))


def timed_ms(way: Way, numbers: Iterable[int]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        return 1e3 * (max(pool.map(way, numbers)) - began)


def compare(ways: Mapping[str, Way], rounds: int, at_once: int = 1) -> None:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            taken[name].append(timed_ms(way, range(number * at_once, (number + 1) * at_once)))
    for name, every in taken.items():
        ms = every[1:]
        print(f"{name:<48} {statistics.median(ms):8.0f} {min(ms):8.0f} {max(ms):8.0f}", flush=True)


def call(*words: object, environment: Mapping[str, str] | None = None) -> float:
    """The moment of the program's first output; it is over when this returns."""
    pipe = subprocess.PIPE
    with subprocess.Popen([str(word) for word in words], stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        at = time.perf_counter()
        process.stdout.read()
        if process.wait() != 0 or not first:
            raise SystemExit(f"{words}: {process.stderr.read().decode()}")
    return at


def containers(folder: Path, probe: Path, rounds: int, many: int) -> None:
    if why := engines.why_no_podman(folder, probe):
        print(f"podman: {why}")
        return
    podman, root = engines.podman(folder), engines.make_root(folder, probe)
    with SimulatedNode(1) as node:
        with node.link() as link:
            shared = link.create(VgpuSpec.parse(sm_percent="1", memory_bytes="64M"), attach="mount")
            volumes = [word for volume in link.inspect(shared.vgpu_id).mounts for word in ("-v", volume)]

        def alone(_: int) -> float:
            return call(podman, "run", "--rm", "--rootfs", f"{root}:O", "/bin/env")

        def mounted(_: int) -> float:
            return call(podman, "run", "--rm", *volumes, "--rootfs", f"{root}:O", "/probe")

        def own(number: int) -> float:
            command = [VGPUCTL, "container", "run", "--sm", "1", "--mem", "64M", "--engine", podman]
            named = ["--name", f"c{number}", "--rm", "--rootfs", f"{root}:O", "/bin/env"]
            return call(*command, *named, environment=node.environment)

        compare({"podman run": alone, "in a vGPU that exists": mounted, "vgpuctl container run": own}, rounds)
        ways = {f"{many} at once, podman run": alone, f"{many} at once, vgpuctl container run": own}
        compare(ways, max(2, rounds // 4), many)


def jobs(folder: Path, rounds: int) -> None:
    if why := why_no_slurm():
        print(f"Slurm: {why}")
        return
    with Cluster(folder) as cluster:

        def job(*words: str) -> Way:
            return lambda _: call(
                "srun", "--quiet", "--nodelist=n1", *words, "echo", "x", environment=cluster.environment
            )

        ways = {"srun": job(), "srun --gres=shard:30": job("--gres=shard:30")}
        compare(ways, rounds)
        for name in HOOKS:
            (folder / name).write_text("#!/bin/sh\n")
        compare({f"{name}, without our hooks": way for name, way in ways.items()}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.engines", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--many", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{'':<48} {'median':>8} {'least':>8} {'most':>8}  ms of {arguments.rounds}")
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-"))) for _ in range(3)]
        containers(folders[0], roots.build_probe(folders[2]), arguments.rounds, arguments.many)
        jobs(folders[1], arguments.rounds)


if __name__ == "__main__":
    main()
