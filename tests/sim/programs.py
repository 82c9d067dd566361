"""CUDA programs that the tests start as processes: ``python -m tests.sim.programs NAME [ARGUMENT…]``.

Each prints one JSON line when it is done, and "ready" before that if it waits for its standard input.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

from tests.sim.cuda import GLOBAL, MIB, NON_BLOCKING, RELAXED, THREAD_LOCAL, Cuda


def basics() -> dict[str, object]:
    """Allocation, copies both ways, a kernel between events."""
    cuda = Cuda()
    address = cuda.new("cuMemAlloc_v2", c_size_t(3 * MIB))
    text = os.urandom(MIB)
    back = ctypes.create_string_buffer(MIB)
    cuda.ok("cuMemcpyHtoD_v2", address, text, c_size_t(MIB))
    cuda.ok("cuMemsetD8_v2", address + 512, 7, c_size_t(256))
    cuda.ok("cuMemcpyDtoH_v2", back, address, c_size_t(MIB))
    first, second = cuda.new("cuEventCreate", 0), cuda.new("cuEventCreate", 0)
    release = cuda.held(cuda.stream)
    cuda.ok("cuEventRecord", c_void_p(first), cuda.stream)
    cuda.launch("work", 3_000_000, 132)
    cuda.ok("cuEventRecord", c_void_p(second), cuda.stream)
    pending = cuda("cuEventQuery", c_void_p(second))
    release()
    cuda.ok("cuEventSynchronize", c_void_p(second))
    return {
        "copied": back.raw == text[:512] + bytes([7]) * 256 + text[768:],
        "pending": pending,
        "done": cuda("cuEventQuery", c_void_p(second)),
        "elapsed_ns": cuda.elapsed_ns(first, second),
        "bad_free": cuda("cuMemFree_v2", address + 1),
        "free": cuda("cuMemFree_v2", address),
    }


def context_event() -> dict[str, object]:
    """An event behind all streams of a context, with work in two of them that ends one after the other."""
    cuda = Cuda()
    other = c_void_p(cuda.new("cuStreamCreate", NON_BLOCKING))
    event = c_void_p(cuda.new("cuEventCreate", 2))
    releases = [cuda.held(stream) for stream in (cuda.stream, other)]
    cuda.ok("cuCtxRecordEvent", cuda.context, event)
    late = cuda.held(cuda.stream)
    releases[0]()
    pending = cuda("cuEventQuery", event)
    releases[1]()
    cuda.ok("cuEventSynchronize", event)
    done = cuda("cuEventQuery", event)
    late()
    cuda.ok("cuStreamBeginCapture_v2", other, RELAXED)
    refused = cuda("cuCtxRecordEvent", cuda.context, event)
    graph = c_void_p()
    end = cuda("cuStreamEndCapture", other, byref(graph))
    return {"pending": pending, "done": done, "refused": refused, "end": end}


def idle_wait(milliseconds: str) -> dict[str, object]:
    """The processor time of a process that waits for one long kernel."""
    cuda = Cuda()
    before = time.process_time()
    started = time.monotonic()
    cuda.launch("work", int(milliseconds) * 1_000_000, 132)
    cuda.ok("cuCtxSynchronize")
    return {"cpu_s": time.process_time() - before, "wall_s": time.monotonic() - started}


def hold(size: str) -> dict[str, object]:
    """Allocate, queue ten seconds of work, say so, and wait to be killed or told to go."""
    cuda = Cuda()
    cuda.new("cuMemAlloc_v2", c_size_t(int(size)))
    for _ in range(100):
        cuda.launch("work", 100_000_000, 132)
    print("ready", flush=True)
    sys.stdin.readline()
    return {}


def die_inside() -> dict[str, object]:
    """Be killed while holding the GPU's lock."""
    from cython_ext.simengine import Engine

    Cuda()
    engine = Engine(os.environ["VGPU_SIM_DIR"])
    engine.hold_mutex()
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def stop_inside(rounds: str) -> dict[str, object]:
    """Be stopped while holding the GPU's lock; once it goes on, leave, say so, and wait for a line."""
    from cython_ext.simengine import Engine

    Cuda()
    engine = Engine(os.environ["VGPU_SIM_DIR"])
    for _ in range(int(rounds)):
        engine.hold_mutex()
        os.kill(os.getpid(), signal.SIGSTOP)
        engine.release_mutex()
        print("left", flush=True)
        sys.stdin.readline()  # or it would be over before it is stopped again
    return {}


