"""Fills, copies and prefetches: what the GPU moves is gated like a launch, what crosses to the host is counted."""

from __future__ import annotations

import json

import pytest

from client_hook.symbols import intercepted
from cython_ext.readings import GrantsFlag
from tests.hook.programs import PROLOGUE
from tests.hook.stage import MS, Stage, StagedVgpu, eventually

MIB = 1 << 20
SIZE = 2 * MIB

CALLS = """
import json, time
from ctypes import c_int, c_ubyte, c_ushort
SIZE = 2 << 20
a, b = app.allocate(4 << 20), app.allocate(4 << 20)
host = ctypes.create_string_buffer(SIZE)
at_host = ctypes.addressof(host)
stream, context = app.stream, c_void_p()
app.call("cuCtxGetCurrent", byref(context))

class Side2D(ctypes.Structure):
    _fields_ = [("x", c_size_t), ("y", c_size_t), ("kind", c_int), ("host", c_void_p), ("device", c_uint64),
                ("array", c_void_p), ("pitch", c_size_t)]

class Copy2D(ctypes.Structure):
    _fields_ = [("source", Side2D), ("target", Side2D), ("width", c_size_t), ("height", c_size_t)]

class Side3D(ctypes.Structure):
    _fields_ = [("x", c_size_t), ("y", c_size_t), ("z", c_size_t), ("level", c_size_t), ("kind", c_int),
                ("host", c_void_p), ("device", c_uint64), ("array", c_void_p), ("context", c_void_p),
                ("pitch", c_size_t), ("height", c_size_t)]

class Copy3D(ctypes.Structure):
    _fields_ = [("source", Side3D), ("target", Side3D), ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)]

class Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("id", c_int)]

HOST, DEVICE, UNIFIED = 1, 2, 4

def plane(source_kind, source, target_kind, target):
    copy = Copy2D(width=SIZE // 8, height=8)
    for side, kind, address in ((copy.source, source_kind, source), (copy.target, target_kind, target)):
        side.kind, side.pitch = kind, SIZE // 8
        setattr(side, "host" if kind == HOST else "device", address)
    return byref(copy)

def box(source_kind, source, target_kind, target):
    copy = Copy3D(width=SIZE // 8, height=4, depth=2)
    for side, kind, address in ((copy.source, source_kind, source), (copy.target, target_kind, target)):
        side.kind, side.pitch, side.height, side.context = kind, SIZE // 8, 4, context
        setattr(side, "host" if kind == HOST else "device", address)
    return byref(copy)

def batch(target, source):
    one = lambda value: (c_uint64 * 1)(value)
    return one(target), one(source), (c_size_t * 1)(SIZE), c_size_t(1), None, None, c_size_t(0)

class Operand(ctypes.Structure):
    _fields_ = [("kind", c_int), ("address", c_uint64), ("row", c_size_t), ("layer", c_size_t), ("hint", Location)]

class BatchedCopy(ctypes.Structure):
    _fields_ = [("source", Operand), ("target", Operand), ("width", c_size_t), ("height", c_size_t),
                ("depth", c_size_t), ("order", c_int), ("flags", c_uint)]

class ArrayShape(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]

def new_array():
    "Of SIZE bytes, in elements of 16."
    array, shape = c_void_p(), ArrayShape(SIZE // 16, 0, 3, 4)
    app.call("cuArrayCreate_v2", byref(array), byref(shape))
    return array

def place(memory):
    return Operand(2, memory.value) if isinstance(memory, c_void_p) else Operand(1, memory)

def boxes(*copies, width=SIZE):
    "(target, source) of each; arrays are c_void_p, and so wide in elements of theirs."
    each = [BatchedCopy(place(source), place(target), width, 1, 1, 1) for target, source in copies]
    return c_size_t(len(each)), (BatchedCopy * len(each))(*each)

def ranges(*memory, size=SIZE, kind=1):
    "One location, at place 0, for all of them."
    count = len(memory)
    addresses, sizes = (c_uint64 * count)(*memory), (c_size_t * count)(*[size] * count)
    return addresses, sizes, c_size_t(count), byref(Location(kind, 0)), byref(c_size_t(0)), c_size_t(1)

managed = c_uint64()
app.call("cuMemAllocManaged", byref(managed), c_size_t(4 << 20), 1)
m = managed.value
array, other_array = new_array(), new_array()
NONE = c_uint64(0)
A, B, H, N = c_uint64(a), c_uint64(b), c_uint64(at_host), c_size_t(SIZE)
P = c_void_p(at_host)
GATED = {
    "cuMemsetD8_v2": (A, c_ubyte(7), N),
    "cuMemsetD16_v2": (A, c_ushort(7), c_size_t(SIZE // 2)),
    "cuMemsetD32_v2": (A, c_uint(7), c_size_t(SIZE // 4)),
    "cuMemsetD2D8_v2": (A, c_size_t(SIZE // 2), c_ubyte(7), c_size_t(SIZE // 2), c_size_t(2)),
    "cuMemsetD2D16_v2": (A, c_size_t(SIZE // 2), c_ushort(7), c_size_t(SIZE // 4), c_size_t(2)),
    "cuMemsetD2D32_v2": (A, c_size_t(SIZE // 2), c_uint(7), c_size_t(SIZE // 8), c_size_t(2)),
    "cuMemcpyDtoD_v2": (A, B, N),
    "cuMemcpy": (A, B, N),
    "cuMemcpyPeer": (A, context, B, context, N),
    "cuMemcpy2D_v2": (plane(DEVICE, b, DEVICE, a),),
    "cuMemcpy2DUnaligned_v2": (plane(UNIFIED, b, DEVICE, a),),
    "cuMemcpy3D_v2": (box(DEVICE, b, UNIFIED, a),),
    "cuMemcpy3DPeer": (box(DEVICE, b, DEVICE, a),),
    "cuMemcpyDtoA_v2": (array, c_size_t(0), B, N),
    "cuMemcpyAtoD_v2": (A, array, c_size_t(0), N),
    "cuMemcpyAtoA_v2": (array, c_size_t(0), other_array, c_size_t(0), N),
    "cuMemsetD8Async": (A, c_ubyte(7), N, stream),
    "cuMemsetD16Async": (A, c_ushort(7), c_size_t(SIZE // 2), stream),
    "cuMemsetD32Async": (A, c_uint(7), c_size_t(SIZE // 4), stream),
    "cuMemsetD2D8Async": (A, c_size_t(SIZE // 2), c_ubyte(7), c_size_t(SIZE // 2), c_size_t(2), stream),
    "cuMemsetD2D16Async": (A, c_size_t(SIZE // 2), c_ushort(7), c_size_t(SIZE // 4), c_size_t(2), stream),
    "cuMemsetD2D32Async": (A, c_size_t(SIZE // 2), c_uint(7), c_size_t(SIZE // 8), c_size_t(2), stream),
    "cuMemcpyDtoDAsync_v2": (A, B, N, stream),
    "cuMemcpyAsync": (A, B, N, stream),
    "cuMemcpyPeerAsync": (A, context, B, context, N, stream),
    "cuMemcpy2DAsync_v2": (plane(UNIFIED, b, UNIFIED, a), stream),
    "cuMemcpy3DAsync_v2": (box(DEVICE, b, DEVICE, a), stream),
    "cuMemcpy3DPeerAsync": (box(DEVICE, b, DEVICE, a), stream),
    "cuMemcpyBatchAsync": (*batch(a, b), byref(c_size_t()), stream),
    "cuMemcpyBatchAsync_v2": (*batch(a, b), stream),
    "cuMemcpy3DBatchAsync": (*boxes((a, b)), byref(c_size_t()), NONE, stream),
    "cuMemcpy3DBatchAsync_v2": (*boxes((array, b), (b, array), (array, other_array), width=SIZE // 16), NONE, stream),
    "cuMemPrefetchBatchAsync": (*ranges(m, m + SIZE), NONE, stream),
    "cuMemDiscardAndPrefetchBatchAsync": (*ranges(m, m + SIZE), NONE, stream),
    "cuMemPrefetchAsync": (A, N, c_int(0), stream),
    "cuMemPrefetchAsync_v2": (A, N, Location(1, 0), c_uint(0), stream),
}
HOSTS = {
    "cuMemcpyHtoD_v2": (A, P, N),
    "cuMemcpyDtoH_v2": (P, A, N),
    "cuMemcpyHtoDAsync_v2": (A, H, N, stream),
    "cuMemcpyDtoHAsync_v2": (H, A, N, stream),
    "cuMemcpy_to": ("cuMemcpy", A, H, N),
    "cuMemcpy_from": ("cuMemcpy", H, A, N),
    "cuMemcpyAsync_to": ("cuMemcpyAsync", A, H, N, stream),
    "cuMemcpy2D_to": ("cuMemcpy2D_v2", plane(HOST, at_host, DEVICE, a)),
    "cuMemcpy2D_unified": ("cuMemcpy2D_v2", plane(UNIFIED, at_host, DEVICE, a)),
    "cuMemcpy3D_from": ("cuMemcpy3D_v2", box(DEVICE, a, HOST, at_host)),
    "cuMemcpyHtoA_v2": (array, c_size_t(0), P, N),
    "cuMemcpyAtoH_v2": (P, array, c_size_t(0), N),
    "cuMemcpyHtoAAsync_v2": (array, c_size_t(0), P, N, stream),
    "cuMemcpyAtoHAsync_v2": (P, array, c_size_t(0), N, stream),
    "cuMemcpy3DBatch_to": ("cuMemcpy3DBatchAsync_v2", *boxes((a, at_host)), NONE, stream),
    "cuMemcpy3DBatch_from": ("cuMemcpy3DBatchAsync", *boxes((at_host, a)), byref(c_size_t()), NONE, stream),
    "cuMemcpyBatch_to": ("cuMemcpyBatchAsync_v2", *batch(a, at_host), stream),
}
both = lambda *values: (c_uint64 * 2)(*values)
MIXED = {        # a copy within the device, and one that crosses
    "cuMemcpyBatch_mixed": ("cuMemcpyBatchAsync_v2", both(a, b), both(b, at_host), both(SIZE, SIZE), c_size_t(2), None,
                            None, c_size_t(0), stream),
    "cuMemcpy3DBatch_mixed": ("cuMemcpy3DBatchAsync_v2", *boxes((a, b), (at_host, a)), NONE, stream),
}

def do(name):
    every = HOSTS | MIXED | GATED
    arguments = every.get(name) or every[name.removesuffix("_ptds").removesuffix("_ptsz")]
    if isinstance(arguments[0], str):
        name, *arguments = arguments
    return app.result(name, *arguments)
"""

