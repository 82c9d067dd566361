"""The memory limit, from the application's side: refusals, what it is told, and that every free gives back."""

from __future__ import annotations

import json
import time

import pytest

from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.talk import PROLOGUE, THREADS, Talk

OUT_OF_MEMORY, INVALID_CONTEXT = 2, 201


def test_over_the_limit_the_call_itself_fails(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(memory_bytes=8 * GIB),
        """
a = app.allocate(5 * GIB)
say(app.allocate(4 * GIB), app.memory_info(), app.total_bytes)
app.free(a)
b = app.allocate(8 * GIB)
say(b is not None, app.memory_info(), app.allocate(1))
""",
    )
    (refused, info, total), slot = talk.next()
    assert refused is None
    assert info == [3 * GIB, 8 * GIB]
    assert total == 8 * GIB
    assert (slot.committed_bytes[0], slot.reserved_bytes) == (5 * GIB, 0)
    assert (slot.refusals, slot.refused_bytes, slot.peak_bytes) == (1, 4 * GIB, 5 * GIB)
    (fits, info, one_more), slot = talk.next()
    assert fits
    assert info == [0, 8 * GIB]
    assert one_more is None
    assert slot.committed_bytes[0] == 8 * GIB


def test_implicit_memory_narrows_what_may_be_asked_for(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=8 * GIB)
    vgpu.grants.implicit_bytes = GIB
    talk = Talk(stage, vgpu, "say(app.memory_info(), app.allocate(8 * GIB), app.allocate(7 * GIB) is not None)")
    (info, all_of_it, the_rest), _ = talk.next()
    assert (info, all_of_it, the_rest) == ([7 * GIB, 8 * GIB], None, True)


def test_what_a_context_takes_is_waited_for_before_the_first_allocation(stage: Stage) -> None:
    """The server, played here, is late; later allocations wait for nothing, though no look is newer than they are."""
    vgpu = stage.vgpu(memory_bytes=8 * GIB)
    vgpu.grants.implicit_ns = 0
    talk = Talk(
        stage,
        vgpu,
        """
refused, kept = app.allocate(8 * GIB), app.allocate(7 * GIB)
say(refused, kept is not None)
app.free(kept)
say(app.allocate(7 * GIB) is not None, app.memory_info())
""",
    )
    eventually(vgpu.relay.look_wanted, "a look at NVML is wanted")
    vgpu.grants.implicit_bytes = GIB
    vgpu.grants.implicit_ns = time.monotonic_ns()
    assert talk.next()[0] == [None, True]
    vgpu.relay.look_wanted()  # the hook may have rung again while the server was late
    assert talk.next()[0] == [True, [0, 8 * GIB]]
    assert not vgpu.relay.look_wanted()


def test_a_new_limit_holds_at_once(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=2 * GIB)
    talk = Talk(stage, vgpu, "say(app.allocate(3 * GIB))\nsay(app.allocate(3 * GIB) is not None)")
    json.loads(stage.heard(talk.process))
    vgpu.grants.memory_limit_bytes = 4 * GIB
    stage.tell(talk.process)
    (grown,), _ = talk.next()
    assert grown


def test_a_process_has_a_limit_of_its_own(stage: Stage) -> None:
    """Of 8 GiB each process may own 3, however it asks; the third of them finds 2 left."""
    vgpu = stage.vgpu(memory_bytes=8 * GIB)
    vgpu.grants.process_limit_bytes = 3 * GIB
    body = """
pooled = c_uint64()
say(app.memory_info(), app.total_bytes)
first = app.allocate(2 * GIB)
say(first is not None, app.allocate(2 * GIB), create_physical(app, 2 * GIB)[0],
    app.result("cuMemAllocAsync", byref(pooled), c_size_t(2 * GIB), app.stream))
say(app.allocate(GIB) is not None, app.allocate(1), app.memory_info())
"""
    for left in (3, 3):
        talk = Talk(stage, vgpu, body)
        (info, total), _ = talk.next()
        assert (info, total) == ([left * GIB, 3 * GIB], 3 * GIB)
        said, _ = talk.next()
        assert said == [True, None, OUT_OF_MEMORY, OUT_OF_MEMORY]
        said, _ = talk.next()
        assert said == [True, None, [0, 3 * GIB]]
    talk = Talk(stage, vgpu, "say(app.memory_info(), app.allocate(3 * GIB), app.allocate(2 * GIB) is not None)")
    said, _ = talk.next()
    assert said == [[2 * GIB, 3 * GIB], None, True]
    vgpu.grants.process_limit_bytes = 0
    talk = Talk(stage, vgpu, "say(app.memory_info())")
    (info,), _ = talk.next()
    assert info == [0, 8 * GIB]


def test_the_driver_refuses_and_nothing_stays_charged(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=1000 * GIB)
    talk = Talk(stage, vgpu, "say(app.result('cuMemAlloc_v2', byref(c_uint64()), 900 * GIB))")
    (code,), slot = talk.next()
    assert code == 2
    assert slot.charged_bytes == 0