def share(milliseconds: str) -> dict[str, object]:
    """Queue kernels without end; how many were finished between two lines on standard input."""
    cuda = Cuda()
    events = [cuda.new("cuEventCreate", 0) for _ in range(8)]
    finished, running = 0, True

    def stop() -> None:
        nonlocal running
        sys.stdin.readline()
        running = False

    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=stop, daemon=True).start()
    batch = 0
    while running:
        if batch >= len(events):
            cuda.ok("cuEventSynchronize", c_void_p(events[batch % len(events)]))
            finished += 4
        for _ in range(4):
            cuda.launch("work", int(float(milliseconds) * 1e6), 132)
        cuda.ok("cuEventRecord", c_void_p(events[batch % len(events)]), cuda.stream)
        batch += 1
    count = c_int()
    cuda.ok("cuDeviceGetAttribute", byref(count), 16, 0)
    return {"finished": finished, "sms": count.value}


def until_refused(step: str) -> dict[str, object]:
    """Allocate until refused; the refusal, what was had, and that work goes on."""
    cuda = Cuda()
    address, taken = c_uint64(), 0
    while (code := cuda("cuMemAlloc_v2", byref(address), c_size_t(int(step)))) == 0:
        taken += int(step)
    free, total = c_size_t(), c_size_t()
    cuda.ok("cuMemGetInfo_v2", byref(free), byref(total))
    cuda.ok("cuMemFree_v2", address)
    cuda.launch("work", 1000, 1)
    return {"taken": taken, "refusal": code, "free": free.value, "total": total.value, "work": cuda("cuCtxSynchronize")}


def in_thread(call: Callable[[], object]) -> object:
    answer: list[object] = []
    thread = threading.Thread(target=lambda: answer.append(call()))
    thread.start()
    thread.join()
    return answer[0]


def captures() -> dict[str, object]:
    """Which calls of another thread fail during a capture, by mode, and whether the capture survives."""
    cuda = Cuda()
    event = cuda.new("cuEventCreate", 0)
    other = cuda.new("cuStreamCreate", NON_BLOCKING)
    cuda.ok("cuEventRecord", c_void_p(event), c_void_p(other))
    address = c_uint64()
    calls: dict[str, Callable[[], int]] = {
        "event_query": lambda: cuda("cuEventQuery", c_void_p(event)),
        "stream_query": lambda: cuda("cuStreamQuery", c_void_p(other)),
        "alloc": lambda: cuda("cuMemAlloc_v2", byref(address), c_size_t(4096)),
        "synchronize": lambda: cuda("cuStreamSynchronize", c_void_p(other)),
        "event_record": lambda: cuda("cuEventRecord", c_void_p(event), c_void_p(other)),
        "mem_info": lambda: cuda("cuMemGetInfo_v2", byref(c_size_t()), byref(c_size_t())),
        "event_create": lambda: cuda("cuEventCreate", byref(c_void_p()), 0),
    }
    report: dict[str, object] = {}
    for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
        for thread_mode in (GLOBAL, RELAXED):
            for name, call in calls.items():

                def attempt(call: Callable[[], int] = call, thread_mode: int = thread_mode) -> int:
                    cuda.ok("cuCtxSetCurrent", cuda.context)
                    exchanged = c_int(thread_mode)
                    cuda.ok("cuThreadExchangeStreamCaptureMode", byref(exchanged))
                    return call()

                cuda.ok("cuStreamBeginCapture_v2", cuda.stream, mode)
                cuda.launch("work", 1000, 1)
                answer = in_thread(attempt)
                end = cuda("cuStreamEndCapture", cuda.stream, byref(c_void_p()))
                report[f"{mode} {thread_mode} {name}"] = [answer, end]
    return report


