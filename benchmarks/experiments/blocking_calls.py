"""What a stream that waits for a word of the host holds up: the questions that GPU-side gating depends on.

    python -m benchmarks.experiments.blocking_calls    (on a simulated GPU through vgpuctl run)

A stream waits with cuStreamWaitValue32 behind which kernels are queued. While it does, driver calls are made from a
thread of their own; printed is how long each took, and "until released" where it came back only when the word was
written (after HOLD_S). Once with the legacy stream, in which PyTorch works by default, once with a stream that does not
synchronise with it; and with a second thread held up in a call that waits, which may have locked what others need. Then
how many launches, and how many graphs of 300 nodes, can be queued before the call itself waits, and how soon after the
word the first kernel is done.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p

from vgpu.workload.driver import Gpu, Kernel
from vgpu.workload.kernels import PTX

HOLD_S = 0.3
LEGACY = 1
WAIT_GEQ = 0
MAPPED = 2  # cuMemHostAlloc: with an address for the device
TINY = 1 << 20
HALF = TINY // 2
NODES = 300
READ_ONLY_HOST_REGISTER_SUPPORTED = 113


class Word:
    """Four bytes of pinned host memory that streams can wait for. Only grows."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        host, device = c_void_p(), c_uint64()
        gpu.call("cuMemHostAlloc", byref(host), ctypes.c_size_t(4096), c_uint(MAPPED))
        gpu.call("cuMemHostGetDevicePointer_v2", byref(device), host, c_uint(0))
        self.value = ctypes.c_uint32.from_address(host.value or 0)
        self.address = device

    def block(self, stream: c_void_p) -> None:
        self._gpu.call("cuStreamWaitValue32_v2", stream, self.address, c_uint(self.value.value + 1), c_uint(WAIT_GEQ))

    def release(self) -> None:
        self.value.value += 1


def probes(gpu: Gpu, before: c_void_p, other: c_void_p) -> dict[str, Callable[[], object]]:
    """Driver calls that programs and hooks make.

    ``before``: an event recorded before the wait. ``other``: a stream that does not synchronise with the legacy one.
    """
    library, buffer = gpu.library, ctypes.create_string_buffer(64)
    block, spare, pinned, kind = gpu.allocate(TINY), gpu.allocate(TINY), c_void_p(), c_uint()
    assert block is not None
    assert spare is not None
    tiny = Kernel(gpu, "tiny", 1, 32, (c_uint64(0),))

    def launch_elsewhere() -> None:
        launch(gpu, tiny, other, 1)
        library.cuStreamSynchronize(other)

    return {
        "cuEventQuery, recorded before": lambda: library.cuEventQuery(before),
        "cuEventSynchronize, recorded before": lambda: library.cuEventSynchronize(before),
        "cuStreamQuery, other stream": lambda: library.cuStreamQuery(other),
        "cuEventCreate": gpu.event,
        "cuStreamCreate": lambda: gpu.call("cuStreamCreate", byref(c_void_p()), 1),
        "cuMemGetInfo": gpu.memory_info,
        "cuMemAlloc": lambda: gpu.allocate(TINY),
        "cuMemcpyHtoD, 64 B": lambda: library.cuMemcpyHtoD_v2(block, buffer, 64),
        "cuMemcpyDtoH, 64 B": lambda: library.cuMemcpyDtoH_v2(buffer, block, 64),
        "cuMemcpyDtoD, 512 kB": lambda: gpu.call("cuMemcpyDtoD_v2", c_uint64(block), c_uint64(block + HALF), HALF),
        "cuMemsetD8": lambda: library.cuMemsetD8_v2(block, 0, TINY),
        "cuPointerGetAttribute": lambda: gpu.call("cuPointerGetAttribute", byref(kind), 2, c_uint64(block)),
        "cuMemHostAlloc": lambda: library.cuMemHostAlloc(byref(pinned), ctypes.c_size_t(4096), c_uint(0)),
        "cuModuleLoadData": lambda: gpu.call("cuModuleLoadData", byref(c_void_p()), PTX.encode()),
        "launch and wait in another stream": launch_elsewhere,
        "cuMemFree": lambda: gpu.free(spare),
        "cuCtxSynchronize": gpu.synchronize,
    }


def in_a_thread(gpu: Gpu, call: Callable[[], object]) -> tuple[threading.Thread, list[float]]:
    """``call`` in a thread of its own, and, once it has come back, how many seconds it took."""
    took: list[float] = []
    context = c_void_p()
    gpu.call("cuCtxGetCurrent", byref(context))

    def run() -> None:
        gpu.call("cuCtxSetCurrent", context)
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, took


def waiting_calls(gpu: Gpu) -> dict[str, Callable[[], object]]:
    """Calls in which the driver waits for a blocked stream, or may."""
    buffer = ctypes.create_string_buffer(64)
    block, spares = gpu.allocate(TINY), [gpu.allocate(TINY) for _ in range(10)]
    assert block is not None

    def free() -> None:
        spare = spares.pop()
        assert spare is not None
        gpu.free(spare)

    return {
        "cuMemFree": free,
        "cuModuleLoadData": lambda: gpu.call("cuModuleLoadData", byref(c_void_p()), PTX.encode()),
        "cuCtxSynchronize": gpu.synchronize,
        "cuMemcpyHtoD": lambda: gpu.library.cuMemcpyHtoD_v2(block, buffer, 64),
        "cuMemcpyDtoH": lambda: gpu.library.cuMemcpyDtoH_v2(buffer, block, 64),
        "cuMemsetD8": lambda: gpu.library.cuMemsetD8_v2(block, 0, TINY),
    }


