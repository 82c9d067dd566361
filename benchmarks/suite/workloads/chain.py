"""A chain of kernels in one stream, each of which may begin before the one before it has ended: programmatic dependent
launches (``--work pdl``), or the same kernels without that attribute (``--work serial``).

    python -m benchmarks.suite.workloads.chain --work pdl

Speaks like ``sharer.py``. Each kernel is one thread that notes %globaltimer, lets its dependents start, works for
``HALF_NS``, waits for the kernel before it, works as long again and notes the time. So with the attribute neighbours
overlap by half, without it not at all. A result has ``overlapped_percent``, the part of neighbours that did, and
``kernel_us``, the time per kernel of the whole chain.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from ctypes import byref, c_int, c_uint, c_uint32, c_uint64, c_void_p
from itertools import pairwise
from typing import Any, Final

from benchmarks.suite.workloads.sharer import Window, serve, sleep_until
from vgpu.workload.driver import Gpu

LINKS: Final = 500  # the driver's queue holds about a thousand launches
HALF_NS: Final = 10_000
PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6

PTX: Final = """
.version 8.0
.target sm_90
.address_size 64

// sim: link ns=20000 sms=1 interval=p0+p1*16
.visible .entry link(.param .u64 stamps, .param .u64 index, .param .u32 half)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [stamps];
    ld.param.u64 %rd2, [index];
    ld.param.u32 %rd3, [half];
    shl.b64 %rd2, %rd2, 4;
    add.u64 %rd1, %rd1, %rd2;
    mov.u64 %rd4, %globaltimer;
    st.global.u64 [%rd1], %rd4;
    griddepcontrol.launch_dependents;
    add.u64 %rd5, %rd4, %rd3;
first:
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p1, %rd4, %rd5;
    @%p1 bra first;
    griddepcontrol.wait;
    mov.u64 %rd4, %globaltimer;
    add.u64 %rd5, %rd4, %rd3;
second:
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p1, %rd4, %rd5;
    @%p1 bra second;
    st.global.u64 [%rd1+8], %rd4;
    ret;
}
"""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier, and a value of 64 bytes that begins with an int here."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", ctypes.c_char * 60))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", c_uint),
    )


class Chain:
    """LINKS launches after each other, and when each kernel ran."""

    def __init__(self, programmatic: bool) -> None:
        self._gpu = gpu = Gpu(PTX)
        self._function = c_void_p()
        gpu.call("cuModuleGetFunction", byref(self._function), gpu.module, b"link")
        buffer = gpu.allocate(16 * LINKS)
        if buffer is None:
            raise MemoryError("no room for a buffer of 8 KiB: give the vGPU more memory")
        self._buffer, self._index, half = buffer, c_uint64(0), c_uint32(HALF_NS)
        self._held = (c_uint64(buffer), self._index, half)
        self._parameters = (c_void_p * 3)(*(ctypes.addressof(value) for value in self._held))
        self._attribute = Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        ones = (c_uint * 3)(1, 1, 1)
        self._config = Config(ones, ones, 0, gpu.stream, ctypes.pointer(self._attribute), int(programmatic))
        gpu.library.cuLaunchKernelEx.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)

    def run(self) -> list[tuple[int, int]]:
        """(start, end) of each kernel on the GPU's clock."""
        for index in range(LINKS):
            self._index.value = index
            self._gpu.call("cuLaunchKernelEx", byref(self._config), self._function, self._parameters, None)
        self._gpu.synchronize()
        words = memoryview(self._gpu.read(self._buffer, 16 * LINKS)).cast("Q")
        return list(zip(words[::2], words[1::2], strict=True))

    def synchronize(self) -> None:
        self._gpu.synchronize()


def overlaps(kernels: list[tuple[int, int]]) -> dict[str, float]:
    """Of neighbours in a chain: which percent overlapped; and the chain's time per kernel, in µs."""
    pairs = list(pairwise(kernels))
    overlapped = sum(after[0] < before[1] for before, after in pairs)
    span_us = (kernels[-1][1] - kernels[0][0]) / 1e3
    return {"overlapped_percent": 100 * overlapped / len(pairs), "kernel_us": span_us / len(kernels)}


def chains(chain: Chain, window: Window) -> dict[str, Any]:
    """Chains until the window is over, at least one: the median of what they show."""
    late_s = sleep_until(window.start)
    found: list[dict[str, float]] = []
    while not found or time.monotonic() < window.start + window.seconds:
        found.append(overlaps(chain.run()))
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return {"chains": len(found), "late_s": late_s, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("pdl", "serial"), required=True)
    parser.add_argument("--simulated", action="store_true", help="accepted: the kernels know what to cost there")
    options = parser.parse_args()

    def warm() -> Chain:
        chain = Chain(options.work == "pdl")
        chain.run()
        return chain

    serve(warm, chains)


if __name__ == "__main__":
    main()
