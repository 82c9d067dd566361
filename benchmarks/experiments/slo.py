"""A decode server of high priority beside a batch of low priority: what ``--slo`` does for its steps, and its cost.

    python -m benchmarks.experiments.slo [--rounds 5] [--seconds 20] [--load 0.5] [--priority high] [--tpot auto]
    python -m benchmarks.experiments.slo --simulate [--rounds 1] [--seconds 4]     (a rehearsal)

Two programs run all the time, each in a vGPU. The server answers requests at times of its own: a prefill of kernels of
1 ms, then decode steps, each a captured graph, a copy of a token to the host, and a wait. The batch launches kernels
of 1 ms in long rows. In each round come, in turn: the batch alone, the server alone, both without ``--slo``, both with
it. A step counts from the end of the step before it.

The part of "what is left" that the batch keeps is its rate ÷ (its rate alone × (1 − the server's GPU time)). The
server's GPU time is what its steps and prefills take by themselves, between device events.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from statistics import median
from typing import Any, Final

from benchmarks.dialogue import Dialogue
from benchmarks.node import Node
from benchmarks.suite.report.stats import percentile
from vgpu.node.link import ControlLink
from vgpu.spec import VgpuChanges
from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.jobs import timed_ns
from vgpu.workload.kernels import BLOCKS_PER_SM, PTX, THREADS

PHASES: Final = ("batch alone", "alone", "without --slo", "with --slo")
STEP_BAR: Final = 1.15
KEPT_BAR: Final = 0.85
RELAXED: Final = 2


def kernel_of(gpu: Gpu, kernel_ms: float) -> Kernel:
    """A kernel on all SMs that takes about so long alone."""
    iterations = c_uint32(256)
    kernel = Kernel(
        gpu, "compute", gpu.sm_count * BLOCKS_PER_SM, THREADS, (c_uint64(gpu.allocate(4096) or 0), iterations)
    )
    kernel.launch()
    for _ in range(2):
        iterations.value = max(1, round(iterations.value * kernel_ms * 1e6 / timed_ns(gpu, kernel.launch)))
    return kernel


class Decoder:
    """The server's work: a graph for each token, and rows of kernels for prefills."""

    def __init__(self, step_ms: float, step_kernels: int, prefill_ms: float) -> None:
        self.gpu = gpu = Gpu(PTX)
        small, self.prefill_kernels = kernel_of(gpu, step_ms / step_kernels), max(1, round(prefill_ms))
        self.part = kernel_of(gpu, 1.0)
        graph, self.executable = c_void_p(), c_void_p()
        gpu.call("cuStreamBeginCapture_v2", gpu.stream, RELAXED)
        for _ in range(step_kernels):
            small.launch()
        gpu.call("cuStreamEndCapture", gpu.stream, byref(graph))
        gpu.call("cuGraphInstantiateWithFlags", byref(self.executable), graph, c_uint64(0))
        self.token, self.host = gpu.allocate(4096), ctypes.create_string_buffer(64)
        self.step()
        self.step_ns = timed_ns(gpu, lambda: gpu.call("cuGraphLaunch", self.executable, gpu.stream))
        self.prefill_ns = self.prefill_kernels * timed_ns(gpu, self.part.launch)

    def token_to_host(self) -> None:
        self.gpu.call("cuMemcpyDtoHAsync_v2", self.host, c_uint64(self.token or 0), c_size_t(16), self.gpu.stream)
        self.gpu.call("cuStreamSynchronize", self.gpu.stream)

    def step(self) -> None:
        self.gpu.call("cuGraphLaunch", self.executable, self.gpu.stream)
        self.token_to_host()

    def prefill(self) -> None:
        for _ in range(self.prefill_kernels):
            self.part.launch()
        self.token_to_host()


