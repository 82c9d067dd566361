"""64 vGPUs on one simulated GPU: what a cold request waits for, and what serving them all at once costs.

    python -m benchmarks.micro.contention [--vgpus 64] [--samples 1000] [--seconds 5] [--trace FILE]

Real node, GPU Server, brokers and hooks; only the GPU is simulated. *Cold*: programs in eight vGPUs launch an empty
kernel in turns, some milliseconds apart, so that each finds the lease with another one; how long cuLaunchKernel took,
beside the same programs without vGPUs. The scheduler is in that path, in Python; ``benchmarks.micro.native`` has
the path without it. *Contending*: a program in every vGPU wants all the time; CPU time of the GPU Server and of all
brokers, in percent of one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer

from benchmarks.micro.native import cpu_ns
from benchmarks.node import Node, plain_environment
from benchmarks.suite.report.stats import percentile
from vgpu.ctl.programs import attachment
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec

START_S = 90.0
TURNS = 8  # vGPUs that take turns in asking
LAUNCHER = """
import random, sys, time
from ctypes import c_uint64
from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import PTX
gpu = Gpu(PTX)
tiny = Kernel(gpu, "tiny", 1, 32, (c_uint64(0),))
tiny.launch()
gpu.synchronize()
dice = random.Random(1)
for line in sys.stdin:
    time.sleep(0.003 + 0.003 * dice.random())
    began_ns = time.perf_counter_ns()
    tiny.launch()
    print(time.perf_counter_ns() - began_ns, flush=True)
    gpu.synchronize()
"""


def made(node: Node, count: int) -> list[VgpuStatus]:
    with ControlLink(node.control_socket) as link:
        return [
            link.create(VgpuSpec.parse(sm_percent="1", memory_bytes="256M", burst=True, name=f"one-{i}"))
            for i in range(count)
        ]


def launches_us(environments: Sequence[dict[str, str]], samples: int) -> list[float]:
    """What each launch after some milliseconds of idleness took, in programs with these environments, in turns."""
    with ExitStack() as owned:
        programs = []
        for environment in environments:
            program = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            owned.callback(program.communicate)
            programs.append(program)
        watchdog = Timer(60 + samples * 0.05, kill, (programs,))
        owned.callback(watchdog.cancel)
        watchdog.start()
        found = []
        for index in range(samples + len(programs)):
            program = programs[index % len(programs)]
            assert program.stdin is not None
            assert program.stdout is not None
            print("go", file=program.stdin, flush=True)
            found.append(int(program.stdout.readline()) / 1e3)
        return found[len(programs) :]  # its first is no program's best


def kill(programs: Sequence[subprocess.Popen[str]]) -> None:
    for program in programs:
        program.kill()


def cold(node: Node, vgpus: list[VgpuStatus], samples: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    inside = [attachment([vgpu]).environment(os.environ) for vgpu in vgpus[:TURNS]]
    before = tokens(node)
    for name, environments in (("cold", inside), ("direct", [plain_environment(node)] * len(inside))):
        took = launches_us(environments, samples)
        figures |= {f"{name}_p50_us": percentile(took, 50), f"{name}_p99_us": percentile(took, 99)}
    return figures | {"leases_per_request": (tokens(node) - before) / samples}


def tokens(node: Node) -> int:
    with ControlLink(node.control_socket) as link:
        return sum(vgpu.tokens for vgpu in link.list())


@contextmanager
def contending(node: Node, vgpus: list[VgpuStatus], seconds: float) -> Iterator[None]:
    """A program in every vGPU that wants all the time; inside, all of them do."""
    command = [sys.executable, "-m", "vgpu.workload", "--mode", "compute", "--seconds", f"{START_S + seconds + 30:g}"]
    with tempfile.TemporaryFile() as said:
        programs = [
            subprocess.Popen(command, env=attachment([vgpu]).environment(os.environ), stdout=said, stderr=said)
            for vgpu in vgpus
        ]
        try:
            deadline = time.monotonic() + START_S
            with ControlLink(node.control_socket) as link:
                while sum(vgpu.wants for vgpu in link.list()) < len(vgpus):
                    if time.monotonic() > deadline or any(program.poll() is not None for program in programs):
                        said.seek(0)
                        raise RuntimeError(f"the programs did not all start:\n{said.read().decode()[-3000:]}")
                    time.sleep(0.2)
            yield
        finally:
            for program in programs:
                program.kill()
            for program in programs:
                program.wait()


def cost(node: Node, seconds: float) -> dict[str, float]:
    """CPU time of the GPU Server and all its brokers over ``seconds``, in percent of a core; leases a second, and
    events that the scheduler was told of."""
    with ControlLink(node.control_socket) as link:
        (gpu,), vgpus = link.gpus(), link.list()
        assert gpu.server_pid is not None
        server = Path(f"/proc/{gpu.server_pid}")
        brokers = [Path(f"/proc/{vgpu.broker_pid}") for vgpu in vgpus]

        def reading() -> tuple[float, int, int, int, int, int]:
            tokens, (gpu,) = sum(vgpu.tokens for vgpu in link.list()), link.gpus()
            dispatcher_ns = cpu_ns(server, "vgpu-dispatch")
            brokers_ns = sum(map(cpu_ns, brokers))
            return time.monotonic(), cpu_ns(server), dispatcher_ns, brokers_ns, tokens, gpu.events_heard

        before = reading()
        time.sleep(seconds)
        told = (b - a for a, b in zip(before, reading(), strict=True))
        passed, server_ns, dispatcher_ns, brokers_ns, tokens, events = told
    return {
        "server_percent": server_ns / passed / 1e7,
        "dispatcher_percent": dispatcher_ns / passed / 1e7,
        "brokers_percent": brokers_ns / passed / 1e7,
        "cpu_percent": (server_ns + brokers_ns) / passed / 1e7,
        "leases_per_second": tokens / passed,
        "events_per_second": events / passed,
    }


def measure(count: int, samples: int, seconds: float, trace: Path | None = None) -> Iterator[dict[str, float]]:
    """The figures of cold requests, then those of contention; ``trace``: where a second of that is kept, afterwards."""
    with Node(simulate=1) as node:
        vgpus = made(node, count)
        yield cold(node, vgpus, samples)
        with contending(node, vgpus, seconds):
            yield cost(node, seconds)
            if trace is not None:
                node.run("trace", "--seconds", "1", "-o", str(trace))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vgpus", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a second of contention, for ui.perfetto.dev")
    options = parser.parse_args()
    print(f"{options.vgpus} vGPUs, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    for figures in measure(options.vgpus, options.samples, options.seconds, options.trace):
        for name, value in figures.items():
            print(f"  {name:<20} {value:10.1f}", flush=True)


if __name__ == "__main__":
    main()