ONE_BY_ONE = """
for line in sys.stdin:
    print(do(line.strip()), flush=True)
"""


# what the program above calls, by the names of its dictionaries
FILLS = [f"cuMemset{d}D{bits}" for d in ("", "D2") for bits in (8, 16, 32)]
COPIES = ["cuMemcpyDtoD", "cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy3D"]
COPIES += ["cuMemcpyDtoA", "cuMemcpyAtoD", "cuMemcpyAtoA"]
SYNCHRONOUS = [f"{name}_v2" for name in (*FILLS, *COPIES)] + ["cuMemcpy", "cuMemcpyPeer", "cuMemcpy3DPeer"]
ASYNCHRONOUS = [
    *(f"{name}Async" for name in FILLS),
    *("cuMemcpyDtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuMemcpy3DAsync_v2"),
    *("cuMemcpyAsync", "cuMemcpyPeerAsync", "cuMemcpy3DPeerAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"),
    *("cuMemcpy3DBatchAsync", "cuMemcpy3DBatchAsync_v2"),
    *("cuMemPrefetchAsync", "cuMemPrefetchAsync_v2", "cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"),
]
HOST_COPIES = ["cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
HOST_COPIES += ["cuMemcpy_to", "cuMemcpy_from", "cuMemcpyAsync_to", "cuMemcpy2D_to", "cuMemcpy2D_unified"]
HOST_COPIES += ["cuMemcpy3D_from", "cuMemcpyBatch_to", "cuMemcpy3DBatch_to", "cuMemcpy3DBatch_from"]
HOST_COPIES += ["cuMemcpyHtoA_v2", "cuMemcpyAtoH_v2", "cuMemcpyHtoAAsync_v2", "cuMemcpyAtoHAsync_v2"]
BATCHES = ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemcpy3DBatchAsync", "cuMemcpy3DBatchAsync_v2"]
BATCHES += ["cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"]
WAITING = ["cuMemsetD8_v2", "cuMemsetD8Async", "cuMemcpyDtoD_v2_ptds", "cuMemcpyAsync"]
WAITING += [
    "cuMemcpyDtoA_v2",
    "cuMemcpyAtoD_v2",
    "cuMemcpyAtoA_v2_ptds",
    *BATCHES,
    *(f"{name}_ptsz" for name in BATCHES),
]
MIXED = ["cuMemcpyBatch_mixed", "cuMemcpy3DBatch_mixed"]


@pytest.mark.parametrize("kind", ["open", "finite"])
def test_each_is_let_through_once_and_the_twins_too(stage: Stage, vgpu: StagedVgpu, kind: str) -> None:
    program = stage.start(PROLOGUE + CALLS + ONE_BY_ONE, stage.environment(vgpu))
    names = [*SYNCHRONOUS, *(f"{n}_ptds" for n in SYNCHRONOUS), *ASYNCHRONOUS, *(f"{n}_ptsz" for n in ASYNCHRONOUS)]
    assert set(names) <= {symbol.name for symbol in intercepted()}

    def all_of_them() -> None:
        for count, name in enumerate(names, 1):
            stage.tell(program, name)
            assert stage.heard(program) == "0", name
            eventually(lambda: vgpu.slot().launches >= count, f"{name} was let through")  # noqa: B023
            assert vgpu.slot().launches == count, name
        assert vgpu.slot().copies == 0

    if kind == "open":
        vgpu.open()
        all_of_them()
    else:
        with vgpu.granting(60_000 * MS):
            all_of_them()


def test_copies_to_and_from_the_host_pass_and_are_counted(stage: Stage, vgpu: StagedVgpu) -> None:
    program = stage.start(PROLOGUE + CALLS + ONE_BY_ONE, stage.environment(vgpu))
    for count, name in enumerate(HOST_COPIES, 1):
        stage.tell(program, name)
        assert stage.heard(program) == "0", name  # nobody has granted anything
        eventually(lambda: vgpu.slot().copies >= count, f"{name} was counted")  # noqa: B023
        slot = vgpu.slot()
        assert (slot.copies, slot.copied_bytes) == (count, count * SIZE), name
    assert vgpu.slot().launches == 0
    assert not vgpu.slot().want


@pytest.mark.parametrize("name", [*WAITING, *MIXED])
def test_without_a_lease_it_waits(stage: Stage, vgpu: StagedVgpu, name: str) -> None:
    body = f'print("ready", flush=True)\nprint(do("{name}"))'
    program = stage.start(PROLOGUE + CALLS + body, stage.environment(vgpu))
    assert stage.heard(program) == "ready"
    vgpu.await_want()
    assert not vgpu.slot().undrained
    assert vgpu.slot().launches == 0
    vgpu.open()
    assert stage.heard(program) == "0"


@pytest.mark.parametrize("name", MIXED)
def test_of_a_mixed_batch_what_crosses_is_counted_and_the_rest_let_through_as_one(
    stage: Stage, vgpu: StagedVgpu, name: str
) -> None:
    program = stage.start(PROLOGUE + CALLS + ONE_BY_ONE, stage.environment(vgpu))
    vgpu.open()
    stage.tell(program, name)
    assert stage.heard(program) == "0"
    eventually(lambda: vgpu.slot().launches == 1, "it was let through")
    assert (vgpu.slot().copies, vgpu.slot().copied_bytes) == (1, SIZE)


BIG = """
four = lambda value: (c_uint64 * 4)(*[value] * 4)
big, at_once = app.allocate(4_100_000_000), {
    "cuMemcpyBatchAsync_v2": lambda: (four(big), four(big), four(1_025_000_000), c_size_t(4), None, None, c_size_t(0),
                                      stream),
    "cuMemcpy3DBatchAsync_v2": lambda: (*boxes(*[(big, big)] * 4, width=1_025_000_000), NONE, stream),
}
many = c_uint64()
app.call("cuMemAllocManaged", byref(many), c_size_t(1 << 30), 1)
at_once["cuMemPrefetchBatchAsync"] = lambda: (*ranges(many.value, size=1 << 28, kind=2), NONE, stream)
def call():
    return app.result(NAME, *at_once[NAME]())
for _ in range(3):
    answer = call()
    app.call("cuStreamSynchronize", stream)
    print(answer, flush=True)
input()
print(call(), flush=True)
input()
"""


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync_v2", "cuMemcpy3DBatchAsync_v2", "cuMemPrefetchBatchAsync"])
def test_a_batch_is_paid_for_as_a_whole(stage: Stage, vgpu: StagedVgpu, name: str) -> None:
    """Four copies of half a millisecond; a prefetch of 5. Of the first nobody knows how long it takes."""
    program = stage.start(f"NAME = {name!r}\n" + PROLOGUE + CALLS + BIG, stage.environment(vgpu))
    vgpu.grants.flags = GrantsFlag.CONTENDED
    with vgpu.granting(60_000 * MS):
        assert [stage.heard(program) for _ in range(3)] == ["0"] * 3
        eventually(lambda: not vgpu.slot().undrained and vgpu.slot().launches == 3, "their drains were seen")
        before_ns = vgpu.slot().busy_ns
        stage.tell(program)
        assert stage.heard(program) == "0"
        eventually(lambda: not vgpu.slot().undrained and vgpu.slot().launches == 4, "its drain was seen")
        assert vgpu.slot().busy_ns - before_ns > MS


def test_an_array_copy_is_as_long_as_its_elements_are_wide(stage: Stage, vgpu: StagedVgpu) -> None:
    """As many elements as would pass for a trifle if they were bytes."""
    body = """
for _ in range(40):
    app.call("cuMemcpy3DBatchAsync_v2", *boxes((array, b), width=SIZE // 16), NONE, stream)
print("through", flush=True)
"""
    program = stage.start(PROLOGUE + CALLS + body, stage.environment(vgpu))
    vgpu.await_want()
    assert vgpu.slot().launches == 0
    vgpu.open()
    assert stage.heard(program) == "through"
    eventually(lambda: vgpu.slot().launches == 40, "none was a trifle")


SMALL = """
for _ in range(20):
    app.call("cuMemsetD8Async", A, c_ubyte(7), c_size_t({size}), stream)
print("passed", flush=True)
count = 0
while True:
    app.call("cuMemsetD8Async", A, c_ubyte(7), c_size_t({size}), stream)
    count += 1
    if count % 100 == 0:
        print(count, flush=True)
"""


def test_small_ones_pass_as_long_as_they_are_few(stage: Stage, vgpu: StagedVgpu) -> None:
    """Each passes in 2.3 us of GPU time; a program of nothing else is gated for what is more than a hundredth."""
    program = stage.start(PROLOGUE + CALLS + SMALL.format(size=MIB), stage.environment(vgpu))
    assert stage.heard(program) == "passed"
    vgpu.await_want()
    vgpu.open()
    stage.heard(program)


LENGTHS = """
big = app.allocate({bytes})
def fill():
    app.call("cuMemsetD8Async", c_uint64(big), c_ubyte(0), c_size_t({bytes}), stream)
def copy():
    app.call("cuMemcpyDtoDAsync_v2", c_uint64(big), c_uint64(big), c_size_t({bytes} // 2), stream)
{name}()
app.call("cuStreamSynchronize", stream)
start = time.monotonic_ns()
for _ in range(100):
    {name}()
print(time.monotonic_ns() - start, flush=True)
"""


@pytest.mark.parametrize("name", ["fill", "copy"])
def test_lengths_are_learned_and_the_window_bounds_what_is_queued(stage: Stage, vgpu: StagedVgpu, name: str) -> None:
    """100 of 1 ms: with a window of 1 ms they are submitted as they run."""
    program = stage.start(PROLOGUE + CALLS + LENGTHS.format(name=name, bytes=4_100_000_000), stage.environment(vgpu))
    with vgpu.granting(60_000 * MS):
        assert int(stage.heard(program)) > 90 * MS


CAPTURED = """
graph, executable = c_void_p(), c_void_p()
app.call("cuStreamBeginCapture_v2", stream, {mode})
results = [do(name) for name in {names}]
app.call("cuStreamEndCapture", stream, byref(graph))
app.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
print(json.dumps(results), flush=True)
print(app.result("cuGraphLaunch", executable, stream), flush=True)
"""


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
def test_what_is_captured_is_not_gated_and_kills_no_capture(stage: Stage, vgpu: StagedVgpu, mode: int) -> None:
    names = ["cuMemsetD8Async", "cuMemcpyDtoDAsync_v2", "cuMemcpyAsync", "cuMemcpyAsync_to", "cuMemcpy2DAsync_v2"]
    program = stage.start(PROLOGUE + CALLS + CAPTURED.format(mode=mode, names=names), stage.environment(vgpu))
    assert json.loads(stage.heard(program)) == [0] * len(names)  # nobody has granted anything
    vgpu.await_want()  # the graph's launch is gated
    slot = vgpu.slot()
    assert (slot.launches, slot.copies, slot.copied_bytes) == (0, 0, 0)
    vgpu.open()
    assert stage.heard(program) == "0"


BESIDE_A_CAPTURE = """
other, results, done = app.new_stream(1), [], False
def work():
    app.call("cuCtxSetCurrent", context)
    while not done:
        results.append(do("cuMemcpyAsync") or do("cuMemsetD8Async"))
def capture():
    graph = c_void_p()
    kernel = app.kernel(0.1, other)
    app.call("cuStreamBeginCapture_v2", other, {mode})
    before = len(results)
    while len(results) < before + 3:
        kernel.launch()
        time.sleep(0.001)
    return app.result("cuStreamEndCapture", other, byref(graph))
thread = threading.Thread(target=work)
thread.start()
print(json.dumps([capture() for _ in range(3)]), flush=True)
done = True
thread.join()
print(max(results), flush=True)
"""


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread-local", "relaxed"])
def test_asking_where_memory_is_kills_no_capture_of_another_thread(stage: Stage, vgpu: StagedVgpu, mode: int) -> None:
    program = stage.start(PROLOGUE + CALLS + BESIDE_A_CAPTURE.format(mode=mode), stage.environment(vgpu))
    with vgpu.granting(20 * MS):
        assert json.loads(stage.heard(program)) == [0, 0, 0]
        assert stage.heard(program) == "0"


def test_drained_after_a_copy_alone(stage: Stage, vgpu: StagedVgpu) -> None:
    """A lease under which only a fill ran drains when that is through, and was busy for so long."""
    body = f"""
big = app.allocate({1 << 32})
app.call("cuMemsetD8Async", c_uint64(big), c_ubyte(0), c_size_t({1 << 32}), stream)
print("submitted", flush=True)
input()
"""
    program = stage.start(PROLOGUE + CALLS + body, stage.environment(vgpu))
    vgpu.grants.flags = GrantsFlag.CONTENDED
    with vgpu.granting(60_000 * MS):
        assert stage.heard(program) == "submitted"
        eventually(lambda: not vgpu.slot().undrained and vgpu.slot().launches == 1, "its drain was seen")
        assert vgpu.slot().busy_ns > 0.9 * MS  # 4 GiB at 4.1 TB/s; its length was not known before