def serve(args: argparse.Namespace) -> None:
    """Answer requests for as long as each line says, and print what that took."""
    decoder, dice = Decoder(args.step_ms, args.step_kernels, args.prefill_ms), random.Random(1)
    service_s = (decoder.prefill_ns + args.tokens * (decoder.step_ns + args.host_us * 1000)) / 1e9
    print(json.dumps({"step_ms": decoder.step_ns / 1e6, "prefill_ms": decoder.prefill_ns / 1e6}), flush=True)
    for line in sys.stdin:
        steps: list[float] = []
        firsts: list[float] = []
        began = due = time.monotonic()
        while (now := time.monotonic()) < began + float(line):
            time.sleep(max(0.0, due - now))
            asked = max(due, began)
            due += service_s / args.load * dice.uniform(0.7, 1.3)
            decoder.prefill()
            ended = time.monotonic()
            firsts.append(1e3 * (ended - asked))
            for _ in range(args.tokens):
                until = time.monotonic() + args.host_us / 1e6
                while time.monotonic() < until:
                    pass
                decoder.step()
                last, ended = ended, time.monotonic()
                steps.append(1e3 * (ended - last))
        wall_s = time.monotonic() - began
        used_s = (len(steps) * decoder.step_ns + len(firsts) * decoder.prefill_ns) / 1e9
        found = {"steps": steps, "firsts": firsts, "used": used_s / wall_s}
        print(json.dumps(found), flush=True)


def batch(args: argparse.Namespace) -> None:
    """Launch rows of kernels while a line says "go"; each "stop" is answered by the kernels per second since."""
    gpu = Gpu(PTX)
    kernel, working, done = kernel_of(gpu, args.batch_kernel_ms), threading.Event(), [0]
    context = c_void_p()
    gpu.call("cuCtxGetCurrent", byref(context))

    def work() -> None:
        gpu.call("cuCtxSetCurrent", context)
        while working.wait():
            for _ in range(args.row):
                kernel.launch()
            gpu.call("cuStreamSynchronize", gpu.stream)
            done[0] += args.row

    threading.Thread(target=work, daemon=True).start()
    print(json.dumps({}), flush=True)
    before, since = 0, time.monotonic()
    for line in sys.stdin:
        if line.strip() == "go":
            before, since = done[0], time.monotonic()
            working.set()
        else:
            working.clear()
            rate = (done[0] - before) / (time.monotonic() - since)
            print(json.dumps({"rate": rate}), flush=True)


def program(node: Node, vgpu_id: str, what: str, given: list[str]) -> Dialogue:
    """One of the two, in a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.experiments.slo", "--program", what, *given]
    return Dialogue([*node.vgpuctl, "exec", vgpu_id, "--", *argv], node.environment, what)


@contextmanager
def programs(node: Node, args: argparse.Namespace, given: list[str]) -> Iterator[tuple[str, Dialogue, Dialogue]]:
    """The server's vGPU, and the two programs."""
    high = ["--sm", f"{args.sm:g}", "--mem", "2G", "--burst", "--priority", args.priority]
    low = ["--sm", f"{args.low_sm:g}", "--mem", "2G", "--burst", "--priority", args.low_priority]
    server_id, beside_id = (node.run("create", *options).strip() for options in (high, low))
    with program(node, server_id, "server", given) as server, program(node, beside_id, "batch", given) as beside:
        yield server_id, server, beside


def phase(name: str, server: Dialogue, beside: Dialogue, seconds: float) -> dict[str, Any]:
    """One phase; figures in milliseconds."""
    found: dict[str, Any] = {"phase": name}
    if name != "alone":
        beside.send("go")
    if name == "batch alone":
        time.sleep(seconds)
    else:
        time.sleep(0.5)
        if name != "alone":
            beside.send("go")  # its kernels count from here on
        server.send(str(seconds))
        found |= server.answer()
    if name != "alone":
        beside.send("stop")
        found |= beside.answer()
    time.sleep(0.3)  # its last row ends
    return found


