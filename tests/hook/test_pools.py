"""Stream-ordered memory, from the application's side: what its pools have taken is charged, and nobody is refused for
what they keep."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.hook.stage import GIB, Stage, eventually
from tests.hook.talk import PROLOGUE, Talk

MIB = 1 << 20
OUT_OF_MEMORY = 2

POOLS = """
MIB, KEEP = 1 << 20, c_uint64(2**64 - 1)

def pool_of(device=0):
    found = c_void_p()
    app.call("cuDeviceGetDefaultMemPool", byref(found), device)
    return found

def keep_all(pool):
    app.call("cuMemPoolSetAttribute", pool, 4, byref(KEEP))

def allocate(size, pool=None):
    "(CUresult, address)"
    address = c_uint64()
    if pool is None:
        code = app.result("cuMemAllocAsync", byref(address), c_size_t(size), app.stream)
    else:
        code = app.result("cuMemAllocFromPoolAsync", byref(address), c_size_t(size), pool, app.stream)
    return code, address

def free(address):
    app.call("cuMemFreeAsync", address, app.stream)

class Properties(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                ("security", c_void_p), ("most", c_size_t), ("usage", ctypes.c_ushort), ("left", ctypes.c_ubyte * 54)]

def new_pool():
    pool = c_void_p()
    app.call("cuMemPoolCreate", byref(pool), byref(Properties(type=1, location=1, id=0)))
    return pool
"""


def talk(stage: Stage, body: str, limit: int = 8 * GIB) -> Talk:
    return Talk(stage, stage.vgpu(memory_bytes=limit), POOLS + body)


def test_charged_is_what_the_pool_has_taken(stage: Stage) -> None:
    said = talk(
        stage,
        """
first, second = allocate(5 * MIB)[1], allocate(30 * MIB)[1]
say(app.memory_info())
free(first)
free(second)
say()
app.call("cuStreamSynchronize", app.stream)
say()
""",
    )
    (info,), slot = said.next()
    assert slot.committed_bytes[3] == slot.charged_bytes == 64 * MIB
    assert info == [8 * GIB - 64 * MIB, 8 * GIB]
    assert said.next()[1].charged_bytes == 64 * MIB, "freed in its stream, it is the pool's yet"
    assert said.next()[1].charged_bytes == 0


@pytest.mark.parametrize("name", ["cuMemGetDefaultMemPool", "cuMemGetMemPool"])
@pytest.mark.parametrize("place", ["1, 0", "0, 0"], ids=["device", "none"])
def test_the_drivers_own_pool_of_managed_memory_is_charged(stage: Stage, name: str, place: str) -> None:
    """As what cuMemAllocManaged gives is."""
    said = talk(
        stage,
        f"""
pool = c_void_p()
app.call("{name}", byref(pool), (ctypes.c_int * 2)({place}), 2)
code, address = allocate(60 * MIB, pool)
say(code)
say(allocate(60 * MIB, pool)[0])
free(address)
app.synchronize()
say(0)
""",
        limit=100 * MIB,
    )
    answers = [said.next() for _ in range(3)]
    assert [answer for answer, _ in answers] == [[0], [OUT_OF_MEMORY], [0]]
    assert [slot.charged_bytes for _, slot in answers] == [64 * MIB, 64 * MIB, 0]


@pytest.mark.parametrize(
    "call",
    ['"cuCtxSynchronize"', '"cuStreamSynchronize_ptsz", app.stream', '"cuEventSynchronize", event'],
)
def test_what_a_synchronisation_gives_back_is_not_charged_any_more(stage: Stage, call: str) -> None:
    body = f"event = app.event()\nfree(allocate(5 * MIB)[1])\napp.record(event)\nsay()\napp.call({call})\nsay()"
    said = talk(stage, body)
    assert [said.next()[1].charged_bytes for _ in range(2)] == [32 * MIB, 0]


def test_what_a_pool_keeps_is_there_for_the_next_one(stage: Stage) -> None:
    """Six of eight GiB, kept for good; the ledger must not ask for them twice."""
    said = talk(
        stage,
        """
