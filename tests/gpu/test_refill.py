"""A pool that is filled, freed and at once filled again stays within the vGPU's memory on the card.

The driver needs time to give memory back: meanwhile NVML shows less than the ledger says. NVML is read here every few
milliseconds, from outside of the vGPU, so the card itself is the witness.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field

import pynvml
import pytest

from benchmarks.node import Node
from tests.gpu.test_end_to_end import GIB, python
from tests.gpu.test_frameworks import needs
from vgpu.node.link import ControlLink

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LIMIT_GIB = 20
ROUNDS = 6
FILL = """
    import json, time
    def fill(take, error):
        held, got = [], 0
        for mib in (1024, 256, 64, 16, 2):
            while True:
                try:
                    held.append(take(mib << 20))
                except error:
                    break
                got += mib << 20
        return held, got
"""
CUPY = (
    FILL
    + """
    import cupy as cp
    pool = cp.cuda.MemoryAsyncPool()
    cp.cuda.set_allocator(pool.malloc)
    for step in range(ROUNDS):
        held, got = fill(lambda size: cp.empty(size, dtype=cp.uint8), cp.cuda.memory.OutOfMemoryError)
        print(json.dumps({"at": time.monotonic(), "got": got}), flush=True)
        del held
        pool.free_all_blocks()
        time.sleep(PAUSE)
"""
)
TORCH = (
    FILL
    + """
    import torch
    for step in range(ROUNDS):
        held, got = fill(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
        print(json.dumps({"at": time.monotonic(), "got": got}), flush=True)
        del held
        torch.cuda.empty_cache()
        time.sleep(PAUSE)
"""
)


@dataclass
class Card:
    """What NVML shows of one process, sampled in a thread."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self, index: int) -> None:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        while not self._stop.is_set():
            shown = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            self.samples.append((time.monotonic(), sum(process.usedGpuMemory or 0 for process in shown)))
            time.sleep(0.002)

    def stop(self) -> None:
        self._stop.set()


def readings(node: Node, stop: threading.Event, found: list[tuple[float, int, int]]) -> None:
    with ControlLink(node.control_socket) as link:
        for notice in link.watch(events=False, interval_ns=50_000_000):
            if notice.snapshot is not None:
                now, vgpus = time.monotonic(), notice.snapshot.vgpus
                found.extend((now, vgpu.memory_used_bytes, vgpu.memory_implicit_bytes) for vgpu in vgpus)
            if stop.is_set():
                return


@pytest.mark.parametrize("pause", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("way", ["cupy-async", "torch-native", "torch-async"])
def test_what_the_card_gives_stays_within_the_limit(node: Node, way: str, pause: float) -> None:
    library = way.partition("-")[0]
    needs(library, library)
    code = textwrap.dedent(CUPY if library == "cupy" else TORCH)
    code = code.replace("ROUNDS", str(ROUNDS)).replace("PAUSE", str(pause))
    environment = {**node.environment, "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync" if way == "torch-async" else ""}
    card, stop = Card(), threading.Event()
    ledger: list[tuple[float, int, int]] = []
    witnesses = [
        threading.Thread(target=card.watch, args=(0,), daemon=True),
        threading.Thread(target=readings, args=(node, stop, ledger), daemon=True),
    ]
    for witness in witnesses:
        witness.start()
    command = python(node, code, "--sm", "50", "--mem", f"{LIMIT_GIB}G")
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=180)
    stop.set()
    card.stop()
    witnesses[0].join()
    assert ran.returncode == 0, ran.stderr[-3000:]
    rounds = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    most = max(shown for _, shown in card.samples)
    print(
        f"{way}, pause {pause} s: got GiB {[round(step['got'] / GIB, 2) for step in rounds]},",
        f"most on the card {most >> 20} of {LIMIT_GIB << 10} MiB, {len(card.samples)} samples,",
        f"implicit MiB {sorted({implicit >> 20 for _, _, implicit in ledger})}",
        file=sys.stderr,
    )
    assert len(rounds) == ROUNDS
    assert most <= LIMIT_GIB * GIB
