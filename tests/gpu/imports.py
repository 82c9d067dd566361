"""What the driver and NVML say about memory that two processes import, with and without its owner. Run plain; it prints
lines of JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
from multiprocessing import get_context
from typing import Any

import pynvml

from vgpu.models.cuda import READ, READ_WRITE, Card, Mapping

SIZE = 4 << 30
WAIT_S = 20.0


def shown(pids: dict[str, int]) -> dict[str, float]:
    """GiB by process, and of the whole card."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    by_pid = {one.pid: one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    found = {name: round(by_pid.get(pid, 0) / 2**30, 2) for name, pid in pids.items()}
    return found | {"card": round(pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30, 2)}


def say(name: str, *values: object) -> None:
    print(json.dumps([name, *values]), flush=True)


def owner(pipe: Any, ends: list[socket.socket]) -> None:
    card = Card()
    card.enter()
    handle = card.create(SIZE)
    assert handle is not None
    mapping = Mapping(card, handle, SIZE)
    assert mapping.allow(READ_WRITE)
    card.call("cuMemcpyHtoD_v2", mapping.address, b"abcdefgh", 8)
    descriptor = card.exported(handle)
    for end in ends:
        socket.send_fds(end, [b"x"], [descriptor])
    pipe.send("shared")
    pipe.recv()


def importer(pipe: Any, end: socket.socket) -> None:
    card = Card()
    card.enter()
    pipe.send("context")
    descriptor = socket.recv_fds(end, 1, 1)[1][0]
    handle = card.imported(descriptor)
    os.close(descriptor)
    mapping = Mapping(card, handle, SIZE)
    card.release(handle)
    read_only = mapping.allow(READ)
    pipe.send([read_only, bytes(card.read(mapping.address, 8)).decode()])
    pipe.recv()
    pipe.send(bytes(card.read(mapping.address, 8)).decode())
    pipe.recv()
    code = card.result("cuMemcpyHtoD_v2", mapping.address, b"!", 1)
    pipe.send([code, card.result("cuCtxSynchronize")])
    pipe.recv()


def main() -> None:
    context = get_context("spawn")
    pairs = [socket.socketpair() for _ in "12"]
    pipes, processes = {}, {}
    for name, target, end in (("first", importer, pairs[0][1]), ("second", importer, pairs[1][1])):
        pipes[name], other = context.Pipe()
        processes[name] = context.Process(target=target, args=(other, end), daemon=True)
        processes[name].start()
        assert pipes[name].recv() == "context"
    pids = {name: process.pid or 0 for name, process in processes.items()}
    say("contexts alone", shown(pids))
    pipes["owner"], other = context.Pipe()
    processes["owner"] = context.Process(target=owner, args=(other, [pair[0] for pair in pairs]), daemon=True)
    processes["owner"].start()
    assert pipes["owner"].recv() == "shared"
    pids["owner"] = processes["owner"].pid or 0
    for name in ("first", "second"):
        say(f"{name}: read-only access, content", *pipes[name].recv())
    say("owner and two importers", shown(pids))
    processes["owner"].kill()
    processes["owner"].join()
    say("two importers", shown(pids))
    for name in ("first", "second"):
        pipes[name].send("read")
        say(f"{name}: content without the owner", pipes[name].recv())
    pipes["second"].send("write")
    try:
        wrote = pipes["second"].recv() if pipes["second"].poll(WAIT_S) else ["no answer"]
    except EOFError:
        wrote = ["it ended"]
    say("second: a write, and the wait after it", *wrote)
    processes["second"].kill()
    processes["second"].join()
    say("one importer", shown(pids))
    processes["first"].kill()
    processes["first"].join()
    say("none", shown(pids))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
