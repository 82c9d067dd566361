"""What a scrape of 64 vGPUs takes, and what it costs whom.

    python -m benchmarks.micro.metrics [--vgpus 64] [--scrapes 100]

A simulated GPU with a program in every vGPU that has a context and does nothing, the real exporter, and a scraper that
asks again and again. Times are the scraper's, as Prometheus would see them; CPU time per scrape is what a process used
meanwhile, less what it uses when nobody scrapes; in percent of a core at the usual interval of 5 s.
"""

from __future__ import annotations

import argparse
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.micro.contention import made
from benchmarks.micro.native import cpu_ns
from benchmarks.node import Node
from benchmarks.suite.report.stats import percentile
from vgpu.ctl.programs import attachment
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus

INTERVAL_S = 5.0
REST_S = 5.0
SITTER = """
import sys
from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX
gpu = Gpu(PTX)
print("there", flush=True)
sys.stdin.read()
"""
# As Prometheus asks.
ACCEPT = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5"


@contextmanager
def sitting(vgpus: list[VgpuStatus]) -> Iterator[None]:
    """A program with a context in every vGPU."""
    with ExitStack() as owned:
        programs = []
        for vgpu in vgpus:
            program = subprocess.Popen(
                [sys.executable, "-c", SITTER],
                env=attachment([vgpu]).environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            owned.callback(program.communicate)
            programs.append(program)
        for program in programs:
            assert program.stdout is not None
            if program.stdout.readline() != "there\n":
                raise RuntimeError("a program did not start")
        yield


@contextmanager
def exporter(node: Node) -> Iterator[tuple[int, http.client.HTTPConnection]]:
    """Its pid, and a connection to it that stays."""
    command = [*node.vgpuctl, "metrics", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, env=node.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().split()[-1])
        connection = http.client.HTTPConnection(url.netloc, timeout=30)
        try:
            yield process.pid, connection
        finally:
            connection.close()
            process.terminate()


def scrape(connection: http.client.HTTPConnection) -> tuple[float, bytes]:
    """How many ms it took, and what it said."""
    began_s = time.perf_counter()
    connection.request("GET", "/metrics", headers={"Accept": ACCEPT})
    text = connection.getresponse().read()
    return 1e3 * (time.perf_counter() - began_s), text


def cost_ms(
    spent_ns: Mapping[str, int], resting: Mapping[str, float], passed_s: float, scrapes: int
) -> dict[str, float]:
    return {name: (spent_ns[name] - resting[name] * passed_s) / 1e6 / scrapes for name in spent_ns}


def measure(vgpus: int, scrapes: int) -> Iterator[dict[str, float]]:
    with Node(simulate=1) as node, ExitStack() as owned:
        owned.enter_context(sitting(made(node, vgpus)))
        pid, connection = owned.enter_context(exporter(node))
        with ControlLink(node.control_socket) as link:
            (gpu,), node_pid = link.gpus(), link.welcome.pid
        assert gpu.server_pid is not None
        watched = {"server": gpu.server_pid, "node": node_pid, "exporter": pid}

        def used_ns() -> dict[str, int]:
            return {name: cpu_ns(Path(f"/proc/{number}")) for name, number in watched.items()}

        def spent(before: dict[str, int]) -> dict[str, int]:
            return {name: used - before[name] for name, used in used_ns().items()}

        for _ in range(5):  # what is made at the first scrapes
            _, text = scrape(connection)
        before, began_s = used_ns(), time.monotonic()
        time.sleep(REST_S)
        passed_s = time.monotonic() - began_s
        resting = {name: used / passed_s for name, used in spent(before).items()}
        before, began_s = used_ns(), time.monotonic()
        took_ms = [scrape(connection)[0] for _ in range(scrapes)]
        costs = cost_ms(spent(before), resting, time.monotonic() - began_s, scrapes)
        yield {"series": float(sum(not line.startswith(b"#") for line in text.splitlines())), "bytes": len(text)}
        yield {"scrape_p50_ms": percentile(took_ms, 50), "scrape_p99_ms": percentile(took_ms, 99)}
        yield {f"{name}_cpu_ms": cost for name, cost in costs.items()}
        yield {"server_percent": costs["server"] / INTERVAL_S / 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vgpus", type=int, default=64)
    parser.add_argument("--scrapes", type=int, default=100)
    options = parser.parse_args()
    print(f"{options.vgpus} vGPUs, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    for figures in measure(options.vgpus, options.scrapes):
        for name, value in figures.items():
            print(f"  {name:<20} {value:10.2f}", flush=True)


if __name__ == "__main__":
    main()