def legacy_capture() -> dict[str, object]:
    """The legacy stream while blocking and non-blocking streams capture."""
    cuda = Cuda()
    event = cuda.new("cuEventCreate", 0)
    report: dict[str, object] = {}
    for name, flags in (("blocking", 0), ("non_blocking", NON_BLOCKING)):
        stream = c_void_p(cuda.new("cuStreamCreate", flags))
        cuda.ok("cuStreamBeginCapture_v2", stream, RELAXED)
        exchanged = c_int(RELAXED)
        cuda.ok("cuThreadExchangeStreamCaptureMode", byref(exchanged))
        record = cuda("cuEventRecord", c_void_p(event), None)
        report[name] = [record, cuda("cuStreamEndCapture", stream, byref(c_void_p()))]
        cuda.ok("cuThreadExchangeStreamCaptureMode", byref(exchanged))
    return report


def forked_capture(join: str) -> dict[str, object]:
    """A capture over two streams by events; launched twice if it was joined again."""
    cuda = Cuda()
    second = c_void_p(cuda.new("cuStreamCreate", NON_BLOCKING))
    fork, back = (c_void_p(cuda.new("cuEventCreate", 0)) for _ in range(2))
    first_mark, last_mark = cuda.new("cuEventCreate", 0), cuda.new("cuEventCreate", 0)
    cuda.ok("cuStreamBeginCapture_v2", cuda.stream, GLOBAL)
    cuda.launch("work", 1_000_000, 132)
    cuda.ok("cuEventRecord", fork, cuda.stream)
    cuda.ok("cuStreamWaitEvent", second, fork, 0)
    cuda.launch("work", 2_000_000, 132, stream=second)
    query = cuda("cuEventQuery", fork) if join == "query" else 0
    if join == "yes":
        cuda.ok("cuEventRecord", back, second)
        cuda.ok("cuStreamWaitEvent", cuda.stream, back, 0)
    graph = c_void_p()
    end = cuda("cuStreamEndCapture", cuda.stream, byref(graph))
    if end:
        return {"end": end, "query": query}
    count, edges = c_size_t(), c_size_t()
    cuda.ok("cuGraphGetNodes", graph, None, byref(count))
    cuda.ok("cuGraphGetEdges_v2", graph, None, None, None, byref(edges))
    executable = c_void_p(cuda.new("cuGraphInstantiateWithFlags", graph, c_uint64(0)))
    cuda.ok("cuGraphDestroy", graph)
    cuda.ok("cuEventRecord", c_void_p(first_mark), cuda.stream)
    cuda.ok("cuGraphLaunch", executable, cuda.stream)
    cuda.ok("cuGraphLaunch", executable, cuda.stream)
    cuda.ok("cuEventRecord", c_void_p(last_mark), cuda.stream)
    cuda.ok("cuStreamSynchronize", cuda.stream)
    return {"end": end, "nodes": count.value, "edges": edges.value, "ns": cuda.elapsed_ns(first_mark, last_mark)}