def test_each_kind_is_charged_and_given_back(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        """
pitched, pitch, managed, pooled = c_uint64(), c_size_t(), c_uint64(), c_uint64()
app.call("cuMemAllocPitch_v2", byref(pitched), byref(pitch), c_size_t(1000), c_size_t(1000), c_uint(4))
app.call("cuMemAllocManaged", byref(managed), c_size_t(3 << 20), c_uint(1))
app.call("cuMemAllocAsync", byref(pooled), c_size_t(5 << 20), app.stream)
say()
app.call("cuMemFreeAsync", pooled, app.stream)
app.free(managed.value)
app.free(pitched.value)
app.synchronize()
say()
""",
    )
    _, slot = talk.next()
    assert slot.committed_bytes[:4] == (2 << 20, 3 << 20, 0, 32 << 20)
    _, slot = talk.next()
    assert slot.charged_bytes == 0


def test_any_free_frees_any_pointer(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        """
pooled = c_uint64()
app.call("cuMemAllocAsync", byref(pooled), c_size_t(5 << 20), app.stream)
app.synchronize()
app.free(pooled.value)
app.synchronize()
say(app.result("cuMemFree_v2", c_uint64(0xDEAD0000)))
""",
    )
    (unknown,), slot = talk.next()
    assert unknown != 0
    assert slot.charged_bytes == 0


def test_physical_memory_is_charged_until_the_last_of_handle_and_mapping(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(memory_bytes=8 << 20),
        """
size = 4 << 20
code, handle = create_physical(app, size)
address = c_uint64()
app.call("cuMemAddressReserve", byref(address), c_size_t(2 * size), c_size_t(0), c_uint64(0), c_uint64(0))
app.call("cuMemMap", address, c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
app.call("cuMemRelease", c_uint64(handle))
say(code)                                                       # released, still mapped
code, second = create_physical(app, size)
app.call("cuMemMap", c_uint64(address.value + size), c_size_t(size), c_size_t(0), c_uint64(second), c_uint64(0))
say(code, create_physical(app, size)[0])                        # full
app.call("cuMemUnmap", address, c_size_t(2 * size))
say()                                                           # one unmap for both: the second has its handle yet
app.call("cuMemRelease", c_uint64(second))
say()
code, third = create_physical(app, size)
app.call("cuMemMap", address, c_size_t(size), c_size_t(0), c_uint64(third), c_uint64(0))
again = c_uint64()
app.call("cuMemRetainAllocationHandle", byref(again), c_void_p(address.value))
app.call("cuMemUnmap", address, c_size_t(size))
app.call("cuMemRelease", again)
say()                                                           # unmapped, one of two handles released
app.call("cuMemRelease", c_uint64(third))
say()
""",
    )
    (code,), slot = talk.next()
    assert (code, slot.charged_bytes) == (0, 4 << 20)
    (code, full), slot = talk.next()
    assert (code, full, slot.charged_bytes, slot.refusals) == (0, 2, 8 << 20, 1)
    assert slot.committed_bytes[2] == 8 << 20
    assert talk.next()[1].charged_bytes == 4 << 20
    assert talk.next()[1].charged_bytes == 0
    assert talk.next()[1].charged_bytes == 4 << 20
    assert talk.next()[1].charged_bytes == 0


@pytest.mark.parametrize("create", ["cuCtxCreate_v2", "cuGLCtxCreate_v2"])
def test_a_context_takes_its_memory_along(stage: Stage, create: str) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        f"""
own = c_void_p()
app.call("{create}", byref(own), c_uint(0), app.device)
for i in range(100):
    app.allocate(1 << 20)
primary = c_void_p()
app.call("cuDevicePrimaryCtxRetain", byref(primary), app.device)
app.call("cuCtxSetCurrent", primary)
app.allocate(7 << 20)
say()
app.call("cuCtxDestroy_v2", own)
say()
app.call("cuDevicePrimaryCtxRelease_v2", app.device)            # the first of two retains: it lives on
say()
app.call("cuDevicePrimaryCtxReset_v2", app.device)
say()
""",
    )
    charged = [talk.next()[1].charged_bytes for _ in range(4)]
    assert charged == [108 << 20, 8 << 20, 8 << 20, 0]


def test_memory_of_before_there_was_another_context_is_the_primary_ones(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        """
app.allocate(5 << 20)                                           # not asked yet whose it is
own = c_void_p()
app.call("cuCtxCreate_v2", byref(own), c_uint(0), app.device)
app.allocate(1 << 20)
app.allocate(3 << 20)
say()
app.call("cuCtxDestroy_v2", own)
say()
app.call("cuDevicePrimaryCtxReset_v2", app.device)
say()
primary = c_void_p()
app.call("cuDevicePrimaryCtxRetain", byref(primary), app.device)
app.call("cuCtxSetCurrent", primary)
app.allocate(7 << 20)
say()
""",
    )
    assert [talk.next()[1].charged_bytes for _ in range(4)] == [12 << 20, 6 << 20, 0, 8 << 20]