keep_all(pool_of())
free(allocate(6 * GIB)[1])
app.synchronize()
say(app.memory_info())
say(allocate(5 * GIB)[0])
""",
    )
    (info,), slot = said.next()
    assert slot.charged_bytes == 6 * GIB
    assert info == [2 * GIB, 8 * GIB]
    (code,), slot = said.next()
    assert (code, slot.charged_bytes, slot.refusals) == (0, 6 * GIB, 0)


@pytest.mark.parametrize("other", ["app.allocate(7 * GIB)", "create_physical(app, 7 * GIB)[1]", "allocate(7 * GIB)[1]"])
def test_what_a_pool_keeps_goes_back_before_anybody_is_refused(stage: Stage, other: str) -> None:
    said = talk(
        stage,
        f"""
mine = new_pool()
keep_all(mine)
free(allocate(3 * GIB, mine)[1])
app.synchronize()
say()
say(bool({other}))
""",
    )
    assert said.next()[1].charged_bytes == 3 * GIB
    (granted,), slot = said.next()
    assert (granted, slot.charged_bytes, slot.refusals) == (True, 7 * GIB, 0)


def test_a_pool_whose_growth_does_not_fit_is_refused_and_nothing_is_lost(stage: Stage) -> None:
    said = talk(
        stage,
        """
say(allocate(40 * MIB)[0], allocate(24 * MIB)[0], allocate(1)[0])
say(allocate(30 * MIB)[0])
""",
        limit=70 * MIB,
    )
    codes, slot = said.next()
    assert (codes, slot.charged_bytes) == ([0, 0, OUT_OF_MEMORY], 64 * MIB)
    codes, slot = said.next()
    assert (codes, slot.charged_bytes, slot.refusals, slot.reserved_bytes) == ([OUT_OF_MEMORY], 64 * MIB, 2, 0)


def test_a_smaller_limit_holds_for_what_a_pool_keeps(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=GIB)
    body = "keep_all(pool_of())\nfree(allocate(64 * MIB)[1])\napp.synchronize()\nsay()\nsay(allocate(MIB)[0])\n"
    said = Talk(stage, vgpu, POOLS + body + "say(allocate(64 * MIB)[0])")
    assert said.next()[1].charged_bytes == 64 * MIB
    vgpu.grants.memory_limit_bytes = 80 * MIB
    (code,), slot = said.next()
    assert (code, slot.charged_bytes) == (0, 64 * MIB)
    (code,), slot = said.next()
    assert (code, slot.charged_bytes, slot.reserved_bytes) == (OUT_OF_MEMORY, 32 * MIB, 0)


def test_a_pool_that_grows_by_more_than_was_reserved_gives_it_back_where_the_limit_wants_that(stage: Stage) -> None:
    """A driver whose pools take 256 MiB at a time."""
    vgpu = stage.vgpu(memory_bytes=600 * MIB)
    body = """
first = allocate(MIB)
say(first[0])
say(allocate(256 * MIB)[0], allocate(10 * MIB, new_pool())[0])
"""
    said = Talk(stage, vgpu, POOLS + body, VGPU_SIM_POOL_STEP=str(256 * MIB))
    (code,), slot = said.next()
    assert (code, slot.charged_bytes) == (0, 256 * MIB)
    codes, slot = said.next()
    assert (codes, slot.refusals) == ([0, OUT_OF_MEMORY], 1)
    assert (slot.charged_bytes, slot.reserved_bytes) == (512 * MIB, 0)


def test_the_books_are_kept_while_something_is_captured_and_no_capture_ends_for_it(stage: Stage) -> None:
    """In its default mode a capture forbids its thread to ask about pools, and dies of the question."""
    said = talk(
        stage,
        """
keep_all(pool_of())
kept = allocate(40 * MIB)[1]
stream, graph = app.new_stream(1), c_void_p()
app.call("cuStreamBeginCapture_v2", stream, 0)
say(app.memory_info())
codes = [allocate(MIB)[0], allocate(9 * GIB)[0]]
say(codes, app.result("cuStreamEndCapture", stream, byref(graph)))
""",
    )
    (info,), slot = said.next()
    assert (info, slot.charged_bytes) == ([8 * GIB - 64 * MIB, 8 * GIB], 64 * MIB)
    (codes, ended), slot = said.next()
    assert (codes, ended) == ([0, OUT_OF_MEMORY], 0)
    assert slot.charged_bytes == 64 * MIB


def test_pools_come_and_go(stage: Stage) -> None:
    """What is still allocated from one that is destroyed stays charged: nobody can be asked about it any more."""
    said = talk(
        stage,
        """