def refusals() -> dict[str, object]:
    """What a driver says no to, outside of captures."""
    cuda = Cuda()
    foreign = c_void_p()
    cuda.ok("cuCtxCreate_v2", byref(foreign), 0, 0)
    event = c_void_p(cuda.new("cuEventCreate", 0))
    cuda.ok("cuCtxPopCurrent_v2", byref(c_void_p()))
    cuda.ok("cuCtxSetCurrent", cuda.context)
    report: dict[str, object] = {"foreign_event": cuda("cuEventRecord", event, cuda.stream)}
    untimed = c_void_p(cuda.new("cuEventCreate", 2))
    cuda.ok("cuEventRecord", untimed, cuda.stream)
    report["untimed"] = cuda("cuEventElapsedTime", byref(c_float()), untimed, untimed)
    report["no_such_kernel"] = cuda("cuModuleGetFunction", byref(c_void_p()), cuda.module, b"nothing")
    report["bad_ptx"] = cuda("cuModuleLoadData", byref(c_void_p()), b"not ptx")
    function = c_void_p()
    cuda.ok("cuModuleGetFunction", byref(function), cuda.module, b"plain")
    report["huge_block"] = cuda("cuLaunchKernel", function, 1, 1, 1, 2048, 1, 1, 0, None, None, None)
    report["no_parameters"] = cuda("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, None, None)
    offset, size = c_size_t(), c_size_t()
    cuda.ok("cuFuncGetParamInfo", function, c_size_t(1), byref(offset), byref(size))
    report["second_parameter"] = [offset.value, size.value]
    report["device"] = cuda("cuDevicePrimaryCtxRetain", byref(c_void_p()), 7)
    destroyed = c_void_p(cuda.new("cuStreamCreate", 0))
    cuda.ok("cuStreamDestroy_v2", destroyed)
    report["destroyed_stream"] = cuda("cuStreamQuery", destroyed)
    return report


def lookups() -> dict[str, object]:
    """cuGetProcAddress against the symbols it should name."""
    cuda = Cuda(context=False)

    def address(symbol: str) -> int:
        return ctypes.cast(getattr(cuda.library, symbol), c_void_p).value or 0

    def ask(name: str, version: int, flags: int = 0) -> list[object]:
        out, status = c_void_p(), c_int(-1)
        code = cuda("cuGetProcAddress_v2", name.encode(), byref(out), version, c_uint64(flags), byref(status))
        return [code, out.value, status.value]

    wanted = {
        ("cuMemAlloc", 13000, 0): "cuMemAlloc_v2",
        ("cuCtxCreate", 4000, 0): "cuCtxCreate_v2",
        ("cuCtxCreate", 12000, 0): "cuCtxCreate_v3",
        ("cuCtxCreate", 13000, 0): "cuCtxCreate_v4",
        ("cuLaunchKernel", 13000, 0): "cuLaunchKernel",
        ("cuLaunchKernel", 13000, 2): "cuLaunchKernel_ptsz",
        ("cuMemcpyHtoD", 13000, 2): "cuMemcpyHtoD_v2_ptds",
        ("cuStreamBeginCapture", 10000, 0): "cuStreamBeginCapture",
        ("cuStreamBeginCapture", 12000, 2): "cuStreamBeginCapture_v2_ptsz",
        ("cuCtxSynchronize", 12000, 0): "cuCtxSynchronize",
        ("cuCtxSynchronize", 13000, 0): "cuCtxSynchronize_v2",
        ("cuGetProcAddress", 11030, 0): "cuGetProcAddress",
        ("cuGetProcAddress", 12000, 0): "cuGetProcAddress_v2",
        ("cuGraphInstantiate", 12000, 0): "cuGraphInstantiateWithFlags",
        ("cuMemPrefetchAsync", 13000, 2): "cuMemPrefetchAsync_v2_ptsz",
        ("cuStreamWaitValue32", 13000, 0): "cuStreamWaitValue32_v2",
    }
    wrong = {str(k): v for k, v in wanted.items() if ask(*k) != [0, address(v), 0]}
    return {
        "wrong": wrong,
        "empty": ask("", 13000)[0],
        "unknown": ask("cuNothing", 13000),
        "too_old": ask("cuGetProcAddress", 11000),
        "no_status": cuda("cuGetProcAddress_v2", b"cuInit", byref(c_void_p()), 13000, c_uint64(0), None),
    }


def pinned_parts() -> dict[str, object]:
    """Copies from host memory of which two parts are pinned, each by itself."""
    cuda = Cuda()
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    device = cuda.new("cuMemAlloc_v2", c_size_t(3 * page))
    for part in (0, 1):
        cuda.ok("cuMemHostRegister_v2", c_void_p(start + part * page), c_size_t(page), 0)
    sizes = {"one": (0, page), "two": (0, 2 * page), "beyond": (page, 2 * page), "pageable": (2 * page, page)}
    return {
        name: cuda("cuMemcpyHtoD_v2", device, c_void_p(start + at), c_size_t(size))
        for name, (at, size) in sizes.items()
    }


def words() -> dict[str, object]:
    """A stream that waits for a host word, a kernel behind it, a word written behind that; then a host function."""
    cuda = Cuda()
    page = cuda.new("cuMemHostAlloc", c_size_t(4096), 0)
    gate, done = c_uint.from_address(page), c_uint.from_address(page + 4)
    called = threading.Event()
    function = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: called.set())
    cuda.ok("cuStreamWaitValue32_v2", cuda.stream, c_uint64(page), 5, 0)
    cuda.launch("work", 1_000_000, 132)
    cuda.ok("cuStreamWriteValue32_v2", cuda.stream, c_uint64(page + 4), 77, 0)
    cuda.ok("cuLaunchHostFunc", cuda.stream, function, None)
    time.sleep(0.05)
    held = [done.value, cuda("cuStreamQuery", cuda.stream), called.is_set()]
    gate.value = 5
    # Nobody calls the driver from here on: the GPU writes the word and calls the function by itself.
    reached = called.wait(20)
    return {"held": held, "called": reached, "done": done.value, "query": cuda("cuStreamSynchronize", cuda.stream)}


