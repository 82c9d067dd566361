"""What a request to a suspended server waits for, by its trigger; and what waiting vGPUs cost their GPU Server.

    python -m benchmarks.micro.triggers [--gpu] [--memory 1G] [--rounds 20] [--swap] [--waiting 1,8,32]

Real node, GPU Server, broker and hook; simulated GPU unless --gpu. A TCP server has memory on the GPU, and answers with
a word of it. *Noticed*: from the client's connect to the event ``resumed``, less what the driver took. *Answer*: to the
answer. *Waiting*: CPU of the GPU Server in percent of one core, by what suspended vGPUs wait for.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from contextlib import closing

import psutil

from benchmarks.node import Node
from benchmarks.suite.report.stats import percentile
from vgpu.ctl.programs import attachment
from vgpu.node.link import ControlLink
from vgpu.protocol.messages import VgpuStatus
from vgpu.spec import VgpuSpec
from vgpu.units import counted, parse_bytes

ANSWER_S = 120.0
COST_S = 5.0
SERVER = """
import ctypes, socket, sys
from vgpu.workload.driver import Gpu
from vgpu.workload.kernels import PTX
gpu = Gpu(PTX)
size = int(sys.argv[1])
block = gpu.allocate(size)
gpu.call("cuMemsetD8_v2", block, 7, size)
gpu.call("cuCtxSynchronize")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
word = ctypes.create_string_buffer(4)
while True:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1)
        gpu.call("cuMemcpyDtoH_v2", word, block + size - 4, 4)
        connection.sendall(word.raw)
"""


class Server:
    """A TCP server in a vGPU."""

    def __init__(self, node: Node, vgpu: VgpuStatus, memory_bytes: int) -> None:
        environment = attachment([vgpu]).environment(node.environment)
        argv = [sys.executable, "-c", SERVER, str(memory_bytes)]
        self.popen = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.port = int(self.popen.stdout.readline())

    def ask(self) -> tuple[float, float]:
        """When the client began, and when it had the answer; seconds since 1970."""
        began = time.time()
        with closing(socket.create_connection(("127.0.0.1", self.port), ANSWER_S)) as connection:
            connection.sendall(b"?")
            assert connection.recv(4) == bytes([7]) * 4, "its memory is not as it was"
        return began, time.time()


def requests(node: Node, link: ControlLink, rounds: int, memory_bytes: int, *, swap: bool) -> None:
    oversubscribe = "swap" if swap else None
    memory = memory_bytes + (2 << 30)
    vgpu = link.create(VgpuSpec.parse(sm_percent=50, memory_bytes=memory, oversubscribe=oversubscribe))
    server = Server(node, vgpu, memory_bytes)
    try:
        server.ask()
        print(f"{'trigger':12}{'noticed p50':>14}{'p99':>10}{'answer p50':>14}{'p99':>10}   ms, {rounds} rounds")
        for trigger in (f"tcp:{server.port}", "call"):
            noticed, answered = [], []
            for _ in range(rounds):
                link.suspend(vgpu.vgpu_id, [trigger])
                time.sleep(0.2)
                began, ended = server.ask()
                event = resumed(link, vgpu, began)
                noticed.append((event[0] - began - event[1]) * 1e3)
                answered.append((ended - began) * 1e3)
            cells = [f"{percentile(values, at):.1f}" for values in (noticed, answered) for at in (50, 99)]
            name = trigger.partition(":")[0]
            print(f"{name:12}{cells[0]:>14}{cells[1]:>10}{cells[2]:>14}{cells[3]:>10}", flush=True)
    finally:
        server.popen.kill()
        server.popen.wait()
        link.remove(vgpu.vgpu_id, force=True)


def resumed(link: ControlLink, vgpu: VgpuStatus, since_unix_s: float) -> tuple[float, float]:
    """When the vGPU was resumed, and how long the driver took."""
    while True:
        found = link.events(vgpu.vgpu_id, since_unix_s=since_unix_s, kinds=("resumed",))
        if found:
            return found[-1].at_unix_s, float(found[-1].fields["seconds"])
        time.sleep(0.01)


def cost(node: Node, link: ControlLink, count: int, *, swap: bool) -> None:
    oversubscribe = "swap" if swap else None
    spec = VgpuSpec.parse(sm_percent=1, memory_bytes="1G", oversubscribe=oversubscribe)
    vgpus = [link.create(spec) for _ in range(count)]
    servers = [Server(node, vgpu, 64 << 20) for vgpu in vgpus]
    try:
        percents = []
        for kind in ("", "call", "tcp"):
            for vgpu, server in zip(vgpus, servers, strict=True):
                trigger = f"tcp:{server.port}" if kind == "tcp" else kind
                link.suspend(vgpu.vgpu_id, [trigger] if trigger else [])
            time.sleep(2)
            process = psutil.Process(link.gpus()[0].server_pid)  # its threads that end meanwhile count, too
            process.cpu_percent()
            time.sleep(COST_S)
            percents.append(process.cpu_percent())
        without, call, tcp = (f"{percent:.1f}" for percent in percents)
        text = f"without a trigger {without}, call {call}, tcp {tcp} % of a core"
        print(f"{counted(count, 'suspended vGPU')}: {text}", flush=True)
    finally:
        for server in servers:
            server.popen.kill()
            server.popen.wait()
        for vgpu in vgpus:
            link.remove(vgpu.vgpu_id, force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the real GPU instead of a simulated one")
    parser.add_argument("--memory", default="1G", help="of the server, on the GPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--swap", action="store_true", help="the vGPU has --oversubscribe swap")
    parser.add_argument("--waiting", default="1,8", help="how many vGPUs wait at once; empty: not measured")
    options = parser.parse_args()
    with Node("temporal", 0 if options.gpu else 1) as node, ControlLink(node.control_socket) as link:
        requests(node, link, options.rounds, parse_bytes(options.memory), swap=options.swap)
        for count in filter(None, options.waiting.split(",")):
            cost(node, link, int(count), swap=options.swap)


if __name__ == "__main__":
    main()