def test_a_context_takes_its_memory_along_when_its_last_user_detaches(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        """
own, attached = c_void_p(), c_void_p()
app.call("cuCtxCreate_v2", byref(own), c_uint(0), app.device)
app.allocate(5 << 20)
app.call("cuCtxAttach", byref(attached), c_uint(0))
say(attached.value == own.value, app.result("cuCtxDetach", own))
app.call("cuCtxPushCurrent_v2", own)                            # twice in the thread's stack
say(True, app.result("cuCtxDetach", own))
say(True, app.result("cuCtxDetach", own))                       # it is no more
""",
    )
    answers = [talk.next() for _ in range(3)]
    assert [said for said, _ in answers] == [[True, 0], [True, 0], [True, INVALID_CONTEXT]]
    assert [slot.charged_bytes for _, slot in answers] == [6 << 20, 0, 0]


def test_a_green_contexts_memory_is_the_primary_ones(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        """
green, context = app.green_context()
app.call("cuCtxPushCurrent_v2", context)
memory = app.allocate(5 << 20)
app.allocate(1 << 20)
app.call("cuCtxPopCurrent_v2", byref(context))
app.call("cuGreenCtxDestroy", green)
say()
app.free(memory)
say()
app.call("cuDevicePrimaryCtxReset_v2", app.device)
say()
""",
    )
    assert [talk.next()[1].charged_bytes for _ in range(3)] == [8 << 20, 2 << 20, 0]


RACE = """
def race(gpu):
    for i in range(300):
        pointer = c_uint64()
        if gpu.cuMemAlloc_v2(byref(pointer), c_size_t(60 << 20)) == 0:
            gpu.cuMemFree_v2(pointer)
in_eight_threads(race)
say()
"""


def test_threads_never_exceed_the_limit(stage: Stage) -> None:
    talk = Talk(stage, stage.vgpu(memory_bytes=200 << 20), THREADS + RACE)
    _, slot = talk.next()
    assert slot.charged_bytes == 0
    assert slot.peak_bytes <= 180 << 20


def test_what_threads_allocate_and_free_is_known_to_the_byte(stage: Stage) -> None:
    """Small ones share pieces, the others have their own; each thread frees every other one, and all of it later."""
    body = """
kept = []
def work(gpu):
    for i in range(200):
        pointer = c_uint64()
        assert gpu.cuMemAlloc_v2(byref(pointer), c_size_t((4096, 3 << 20)[i % 2])) == 0
        if i % 4 < 2:
            kept.append(pointer.value)
        else:
            assert gpu.cuMemFree_v2(pointer) == 0
in_eight_threads(work)
say(len(kept))
for pointer in kept:
    app.free(pointer)
say()
"""
    talk = Talk(stage, stage.vgpu(memory_bytes=100 * GIB), THREADS + body)
    (kept,), slot = talk.next()
    assert kept == 800
    assert slot.reserved_bytes == 0
    assert slot.charged_bytes == slot.committed_bytes[0]
    assert 400 * (4 << 20) < slot.charged_bytes <= 400 * (4 << 20) + 8 * (2 << 20)
    assert talk.next()[1].charged_bytes == 0


def test_killed_in_the_middle_of_allocating(stage: Stage) -> None:
    vgpu = stage.vgpu()
    vgpu.open()
    body = "print('[]', flush=True)\nwhile True: app.free(app.allocate(1 << 20))"
    victim = stage.start(PROLOGUE + body, stage.environment(vgpu))
    other = stage.start(PROLOGUE + "app.allocate(2 << 20)\nsay()\nsay(app.memory_info())", stage.environment(vgpu))
    stage.heard(victim)
    stage.heard(other)
    victim.kill()
    victim.wait()
    dead = next(s.index for s in vgpu.slots() if s.pid == victim.pid)
    eventually(lambda: vgpu.activity.read_slot(dead).state == 3, "the death was seen")
    vgpu.activity.reap_slot(dead)
    stage.tell(other)
    free, total = json.loads(stage.heard(other))[0]
    assert total - free == 2 << 20


def test_the_primary_context_dies_with_the_last_green_one_that_holds_it(stage: Stage) -> None:
    talk = Talk(
        stage,
        stage.vgpu(),
        """
green, context = app.green_context()
app.allocate(5 << 20)
app.call("cuCtxPushCurrent_v2", context)
app.allocate(1 << 20)
app.call("cuDevicePrimaryCtxRelease_v2", app.device)
say()
app.call("cuGreenCtxDestroy", green)
say()
""",
    )
    assert [talk.next()[1].charged_bytes for _ in range(2)] == [8 << 20, 0]


@pytest.mark.parametrize("asked", ["byref(word), None", "None, byref(word)", "None, None"])
def test_memory_that_is_asked_for_in_part(vgpu: StagedVgpu, stage: Stage, asked: str) -> None:
    """NVIDIA's driver takes a NULL for either result of cuMemGetInfo."""
    program = f"""
from ctypes import byref, c_size_t
from tests.hook.app import App
app, word = App(), c_size_t()
print(app.result("cuMemGetInfo_v2", {asked}), word.value <= {8 * GIB})
"""
    ran = stage.run(program, stage.environment(vgpu))
    assert (ran.returncode, ran.stdout) == (0, "0 True\n"), ran.stderr