def default_streams() -> dict[str, object]:
    """Order between the legacy stream, a blocking and a non-blocking one, read from kernels' own stamps."""
    cuda = Cuda()
    buffer = cuda.new("cuMemAlloc_v2", c_size_t(4096))
    blocking = cuda.new("cuStreamCreate", 0)
    free = cuda.new("cuStreamCreate", NON_BLOCKING)
    releases = [cuda.held(c_void_p(stream)) for stream in (blocking, free)]
    for i, stream in enumerate((c_void_p(blocking), c_void_p(1), c_void_p(blocking), c_void_p(free))):
        cuda.launch("stamp", buffer + 16 * i, 2_000_000, stream=stream, blocks=30)
    for release in releases:
        release()
    cuda.ok("cuCtxSynchronize")
    stamps = (c_uint64 * 8).from_address(buffer)
    return {"intervals": [[stamps[2 * i], stamps[2 * i + 1]] for i in range(4)]}


def after_fork() -> dict[str, object]:
    cuda = Cuda()
    pid = os.fork()
    if pid == 0:
        os._exit(cuda("cuCtxSynchronize") + 10 * cuda("cuInit", 0))
    _, status = os.waitpid(pid, 0)
    return {"child": os.waitstatus_to_exitcode(status), "parent": cuda("cuCtxSynchronize")}


def continued_inside() -> None:
    """Hold the GPU's lock until a SIGCONT has come."""
    from cython_ext.simengine import Engine

    Cuda()
    engine = Engine(os.environ["VGPU_SIM_DIR"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
    engine.hold_mutex()
    print("inside", flush=True)
    signal.sigwait({signal.SIGCONT})
    engine.release_mutex()
    print("left", flush=True)
    sys.stdin.readline()


def hold_with_child(size: str) -> None:
    """As ``hold``; a child of it that only sleeps says its pid before."""
    cuda = Cuda()
    cuda.new("cuMemAlloc_v2", c_size_t(int(size)))
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    print(pid, flush=True)
    print("ready", flush=True)
    sys.stdin.readline()


def become(size: str) -> None:
    """Allocate, and become a program that says so, and allocates until it is refused once it is told to."""
    cuda = Cuda()
    cuda.new("cuMemAlloc_v2", c_size_t(int(size)))
    body = "import sys; from tests.sim.programs import *; print('ready', flush=True); sys.stdin.read(); "
    body += "print(json.dumps(until_refused(str(1 << 30))), flush=True)"
    os.execv(sys.executable, [sys.executable, "-c", body])


def close_all() -> dict[str, object]:
    """What the driver answers to a program that has closed the driver's own descriptors."""
    cuda = Cuda()
    os.closerange(3, 1024)
    with open(os.devnull, "rb"):  # noqa: PTH123 - takes the number of one
        for _ in range(50):
            result = cuda("cuCtxSynchronize")
            time.sleep(0.002)
        return {"result": result}


def devices() -> dict[str, object]:
    """What CUDA_VISIBLE_DEVICES leaves."""
    cuda = Cuda(context=False)
    code = cuda("cuInit", 0)
    count = c_int()
    cuda("cuDeviceGetCount", byref(count))
    names, uuids = [], []
    for i in range(count.value if code == 0 else 0):
        text = ctypes.create_string_buffer(100)
        uuid = ctypes.create_string_buffer(16)
        cuda.ok("cuDeviceGetName", text, 100, i)
        cuda.ok("cuDeviceGetUuid_v2", uuid, i)
        names.append(text.value.decode())
        uuids.append(uuid.raw.hex())
    message = c_char_p()
    cuda("cuGetErrorName", code, byref(message))
    return {"init": code, "error": (message.value or b"").decode(), "names": names, "uuids": uuids}


class Pair(ctypes.Structure):
    _fields_ = [("old", c_char * 16), ("new", c_char * 16)]


class RestoreArguments(ctypes.Structure):
    _fields_ = [("pairs", POINTER(Pair)), ("count", c_uint), ("reserved", c_char * 44), ("reserved1", c_uint64)]


def bytes_of(uuid: str) -> bytes:
    return bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))