def held_up(
    gpu: Gpu,
    word: Word,
    stream: c_void_p,
    name: str,
    probe: Callable[[], object],
    beside: tuple[str, Callable[[], object]] | None = None,
) -> str:
    """How long ``probe`` takes while ``stream`` is blocked; ``beside``: and another thread makes that call."""
    word.block(stream)
    launch(gpu, Kernel(gpu, "tiny", 1, 32, (c_uint64(0),)), stream, 10)
    threads = []
    if beside:
        threads.append(in_a_thread(gpu, beside[1])[0])
        time.sleep(0.05)
    thread, took = in_a_thread(gpu, probe)
    thread.join(HOLD_S)
    waited = thread.is_alive()
    word.release()
    for each in (thread, *threads):
        each.join(10)
    gpu.synchronize()
    label = f"beside {beside[0]}: {name:40}" if beside else f"{name:40}"
    if not took:
        return f"{label} never came back"
    return f"{label} " + ("until released" if waited else f"{1e6 * took[0]:9.1f} us")


def probes_beside(gpu: Gpu, before: c_void_p, stream: c_void_p, other: c_void_p) -> dict[str, Callable[[], object]]:
    """What hook threads and launching threads do, all the time."""
    library, late, tiny = gpu.library, gpu.event(), Kernel(gpu, "tiny", 1, 32, (c_uint64(0),))
    return {
        "cuEventQuery, recorded before": lambda: library.cuEventQuery(before),
        "cuStreamQuery, other stream": lambda: library.cuStreamQuery(other),
        "cuEventRecord, blocked stream": lambda: library.cuEventRecord(late, stream),
        "launch, blocked stream": lambda: launch(gpu, tiny, stream, 1),
        "launch, other stream": lambda: launch(gpu, tiny, other, 1),
    }


def launch(gpu: Gpu, kernel: Kernel, stream: c_void_p, count: int) -> None:
    arguments = (*kernel.arguments[:8], stream, *kernel.arguments[9:])
    for _ in range(count):
        code = gpu.library.cuLaunchKernel(*arguments)
        if code:
            gpu.fail("cuLaunchKernel", code)


def graph_of(gpu: Gpu, nodes: int) -> c_void_p:
    """So many tiny kernels, one after the other."""
    tiny, stream, graph, executable = Kernel(gpu, "tiny", 1, 32, (c_uint64(0),)), c_void_p(), c_void_p(), c_void_p()
    gpu.call("cuStreamCreate", byref(stream), 1)
    gpu.call("cuStreamBeginCapture_v2", stream, 2)
    launch(gpu, tiny, stream, nodes)
    gpu.call("cuStreamEndCapture", stream, byref(graph))
    gpu.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
    return executable


def depth(gpu: Gpu, word: Word, stream: c_void_p, submit: Callable[[], object], most: int = 5000) -> int:
    """How often ``submit``, into the blocked stream, comes back before it takes longer than 50 ms."""
    queued = 0
    context = c_void_p()
    gpu.call("cuCtxGetCurrent", byref(context))

    def fill() -> None:
        nonlocal queued
        gpu.call("cuCtxSetCurrent", context)
        for _ in range(most):
            submit()
            queued += 1

    word.block(stream)
    thread = threading.Thread(target=fill)
    thread.start()
    before = -1
    while thread.is_alive() and queued != before:
        before = queued
        thread.join(0.05)
    found = queued
    word.release()
    thread.join()
    gpu.synchronize()
    return found


def launches(gpu: Gpu, stream: c_void_p) -> Callable[[], object]:
    tiny = Kernel(gpu, "tiny", 1, 32, (c_uint64(0),))
    return lambda: launch(gpu, tiny, stream, 1)


def graph_launches(gpu: Gpu, stream: c_void_p) -> Callable[[], object]:
    graph = graph_of(gpu, NODES)
    return lambda: gpu.call("cuGraphLaunch", graph, stream)


def first_kernel_us(gpu: Gpu, word: Word, stream: c_void_p) -> float:
    done = gpu.event()
    tiny = Kernel(gpu, "tiny", 1, 32, (c_uint64(0),))
    word.block(stream)
    launch(gpu, tiny, stream, 1)
    gpu.call("cuEventRecord", done, stream)
    time.sleep(0.002)
    began = time.perf_counter()
    word.release()
    while gpu.library.cuEventQuery(done):
        pass
    return 1e6 * (time.perf_counter() - began)


def main() -> None:
    gpu = Gpu(PTX)
    print(gpu.name)
    supported = c_int()
    gpu.call("cuDeviceGetAttribute", byref(supported), READ_ONLY_HOST_REGISTER_SUPPORTED, gpu.device)
    print(f"host memory can be registered read-only: {supported.value}")
    word = Word(gpu)
    other = c_void_p()
    gpu.call("cuStreamCreate", byref(other), 1)
    for name, stream in (("legacy stream", c_void_p(LEGACY)), ("non-blocking stream", gpu.stream)):
        print(f"\n{name} blocked")
        before = gpu.event()
        gpu.call("cuEventRecord", before, stream)
        for what, probe in probes(gpu, before, other).items():
            print(" ", held_up(gpu, word, stream, what, probe), flush=True)
        for beside in waiting_calls(gpu).items():
            for what, probe in probes_beside(gpu, before, stream, other).items():
                print(" ", held_up(gpu, word, stream, what, probe, beside), flush=True)
        print(f"  launches queued before one waits: {depth(gpu, word, stream, launches(gpu, stream))}")
        print(f"  graphs of {NODES} nodes: {depth(gpu, word, stream, graph_launches(gpu, stream))}")
        times = [first_kernel_us(gpu, word, stream) for _ in range(200)]
        print(f"  word written to first kernel done: {statistics.median(times):.1f} us p50, {max(times):.1f} us worst")


if __name__ == "__main__":
    main()
