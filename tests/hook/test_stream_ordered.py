"""cuMemAllocAsync with --oversubscribe swap: such memory leaves the card, and its free waits for no work."""

from __future__ import annotations

import pytest

from tests.hook.stage import Stage, StagedVgpu, eventually
from tests.hook.talk import THREADS
from tests.hook.test_graph_memory import PROLOGUE as GRAPHS
from tests.hook.test_pools import POOLS
from tests.hook.test_swap import MIB, Program, swappable


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage)


ORDERED = """
def attribute_of(pool, which):
    value = c_uint64()
    app.call("cuMemPoolGetAttribute", pool, which, byref(value))
    return value.value
def fill(address, size, byte, stream=None):
    app.call("cuMemsetD8Async", c_uint64(address), byte, c_size_t(size), stream or app.stream)
def waiting_stream():
    "What is in it goes on once the flag is 1."
    flag = ctypes.c_uint32()
    app.call("cuMemHostRegister_v2", byref(flag), c_size_t(4), 0)
    stream = app.new_stream(1)
    app.call("cuStreamWaitValue32_v2", stream, c_uint64(ctypes.addressof(flag)), c_uint(1), c_uint(0))
    return stream, flag
def take(size, stream):
    address = c_uint64()
    app.call("cuMemAllocAsync", byref(address), c_size_t(size), stream)
    return address.value
def give(address, stream):
    app.call("cuMemFreeAsync", c_uint64(address), stream)
"""


def program(stage: Stage, vgpu: StagedVgpu, body: str) -> Program:
    return Program(stage, vgpu, POOLS + ORDERED + body)


@pytest.mark.parametrize("pool", ["None", "pool_of()", "new_pool()"])
def test_it_leaves_the_card_and_comes_back_to_the_same_addresses(stage: Stage, vgpu: StagedVgpu, pool: str) -> None:
    talk = program(
        stage,
        vgpu,
        f"""
pool = {pool}
blocks = [(allocate(size, pool)[1].value, size, byte) for byte, size in enumerate((1, 3000, 5 << 20, 70 << 20), 1)]
for address, size, byte in blocks:
    fill(address, size, byte)
app.synchronize()
say(attribute_of(pool or pool_of(), 7))
say([bytes_of(address, size) == [byte] for address, size, byte in blocks])
""",
    )
    assert talk.hear() == [3584 + 76 * MIB]  # units of 512 bytes, and pieces of 2 MiB
    charged = vgpu.slot().charged_bytes
    assert talk.on_card() == charged == 78 * MIB
    talk.leave()
    assert (talk.on_card(), vgpu.slot().away_bytes) == (0, charged)
    talk.go_on()
    eventually(lambda: vgpu.slot().want, "it wants the GPU")
    talk.come_back()
    assert talk.hear() == [[True] * 4]


def test_a_free_waits_for_no_work_and_its_stream_has_the_block_again(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
stream, flag = waiting_stream()
other = app.new_stream(1)
first, small = take(6 << 20, stream), take(700, stream)
give(first, stream), give(small, stream)
again, elsewhere = take(5 << 20, stream), take(6 << 20, other)
say(again == first, elsewhere != first, take(1000, stream) == small, take(100, stream) != small)
fill(again, 5 << 20, 3, stream)
flag.value = 1
app.call("cuStreamSynchronize", stream)
give(elsewhere, other), app.call("cuStreamSynchronize", other)
say(bytes_of(again, 5 << 20))
""",
    )
    assert talk.hear() == [True, True, True, True]
    assert vgpu.slot().charged_bytes == 14 * MIB
    talk.go_on()
    assert talk.hear() == [[3]]
    assert (talk.on_card(), vgpu.slot().charged_bytes) == (8 * MIB, 8 * MIB)


def test_another_stream_has_the_block_once_its_work_has_passed(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
stream, flag = waiting_stream()
other = app.new_stream(1)
block = take(6 << 20, stream)
give(block, stream)
before = take(6 << 20, other)
flag.value = 1
app.call("cuStreamSynchronize", stream)
say(before != block, take(6 << 20, other) == block)
""",
    )
    assert talk.hear() == [True, True]
    assert vgpu.slot().charged_bytes == 12 * MIB