def remap(pid: str, *maps: str) -> dict[str, object]:
    """Checkpoint a process, restore it with each of ``maps`` (OLD=NEW,…; "" none) until one is taken, let it go on."""
    cuda = Cuda(context=False)
    cuda.ok("cuInit", 0)
    cuda.ok("cuCheckpointProcessLock", int(pid), None)
    cuda.ok("cuCheckpointProcessCheckpoint", int(pid), None)
    codes = []
    for text in maps:
        named = [[bytes_of(uuid) for uuid in pair.split("=")] for pair in text.split(",") if pair]
        pairs = (Pair * len(named))()
        for pair, (old, new) in zip(pairs, named, strict=True):
            ctypes.memmove(byref(pair), old + new, 32)
        codes.append(cuda("cuCheckpointProcessRestore", int(pid), byref(RestoreArguments(pairs, len(named)))))
    state = c_int()
    cuda.ok("cuCheckpointProcessGetState", int(pid), byref(state))
    cuda.ok("cuCheckpointProcessUnlock", int(pid), None)
    return {"codes": codes, "state": state.value}


def wanderer() -> dict[str, object]:
    """Works, and tells after each line of its standard input where that was and what it found in its memory."""
    cuda = Cuda()
    pattern = bytes(range(256)) * 64
    block, before, after = c_uint64(), c_void_p(), c_void_p()
    cuda.ok("cuMemAlloc_v2", byref(block), 64 * MIB)
    cuda.ok("cuMemcpyHtoD_v2", block, pattern, len(pattern))
    cuda.ok("cuEventCreate", byref(before), 0)
    cuda.ok("cuEventCreate", byref(after), 0)
    cuda.ok("cuEventRecord", before, cuda.stream)
    print("ready", flush=True)
    told = []
    for _ in sys.stdin:
        found, uuid, device = (ctypes.c_char * len(pattern))(), (ctypes.c_char * 16)(), c_int()
        ms, free, total = c_float(), c_size_t(), c_size_t()
        cuda.launch("work", 1_000_000, 1)
        cuda.ok("cuEventRecord", after, cuda.stream)
        cuda.ok("cuEventSynchronize", after)
        cuda.ok("cuEventElapsedTime", byref(ms), before, after)
        cuda.ok("cuMemcpyDtoH_v2", found, block, len(pattern))
        cuda.ok("cuCtxGetDevice", byref(device))
        cuda.ok("cuDeviceGetUuid_v2", uuid, device)
        cuda.ok("cuMemGetInfo_v2", byref(free), byref(total))
        told.append([uuid.raw.hex(), found.raw == pattern, device.value, ms.value >= 1.0, total.value - free.value])
        print("told", flush=True)
    return {"told": told}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
