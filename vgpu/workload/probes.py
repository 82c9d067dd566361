"""``python -m vgpu.workload.probes``: a program that tests a limit, and reports CUDA's answers.

``memory``: pieces of 2 MiB until one is refused. ``launches``: what a launch costs the host through the hook and
straight into the driver, in turns. ``idle``: what the program sees of the GPU; then it waits for the end of its input.
Every line is one JSON object with an ``event``: started, result or error, as those of ``python -m vgpu.workload``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from ctypes import c_void_p

from vgpu.workload.driver import CudaError, Gpu, Kernel
from vgpu.workload.kernels import PTX
from vgpu.workload.symboltable import address_of

PIECE_BYTES = 2 << 20
"""What the driver takes from the card at a time."""
BATCH = 100
"""Launches in one turn: below the driver's queue of about a thousand, so that none waits for the GPU. They are so few
that other processes on the core do not interrupt most turns."""
WARM_UP_TURNS = 20
"""The versions of ``dlsym``: glibc 2.34's, x86-64's and aarch64's before that."""
CONTEXT_KNOWN_S = 4.0
SETTLED_S = 1.2
"""The GPU Server reads what contexts take from NVML once a second."""
TRIALS = 3


def settled(gpu: Gpu) -> None:
    """Waits until the free memory does not change any more, because the program's own context is then charged."""
    free, total = gpu.memory_info()
    begin_s = since_s = time.monotonic()
    while time.monotonic() < begin_s + CONTEXT_KNOWN_S and (free == total or time.monotonic() < since_s + SETTLED_S):
        time.sleep(0.02)
        before, (free, total) = free, gpu.memory_info()
        if free != before:
            since_s = time.monotonic()


def memory(gpu: Gpu, most_pieces: int, limited: bool) -> dict[str, object]:
    """Pieces of 2 MiB until one is refused, or ``most_pieces``. ``refusal``: CUDA's name for it, "" where none was."""
    if limited:
        settled(gpu)
    for _ in range(TRIALS):
        found = _pieces(gpu, most_pieces)
        if found["freed_bytes"] == found["free_bytes"]:
            break  # else what the context takes was read anew meanwhile
    return found


def _pieces(gpu: Gpu, most: int) -> dict[str, object]:
    free, total = gpu.memory_info()
    pieces: list[int] = []
    refusal = ""
    while len(pieces) < most:
        address = ctypes.c_uint64()
        try:
            gpu.call("cuMemAlloc_v2", ctypes.byref(address), PIECE_BYTES)
        except CudaError as error:
            refusal = error.name
            break
        pieces.append(address.value)
    left, _ = gpu.memory_info()
    for piece in pieces:
        gpu.free(piece)
    freed, _ = gpu.memory_info()
    return {
        "total_bytes": total,
        "free_bytes": free,
        "pieces": len(pieces),
        "piece_bytes": PIECE_BYTES,
        "left_bytes": left,
        "freed_bytes": freed,
        "refusal": refusal,
    }


def past_the_hook(gpu: Gpu, name: str) -> Callable[..., int]:
    """The driver's own function, from the driver's symbol table: each door of the loader leads to the hook."""
    try:
        address = address_of("libcuda.so", name)
    except LookupError as error:
        raise CudaError(name, -1, str(error)) from error
    hooked = getattr(gpu.library, name)
    return ctypes.CFUNCTYPE(ctypes.c_uint, *hooked.argtypes)(address)


def launches(gpu: Gpu, seconds: float, planted_ns: int) -> dict[str, object]:
    """Nanoseconds a launch, through the hook and past it, as pairs of turns that follow each other. The order in a pair
    alternates. ``planted_ns``: the wait before each launch through the hook."""
    kernel = Kernel(gpu, "tiny", 1, 32, (ctypes.c_uint64(0),))
    direct = past_the_hook(gpu, "cuLaunchKernel")
    hooked = gpu.library.cuLaunchKernel
    arguments = kernel.arguments

    def turn_ns(launch: Callable[..., int], planted: int) -> float:
        begin_ns = time.perf_counter_ns()
        for _ in range(BATCH):
            if planted:
                until_ns = time.perf_counter_ns() + planted
                while time.perf_counter_ns() < until_ns:
                    pass
            code = launch(*arguments)
            if code:
                gpu.fail("cuLaunchKernel", code)
        took_ns = (time.perf_counter_ns() - begin_ns) / BATCH
        gpu.synchronize()
        return took_ns

    gc.disable()
    pairs: list[tuple[float, float]] = []
    turn = -WARM_UP_TURNS
    end_ns = 0
    while turn <= 0 or time.monotonic_ns() < end_ns:
        if turn == 0:
            end_ns = time.monotonic_ns() + int(seconds * 1e9)
        if turn % 2:
            gated = turn_ns(hooked, planted_ns)
            own = turn_ns(direct, 0)
        else:
            own = turn_ns(direct, 0)
            gated = turn_ns(hooked, planted_ns)
        if turn >= 0:
            pairs.append((gated, own))
        turn += 1
    return {
        "hooked": ctypes.cast(hooked, c_void_p).value != ctypes.cast(direct, c_void_p).value,  # type: ignore[arg-type]
        "gated_ns": [round(gated, 1) for gated, _ in pairs],
        "direct_ns": [round(own, 1) for _, own in pairs],
        "launches": 2 * BATCH * len(pairs),
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m vgpu.workload.probes", description=__doc__)
    p.add_argument("probe", choices=("memory", "launches", "idle"))
    p.add_argument("--most-pieces", type=int, default=1 << 30, help="memory: end after so many")
    p.add_argument("--unlimited", action="store_true", help="memory: there is no ledger, so do not wait for it")
    p.add_argument("--seconds", type=float, default=3.0, help="launches: how long (default 3)")
    p.add_argument("--planted-ns", type=int, default=0, help="launches: a delay before each that the hook sees")
    return p


def main() -> int:
    options = parser().parse_args()

    def say(event: str, values: dict[str, object]) -> None:
        print(json.dumps({"event": event} | values), flush=True)

    try:
        gpu = Gpu(PTX)
        name = gpu.name
        say("started", {"gpu": name, "simulated": name.startswith("Simulated"), "sm_count": gpu.sm_count})
        match options.probe:
            case "memory":
                say("result", memory(gpu, options.most_pieces, not options.unlimited))
            case "launches":
                say("result", launches(gpu, options.seconds, options.planted_ns))
            case "idle":
                sys.stdin.read()
    except CudaError as error:
        say("error", {"error": str(error), "code": error.code})
        print(f"vgpu.workload.probes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