def test_the_release_threshold_keeps_it_until_a_trim(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
blocks = [allocate(size * MIB)[1] for size in (4, 6, 8)]
for block in blocks[1:]:
    free(block)
app.synchronize()
say(attribute_of(pool_of(), 5), attribute_of(pool_of(), 7))
app.call("cuMemPoolTrimTo", pool_of(), c_size_t(8 * MIB))
say(attribute_of(pool_of(), 5), attribute_of(pool_of(), 7))
app.call("cuMemPoolTrimTo", pool_of(), c_size_t(0))
say(app.result("cuMemFreeAsync", blocks[2], app.stream), app.result("cuMemFree_v2", blocks[0]))
say()
""",
    )
    assert talk.hear() == [18 * MIB, 4 * MIB]
    assert vgpu.slot().charged_bytes == 18 * MIB
    talk.go_on()
    assert talk.hear() == [4 * MIB, 4 * MIB]  # what is used counts, so neither of the others fits
    talk.go_on()
    assert talk.hear() == [1, 0]
    talk.go_on()
    talk.hear()
    assert (talk.on_card(), vgpu.slot().charged_bytes) == (0, 0)


@pytest.mark.parametrize(
    "other", ["app.allocate(60 * MIB)", "allocate(60 * MIB)[1].value", "create_physical(app, 60 * MIB)[1]"]
)
def test_what_was_returned_makes_room_before_a_refusal(stage: Stage, other: str) -> None:
    vgpu = swappable(stage, memory_bytes=80 * MIB)
    talk = program(
        stage,
        vgpu,
        f"""
keep_all(pool_of())
for size in (30, 40):
    free(allocate(size * MIB)[1])
app.synchronize()
say({other} != 0)
say(allocate(30 * MIB)[0])
""",
    )
    assert talk.hear() == [True]
    assert vgpu.slot().charged_bytes == 60 * MIB
    talk.go_on()
    assert talk.hear() == [2]


def test_a_refusal_waits_for_what_was_freed_behind_work(stage: Stage) -> None:
    vgpu = swappable(stage, memory_bytes=80 * MIB)
    talk = program(
        stage,
        vgpu,
        """
block = allocate(60 * MIB)[1]
app.kernel(200).launch()
free(block)
say(allocate(50 * MIB)[0])
""",
    )
    assert talk.hear() == [0]


def test_returned_blocks_are_not_swapped_out(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
kept, block = allocate(4 * MIB)[1].value, allocate(60 * MIB)[1]
fill(kept, 4 * MIB, 6)
free(block)
say()
say(bytes_of(kept, 4 * MIB), allocate(60 * MIB)[0])
""",
    )
    talk.hear()
    assert vgpu.slot().charged_bytes == 64 * MIB
    talk.leave()
    assert (vgpu.slot().charged_bytes, vgpu.slot().away_bytes) == (4 * MIB, 4 * MIB)
    talk.go_on()
    talk.come_back()
    assert talk.hear() == [[6], 0]


