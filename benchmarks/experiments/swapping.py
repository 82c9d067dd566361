"""vGPUs that together own more than the card, swapped: what a move costs, and what taking turns does.

    python -m benchmarks.experiments.swapping [--gib 60] [--vgpus 3] [--host-memory 64] [--rounds 3] [--work 10]
        [--suspend 20]
    python -m benchmarks.experiments.swapping --simulate     (MiB instead of GiB: a rehearsal)

First one vGPU of ``--suspend`` GiB is suspended and resumed, three times: the first time its host memory is pinned.
Then each of ``--vgpus`` programs, alone and without a vGPU, for the time that they would take one after the other; then
all at once. Each allocates ``--gib`` in blocks of a GiB, and in every round writes all of it (a number of its own into
each piece of 2 MiB), works for ``--work`` seconds of GPU time (by writing it again and again), and looks into every
piece. Figures come from the server's events, times from this process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from benchmarks.node import Node, plain_environment
from benchmarks.suite.report.stats import percentile
from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import EventReading
from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX

PIECE: Final = 2 << 20
ATTEMPTS: Final = 3
MOVES: Final = ("swapped-out", "swapped-in")


def program(unit: int, count: int, rounds: int, work_s: float) -> None:
    """One tenant; says a line after its allocations, and after each round how long that took."""
    gpu = Gpu(PTX)
    blocks = [gpu.allocate(unit) for _ in range(count)]
    if None in blocks:
        raise SystemExit("the card has no room for it")
    step = min(PIECE, unit)
    pieces = [address + at for address in blocks if address is not None for at in range(0, unit, step)]
    first, last = gpu.event(), gpu.event()

    def write(salt: int) -> None:
        for index, at in enumerate(pieces):
            value = ctypes.c_uint((index * 2654435761 + salt) & 0xFFFFFFFF)
            gpu.call("cuMemsetD32Async", ctypes.c_uint64(at), value, ctypes.c_size_t(step // 4), gpu.stream)

    print("allocated", flush=True)
    for number in range(rounds):
        sys.stdin.readline()
        began, busy_ns = time.monotonic(), 0
        while busy_ns == 0 or busy_ns < work_s * 1e9:
            gpu.record(first)
            write(number)
            gpu.record(last)
            gpu.synchronize()
            busy_ns += gpu.elapsed_ns(first, last)
        wrong = 0
        for index, at in enumerate(pieces):
            expected = ((index * 2654435761 + number) & 0xFFFFFFFF).to_bytes(4, "little")
            wrong += gpu.read(at, 4) != expected or gpu.read(at + step - 4, 4) != expected
        print(json.dumps({"seconds": time.monotonic() - began, "busy_s": busy_ns / 1e9, "wrong": wrong}), flush=True)


class Tenant:
    """A program in a process of its own."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.rounds: list[dict[str, float]] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        if not found:
            raise RuntimeError(f"a program ended: exit code {self.process.wait()}")
        return found

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def hear(self) -> None:
        self.rounds.append(json.loads(self.line()))

    def __enter__(self) -> Tenant:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Moves:
    """What the server tells of moves, while the context lasts."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.events: list[EventReading] = []

    def __enter__(self) -> Moves:
        self._link = ControlLink(self._node.control_socket)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def _listen(self) -> None:
        with suppress(VgpuError):  # the node ends
            for notice in self._link.watch(snapshots=False, events=True):
                if notice.event is not None:
                    self.events.append(notice.event)

    def __exit__(self, *_: object) -> None:
        time.sleep(0.2)

    def told(self) -> dict[str, float]:
        """Moves and their rates in GB/s, without what was spent on pinning host memory; seconds of it all."""
        found: dict[str, float] = {}
        for kind in MOVES:
            moves = [e.fields for e in self.events if e.kind == kind and float(e.fields["memory_bytes"]) > 0]
            seconds = [float(m["seconds"]) - float(m["pinning_seconds"]) for m in moves]
            rates = [float(m["memory_bytes"]) / s / 1e9 for m, s in zip(moves, seconds, strict=True) if s > 0]
            found[f"{kind}"] = len(moves)
            found[f"{kind}_s"] = sum(seconds)
            found[f"{kind}_pinning_s"] = sum(float(m["pinning_seconds"]) for m in moves)
            if rates:
                found[f"{kind}_gb_per_s"] = percentile(rates, 50)
                found[f"{kind}_worst_gb_per_s"] = min(rates)
        return found


def tenant_argv(args: argparse.Namespace, gib: int, rounds: int, work_s: float) -> list[str]:
    own = ["--program", str(args.unit), str(gib), str(rounds), str(work_s)]
    return [sys.executable, "-m", "benchmarks.experiments.swapping", *own]


@contextmanager
def tenant_of(node: Node, argv: list[str], gib: int, unit: int, percent: float) -> Iterator[tuple[Tenant, str]]:
    memory = str(gib * unit + (1 << 30))
    vgpu_id = node.run("create", "--sm", f"{percent:g}", "--mem", memory, "--oversubscribe", "swap").strip()
    with Tenant([*node.vgpuctl, "exec", vgpu_id, "--", *argv], node.environment) as tenant:
        tenant.line()
        yield tenant, vgpu_id
    node.run("rm", "-f", vgpu_id)


def suspend_and_resume(node: Node, args: argparse.Namespace) -> None:
    argv = tenant_argv(args, args.suspend, 2 * ATTEMPTS, 0)
    with tenant_of(node, argv, args.suspend, args.unit, 50) as (tenant, vgpu_id), Moves(node) as moves:
        link = ControlLink(node.control_socket, timeout_s=120)
        for attempt in range(ATTEMPTS):
            tenant.go()
            tenant.hear()
            before_s = tenant.rounds[-1]["seconds"]
            began = time.monotonic()
            link.suspend(vgpu_id)
            suspended = time.monotonic()
            link.resume(vgpu_id)
            resumed = time.monotonic()
            tenant.go()  # what was swapped comes back when it is needed
            tenant.hear()
            figures = {"attempt": attempt, "suspend_s": suspended - began, "resume_s": resumed - suspended}
            figures |= {"round_s": tenant.rounds[-1]["seconds"], "round_before_s": before_s}
            print(json.dumps(figures), flush=True)
        began = time.monotonic()
        node.run("suspend", vgpu_id)
        by_command_s = time.monotonic() - began
        began = time.monotonic()
        node.run("ls")
        print(json.dumps({"suspend_by_command_s": by_command_s, "ls_s": time.monotonic() - began}), flush=True)
        link.close()
        wrong = sum(r["wrong"] for r in tenant.rounds)
    print(json.dumps({"suspend_gib": args.suspend, "wrong": wrong} | moves.told()), flush=True)


def in_turns(node: Node, args: argparse.Namespace) -> None:
    argv = tenant_argv(args, args.gib, args.rounds, args.work)
    serial = []
    with Tenant(argv, plain_environment(node if node.simulated else None)) as alone:
        alone.line()
        for _ in range(args.rounds):
            alone.go()
            alone.hear()
            serial.append(alone.rounds[-1]["seconds"])
    serial_s = args.vgpus * sum(serial)
    with Moves(node) as moves:
        began = time.monotonic()
        tenants: list[Tenant] = []
        with ExitStack() as owned:
            for _ in range(args.vgpus):
                each = tenant_of(node, argv, args.gib, args.unit, 90 / args.vgpus)
                tenants.append(owned.enter_context(each)[0])
                print(json.dumps({"allocated_after_s": time.monotonic() - began}), flush=True)
            began = time.monotonic()

            def run(tenant: Tenant) -> None:
                for _ in range(args.rounds):
                    tenant.go()
                    tenant.hear()

            threads = [threading.Thread(target=run, args=(tenant,)) for tenant in tenants]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            total_s = time.monotonic() - began
            host_bytes = json.loads(node.run("gpu", "ls", "-o", "json"))[0]["host_memory_bytes"]
    told = moves.told()
    moving_s = told["swapped-out_s"] + told["swapped-in_s"]
    figures = {
        "vgpus": args.vgpus,
        "gib": args.gib,
        "rounds": sum(len(t.rounds) for t in tenants),
        "wrong": sum(r["wrong"] for t in tenants for r in t.rounds),
        "host_memory_bytes": host_bytes,
        "serial_s": serial_s,
        "total_s": total_s,
        "of_serial": total_s / serial_s,
        "moving_of_total": moving_s / total_s,
    }
    print(json.dumps(figures | told), flush=True)


def leave_little(node: Node, args: argparse.Namespace) -> None:
    """Of a simulated card: room for what 140 GiB are to 60, in MiB, promised to somebody who does not need the rest."""
    from cython_ext.simengine import Engine

    engine = Engine(node.directory / "run" / "sim")
    room = args.gib * 140 // 60 * args.unit + args.vgpus * engine.context_bytes
    node.run("create", "--sm", "5", "--mem", str(engine.memory_bytes - room))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=60, help="what each vGPU owns")
    parser.add_argument("--vgpus", type=int, default=3)
    parser.add_argument("--host-memory", type=int, default=64, help="GiB for what is away")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=float, default=10.0, metavar="SECONDS", help="GPU time of a round")
    parser.add_argument("--suspend", type=int, default=20, help="GiB of the vGPU that is suspended; 0: none is")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--program", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        unit, count, rounds, work_s = args.program
        program(int(unit), int(count), int(rounds), float(work_s))
        return 0
    args.unit = 1 << 20 if args.simulate else 1 << 30
    options = ("--host-memory", str(args.host_memory * args.unit + (128 << 20) * args.simulate))
    with Node(simulate=int(args.simulate), options=options) as node:
        if args.simulate:
            leave_little(node, args)
        if args.suspend:
            suspend_and_resume(node, args)
        in_turns(node, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