pools = [new_pool() for _ in range(80)]
blocks = [allocate(MIB, pool) for pool in pools[:60]]
say([code for code, _ in blocks])
for _, block in blocks[:40]:
    free(block)
for pool in pools:
    app.call("cuMemPoolDestroy", pool)
say()
""",
    )
    (codes,), slot = said.next()
    assert not any(codes)
    assert slot.charged_bytes == 60 * 32 * MIB
    assert said.next()[1].charged_bytes == 20 * MIB


def test_pools_that_come_and_go_evade_no_limit(stage: Stage) -> None:
    body = """
codes = []
for _ in range(4):
    pool = new_pool()
    codes.append(allocate(960 * MIB, pool)[0])
    app.call("cuMemPoolDestroy", pool)
say(codes)
"""
    (codes,), slot = talk(stage, body, GIB).next()
    assert (codes, slot.charged_bytes) == ([0, OUT_OF_MEMORY, OUT_OF_MEMORY, OUT_OF_MEMORY], 960 * MIB)


@pytest.fixture
def two_gpus() -> Iterator[Stage]:
    stage = Stage(gpus=2)
    yield stage
    stage.close()


def test_the_gpu_that_a_pool_is_on_pays_whatever_context_is_current(two_gpus: Stage) -> None:
    vgpus = two_gpus.vgpu(0), two_gpus.vgpu(1, memory_bytes=GIB)
    for vgpu in vgpus:
        vgpu.open()
    body = """
first, second = app, App(1)
first.call("cuCtxSetCurrent", first.context)
app = second
codes = [allocate(512 * MIB)[0]]                   # the stream is the second one's
app = first
codes.append(allocate(100 * MIB, pool_of(1))[0])   # the pool is
codes.append(allocate(900 * MIB, pool_of(1))[0])
codes.append(allocate(900 * MIB)[0])
say(codes)
"""
    program = two_gpus.start(PROLOGUE + POOLS + body, two_gpus.environment(*vgpus))
    (codes,) = json.loads(two_gpus.heard(program))
    assert codes == [0, 0, OUT_OF_MEMORY, 0]
    assert [vgpu.slot().charged_bytes for vgpu in vgpus] == [928 * MIB, 640 * MIB]


THREADS = """
import threading
keep_all(pool_of())
refused, failed = [], []
together = threading.Barrier(6, timeout=60)    # however fast they are, all hold blocks at the same time

def work(seed):
    try:
        allocate_and_free(seed)
    except Exception as error:
        failed.append(repr(error))

def allocate_and_free(seed):
    app.call("cuCtxSetCurrent", app.context)
    mine = []
    for i in range(400):
        if i % 50 == 0:
            together.wait()
        size = (1 + (i * 7919 + seed * 104729) % 40) * MIB
        code, address = allocate(size)
        assert code in (0, 2), code
        if code:
            refused.append(size)
        else:
            mine.append(address)
        if len(mine) > 4 or (code and mine):
            free(mine.pop(0))
        if i % 50 == 0:
            app.synchronize()
    for address in mine:
        free(address)

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
app.synchronize()
reserved = c_uint64()
app.call("cuMemPoolGetAttribute", pool_of(), 5, byref(reserved))
say(failed, reserved.value, len(refused))
"""


def test_threads_on_one_pool_leave_the_books_exact(stage: Stage) -> None:
    limit = 256 * MIB
    said = talk(stage, THREADS, limit)
    (failed, reserved, refused), slot = said.next()
    assert failed == []
    assert (slot.charged_bytes, slot.reserved_bytes) == (reserved, 0)
    assert slot.peak_bytes <= limit
    assert refused == slot.refusals > 0


def test_a_process_that_dies_leaves_its_pools_memory_to_the_others(stage: Stage) -> None:
    vgpu = stage.vgpu()
    first = Talk(stage, vgpu, POOLS + "keep_all(pool_of())\nfree(allocate(6 * GIB)[1])\nsay()\nsay()")
    assert first.next()[1].charged_bytes == 6 * GIB
    dead = vgpu.slot().index
    first.process.kill()
    first.process.wait()
    eventually(lambda: vgpu.activity.read_slot(dead).state == 3, "the death was seen")
    vgpu.activity.reap_slot(dead)
    second = Talk(stage, vgpu, POOLS + "say(allocate(7 * GIB)[0])")
    (code,), slot = second.next()
    assert (code, slot.charged_bytes) == (0, 7 * GIB)