def test_a_program_that_has_freed_all_can_leave(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(stage, vgpu, "keep_all(pool_of())\nfree(allocate(6 * MIB)[1])\nsay()\n")
    talk.hear()
    assert talk.on_card() == 6 * MIB
    talk.leave()
    assert (talk.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_memory_that_another_process_may_have_stays_with_the_driver(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
pools = []
for properties in (Properties(type=1, location=1, handles=1), Properties(type=1, location=1, most=1 << 30)):
    pool = c_void_p()
    app.call("cuMemPoolCreate", byref(pool), byref(properties))
    pools.append(pool)
say([allocate(5 * MIB, pool)[0] for pool in pools], [attribute_of(pool, 7) for pool in pools])
""",
    )
    assert talk.hear() == [[0, 0], [5 * MIB, 5 * MIB]]
    assert vgpu.slot().charged_bytes == 64 * MIB
    talk.leave()
    assert talk.on_card() == vgpu.slot().charged_bytes > 0


def test_what_pools_and_idle_graphs_keep_goes_back_before_it_leaves(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        GRAPHS
        + """
pool = c_void_p()
app.call("cuMemPoolCreate", byref(pool), byref(Properties(type=1, location=1, handles=1)))
keep_all(pool)
free(allocate(40 * MIB, pool)[1])
graph = lasting(50 * MIB)
say(launch(graph), app.synchronize())
say(launch(graph), app.synchronize())
""",
    )
    assert talk.hear() == [0, None]
    assert vgpu.slot().charged_bytes > 90 * MIB
    talk.leave()
    assert (talk.on_card(), vgpu.slot().charged_bytes) == (0, 0)
    talk.go_on()
    talk.come_back()
    assert talk.hear() == [0, None]
    assert vgpu.slot().charged_bytes >= 50 * MIB


@pytest.mark.parametrize(
    "act",
    [
        "allocate(20 * MIB, shareable())[0]",
        "launch(lasting(20 * MIB))",
        "app.result('cuGraphUpload', lasting(20 * MIB), app.stream)",
        "allocate(20 * MIB)[0]",
    ],
)
def test_what_the_card_has_no_room_for_waits_until_others_have_left(stage: Stage, vgpu: StagedVgpu, act: str) -> None:
    vgpu.grants.card_limit_bytes = 10 * MIB
    talk = program(
        stage,
        vgpu,
        GRAPHS
        + f"""
def shareable():
    pool = c_void_p()
    app.call("cuMemPoolCreate", byref(pool), byref(Properties(type=1, location=1, handles=1)))
    return pool
block = filled(6 * MIB, 4)
say()
say({act}, bytes_of(block, 6 * MIB))
""",
    )
    talk.hear()
    talk.go_on()
    eventually(lambda: vgpu.slot().room_bytes >= 20 * MIB, "it asks for room")
    assert vgpu.slot().want
    talk.leave()  # it may be the one that has to
    assert talk.on_card() == 0
    vgpu.grants.card_limit_bytes = 80 * MIB
    talk.come_back()
    assert talk.hear() == [0, [4]]
    assert (vgpu.slot().room_bytes, vgpu.slot().refusals) == (0, 0)


def test_a_context_takes_what_was_returned_along(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
context = c_void_p()
app.call("cuCtxCreate_v2", byref(context), 0, app.device)
blocks = [take(size, None) for size in (10, 4 << 20)]
for block in blocks:
    give(block, None)
say()
app.call("cuCtxDestroy_v2", context)
say(take(1, app.stream) != 0)
""",
    )
    talk.hear()
    assert vgpu.slot().charged_bytes == 6 * MIB
    talk.go_on()
    assert talk.hear() == [True]
    assert vgpu.slot().charged_bytes == 2 * MIB


def test_a_free_waits_for_no_work_however_many_there_are(stage: Stage, vgpu: StagedVgpu) -> None:
    """The work waits for this very thread."""
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
stream, flag = waiting_stream()
blocks = [take(size % 97 + 1 << 9, stream) for size in range(500)]
for block in blocks:
    give(block, stream)
flag.value = 1
app.call("cuStreamSynchronize", stream)
app.call("cuMemPoolTrimTo", pool_of(), c_size_t(0))
say()
""",
    )
    talk.hear()
    assert (talk.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_peaks_are_the_largest_sums_until_they_are_reset(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
first, second = allocate(4 * MIB)[1], allocate(6 * MIB)[1]
free(second)
say([attribute_of(pool_of(), which) // MIB for which in (5, 6, 7, 8)])
for which in (6, 8):
    app.call("cuMemPoolSetAttribute", pool_of(), which, byref(c_uint64()))
app.synchronize()
app.call("cuMemPoolTrimTo", pool_of(), c_size_t(0))
for which in (6, 8):
    app.call("cuMemPoolSetAttribute", pool_of(), which, byref(c_uint64()))
say([attribute_of(pool_of(), which) // MIB for which in (5, 6, 7, 8)])
""",
    )
    assert talk.hear() == [[10, 10, 4, 10]]
    talk.go_on()
    assert talk.hear() == [[4, 4, 4, 4]]


def test_the_driver_answers_where_no_context_is_current(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(
        stage,
        vgpu,
        """
app.call("cuCtxSetCurrent", None)
address = c_uint64()
say(app.result("cuMemAllocAsync", byref(address), c_size_t(100), None))
""",
    )
    assert talk.hear() == [201]
    assert vgpu.slot().charged_bytes == 0


def test_a_pool_that_is_full_is_refused_at_once(stage: Stage, vgpu: StagedVgpu) -> None:
    """No other vGPU leaves for it."""
    talk = program(
        stage,
        vgpu,
        """
pool = c_void_p()
app.call("cuMemPoolCreate", byref(pool), byref(Properties(type=1, location=1, most=64 << 20)))
say([allocate(50 * MIB, pool)[0] for _ in range(2)])
""",
    )
    assert talk.hear() == [[0, 2]]
    assert vgpu.slot().room_bytes == 0


def test_beyond_the_limit_nothing_is_waited_for_in_vain(stage: Stage) -> None:
    """What was freed waits for this very thread, and would not do."""
    vgpu = swappable(stage, memory_bytes=80 * MIB)
    talk = program(
        stage,
        vgpu,
        """
keep_all(pool_of())
kept = allocate(50 * MIB)[1]
stream, flag = waiting_stream()
give(take(20 << 20, stream), stream)
say(allocate(40 * MIB)[0], app.allocate(40 * MIB))
flag.value = 1
say(allocate(30 * MIB)[0])
""",
    )
    assert talk.hear() == [2, None]
    assert vgpu.slot().charged_bytes == 70 * MIB
    talk.go_on()
    assert talk.hear() == [0]


CHURN = """
import random
def churn(gpu):
    chance, stream, live = random.Random(threading.get_ident()), c_void_p(), []
    failed.append(gpu.cuStreamCreate(byref(stream), 1))
    for i in range(150):
        size, byte, address = chance.choice((300, 3000, 1 << 20, 3 << 20)), i % 251, c_uint64()
        failed.append(gpu.cuMemAllocAsync(byref(address), c_size_t(size), stream))
        failed.append(gpu.cuMemsetD8Async(address, byte, c_size_t(size), stream))
        live.append((address, size, byte))
        if len(live) > 3:
            address, size, byte = live.pop(chance.randrange(4))
            last = (ctypes.c_ubyte * 300)()
            at = c_uint64(address.value + size - 300)
            failed.append(gpu.cuMemcpyDtoHAsync_v2(last, at, c_size_t(300), stream))
            failed.append(gpu.cuMemFreeAsync(address, stream))
            failed.append(gpu.cuStreamSynchronize(stream))
            failed.append({*last} != {byte})
    for address, size, byte in live:
        failed.append(gpu.cuMemFreeAsync(address, stream))
    failed.append(gpu.cuStreamSynchronize(stream))
failed = []
keep_all(pool_of())
say()
in_eight_threads(churn)
app.call("cuMemPoolTrimTo", pool_of(), c_size_t(0))
say(sum(map(bool, failed)))
"""


@pytest.mark.slow
def test_threads_that_allocate_all_the_while_see_a_pause_and_their_own_bytes(stage: Stage, vgpu: StagedVgpu) -> None:
    talk = program(stage, vgpu, THREADS + CHURN)
    talk.hear()
    talk.go_on()
    for _ in range(5):
        talk.leave()
        talk.come_back()
    assert talk.hear() == [0]
    assert (talk.on_card(), vgpu.slot().charged_bytes) == (0, 0)