def figures(args: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, float | str]]:
    """A row for each phase with the server: the median of the rounds of each figure."""
    rate = median(one["rate"] for one in found["batch alone"])
    alone = median(percentile(one["steps"], 99) for one in found["alone"])
    rows: list[dict[str, float | str]] = []
    for name in PHASES[1:]:
        rounds = found[name]
        p99 = median(percentile(one["steps"], 99) for one in rounds)
        row: dict[str, float | str] = {
            "phase": name,
            "steps": sum(len(one["steps"]) for one in rounds),
            "step_p50_ms": round(median(percentile(one["steps"], 50) for one in rounds), 3),
            "step_p99_ms": round(p99, 3),
            "p99_of_alone": round(p99 / alone, 3),
            "p99_of_alone_worst": round(max(percentile(one["steps"], 99) for one in rounds) / alone, 3),
            "first_p50_ms": round(median(percentile(one["firsts"], 50) for one in rounds), 2),
            "first_p99_ms": round(median(percentile(one["firsts"], 99) for one in rounds), 2),
            "server_gpu": round(median(one["used"] for one in rounds), 3),
        }
        if name != "alone":
            row["low_of_left"] = round(median(one["rate"] / (rate * (1 - one["used"])) for one in rounds), 3)
        rows.append(row)
    return rows


def measure(args: argparse.Namespace, given: list[str]) -> None:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in PHASES}
    with Node("temporal", int(args.simulate)) as node, programs(node, args, given) as (server_id, server, beside):
        facts = server.answer()
        beside.answer()
        print(json.dumps({"server": facts} | {"args": {k: v for k, v in vars(args).items() if k != "program"}}))
        with ControlLink(node.control_socket, timeout_s=60) as link:
            phase("alone", server, beside, min(args.seconds, 3.0))  # both learn lengths
            phase("without --slo", server, beside, min(args.seconds, 3.0))
            for number in range(args.rounds):
                for name in PHASES:
                    slo = "off"
                    if name == "with --slo":
                        usual_ms = median(percentile(one["steps"], 50) for one in found["alone"])
                        slo = (
                            f"tpot={round(1e6 * STEP_BAR * usual_ms)}ns" if args.tpot == "auto" else f"tpot={args.tpot}"
                        )
                    link.set(server_id, VgpuChanges.parse(slo=slo))
                    found[name].append(one := phase(name, server, beside, args.seconds))
                    said = {key: value for key, value in one.items() if not isinstance(value, list)}
                    if "steps" in one:
                        said |= {f"p{p}_ms": round(percentile(one["steps"], p), 3) for p in (50, 99)}
                    print(json.dumps({"round": number, "slo": slo} | said), flush=True)
            counts = link.inspect(server_id).vgpu.steps.model_dump()
    rows = figures(args, found)
    for row in rows:
        print(json.dumps(row))
    print(json.dumps({"counts": counts}))
    last = rows[-1]
    kept = float(last["low_of_left"]) >= KEPT_BAR
    print(f"p99 of a step with --slo: {last['p99_of_alone']} of alone (bar {STEP_BAR})")
    print(f"the low one keeps {last['low_of_left']} of what is left (bar {KEPT_BAR}): {'kept' if kept else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--load", type=float, default=0.5, help="part of the time in which the server answers")
    parser.add_argument("--tokens", type=int, default=64, help="of one answer")
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--step-kernels", type=int, default=100)
    parser.add_argument("--prefill-ms", type=float, default=60.0)
    parser.add_argument("--host-us", type=float, default=200.0, help="of the server's host, between two steps")
    parser.add_argument("--batch-kernel-ms", type=float, default=1.0)
    parser.add_argument("--row", type=int, default=60, help="kernels of the batch between two waits")
    parser.add_argument("--sm", type=float, default=80.0)
    parser.add_argument("--low-sm", type=float, default=20.0)
    parser.add_argument("--priority", default="high")
    parser.add_argument("--low-priority", default="low")
    parser.add_argument("--tpot", default="auto", help=f"auto: {STEP_BAR} x the median of a step alone")
    parser.add_argument("--program", choices=("server", "batch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    given = [word for word in sys.argv[1:] if word != "--simulate"]
    if args.program == "server":
        serve(args)
    elif args.program == "batch":
        batch(args)
    else:
        measure(args, given)


if __name__ == "__main__":
    main()
