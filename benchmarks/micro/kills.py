"""After kill -9: how soon the lease is back, and how soon the memory.

    python -m benchmarks.micro.kills [--gpu] [--gib 0 8] [--rounds 5]

A victim with N GiB resident on the host, and a forked child that outlives it, works in a 90 % vGPU beside a sibling
in a 10 % one. It is killed mid-kernel, every other time while it also allocates and frees memory in a loop. Printed,
in ms, median and worst:

lease    from the kill to the sibling's next lease, which waits for the dead one's (the sibling's hook log says when);
         not counted where the sibling held a lease when the other was killed: then none had to come back
driver   from the kill until the driver shows the victim no more (NVML; on a simulated GPU: until the process is gone)
memory   from then until the vGPU's memory is given back (the GPU Server's event)

The sibling must finish what it began.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pynvml

from benchmarks.node import Node
from vgpu.errors import VgpuError
from vgpu.node.link import ControlLink

VICTIM = """
import os, sys, threading, time
ballast = bytearray(int(sys.argv[1]) << 30)
ballast[::4096] = b"x" * len(ballast[::4096])
if os.fork() == 0:
    time.sleep(60); os._exit(0)
import ctypes
def churn():
    driver = ctypes.CDLL("libcuda.so.1")
    device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver.cuInit(0); driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device); driver.cuCtxSetCurrent(context)
    while True:
        driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)); driver.cuMemFree_v2(pointer)
if sys.argv[2] == "1":
    threading.Thread(target=churn, daemon=True).start()
sys.argv = ["workload", "--mode", "compute", "--seconds", "60", "-o", "json"]
from vgpu.workload.__main__ import main
main()
"""
MEMORY = "4G"
WORKLOAD = (sys.executable, "-m", "vgpu.workload", "--mode", "compute", "--seconds", "600", "-o", "json")


def shown_by_nvml() -> Callable[[int], bool]:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda pid: any(p.pid == pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def attached_pids(node: Node) -> dict[str, int]:
    """vGPU name → pid of its process."""
    with ControlLink(node.control_socket) as link:
        names = {vgpu.vgpu_id: vgpu.name or "" for vgpu in link.list()}
        return {names[p.vgpu_id]: p.pid for p in link.processes().processes if p.alive}


class Returned(threading.Thread):
    """Listens for the event that says a pid's memory is free again."""

    def __init__(self, node: Node) -> None:
        super().__init__(daemon=True)
        self.at: dict[int, float] = {}
        self.link = ControlLink(node.control_socket, timeout_s=600)
        self.start()

    def run(self) -> None:
        with suppress(VgpuError):  # the node stops at the end
            for notice in self.link.watch(snapshots=False, events=True):
                if notice.event is not None and notice.event.kind == "detached":
                    self.at[int(notice.event.fields["pid"])] = notice.event.at_unix_s


def leases(log: Path) -> list[tuple[int, str]]:
    """The moments at which the sibling's leases began and had drained, in order."""
    said = (line.split() for line in log.read_text().splitlines())
    return [(int(words[0]), words[1]) for words in said if words[1:3] in (["lease", "begins"], ["drained", "epoch,"])]


def begins_after(log: Path, at_ns: int) -> int | None:
    return next((at for at, what in leases(log) if what == "lease" and at > at_ns), None)


def held_at(log: Path, at_ns: int) -> bool:
    before = [what for at, what in leases(log) if at <= at_ns]
    return bool(before) and before[-1] == "lease"


def wait_for(condition: Callable[[], bool], seconds: float = 60, every_s: float = 0.001) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("waited in vain")
        time.sleep(every_s)


def one_kill(
    node: Node, returned: Returned, shown: Callable[[int], bool], log: Path, gib: int, churn: bool
) -> tuple[float | None, float, float]:
    victim = subprocess.Popen(
        [*node.vgpuctl, "exec", "victim", "--", sys.executable, "-c", VICTIM, str(gib), str(int(churn))],
        env=node.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert victim.stdout is not None
    for line in victim.stdout:
        if '"progress"' in line:
            break
    pid = attached_pids(node)["victim"]
    time.sleep(0.3)
    killed_ns, killed_s = time.monotonic_ns(), time.time()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not shown(pid))
    gone_s = time.time()
    wait_for(lambda: pid in returned.at)
    wait_for(lambda: begins_after(log, killed_ns) is not None, 5, 0.05)
    began_ns = begins_after(log, killed_ns)
    assert began_ns is not None
    subprocess.run(["pkill", "-KILL", "-f", "ballast = bytearray"], check=False)  # the forked child
    victim.stdout.close()
    victim.wait()
    back_ms = None if held_at(log, killed_ns) else (began_ns - killed_ns) / 1e6
    return back_ms, (gone_s - killed_s) * 1e3, max(0.0, (returned.at[pid] - gone_s) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="on the real GPU")
    parser.add_argument("--gib", type=int, nargs="+", default=[0, 2], help="GiB of host memory resident in the victim")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with Node(simulate=0 if args.gpu else 1) as node:
        shown = shown_by_nvml() if args.gpu else runs
        returned = Returned(node)
        log = node.directory / "sibling.log"
        node.run("create", "--sm", "90", "--mem", MEMORY, "--name", "victim")
        sibling = subprocess.Popen(
            [*node.vgpuctl, "run", "--sm", "10", "--burst", "--mem", MEMORY, "--name", "sibling", "--", *WORKLOAD],
            env={**node.environment, "VGPU_HOOK_LOG": str(log)},
            stdout=subprocess.DEVNULL,
        )
        wait_for(lambda: "sibling" in attached_pids(node), every_s=0.1)
        names = "".join(f"{name + ' p50':>13}{'worst':>9}" for name in ("lease", "driver", "memory"))
        print(f"{'GiB resident':>12}{'kills':>7}{names}")
        for gib in args.gib:
            rounds = [one_kill(node, returned, shown, log, gib, bool(i & 1)) for i in range(args.rounds)]
            columns = [[v for v in column if v is not None] for column in zip(*rounds, strict=True)]
            cells = "".join(
                f"{statistics.median(c):13.2f}{max(c):9.2f}" if c else f"{'-':>13}{'-':>9}" for c in columns
            )
            print(f"{gib:12}{len(rounds):7}{cells}", flush=True)
        print("sibling:", "goes on" if sibling.poll() is None else f"ended with {sibling.returncode}")
        sibling.terminate()
        sibling.wait()


if __name__ == "__main__":
    main()
