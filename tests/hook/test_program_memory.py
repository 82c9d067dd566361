"""--oversubscribe swap: memory of cuMemCreate leaves the card, and keeps its handles, its addresses and its access."""

from __future__ import annotations

import pytest

from cython_ext.pages.storepage import STORE_SEGMENT_BLOCKS
from cython_ext.readings import SHARED, Where
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.test_swap import AWAY, MIB, Program, swappable

WORK = """
class Access(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]
def reserve(size):
    address = c_uint64()
    app.call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
    return address.value
def maps(handle, address, size, offset=0, flags=0):
    numbers = c_uint64(address), c_size_t(size), c_size_t(offset), c_uint64(handle), c_uint64(flags)
    return app.result("cuMemMap", *numbers)
def mapped(handle, address, size, flags=3):
    assert maps(handle, address, size) == 0
    if flags:
        access = Access(1, 0, flags)
        app.call("cuMemSetAccess", c_uint64(address), c_size_t(size), byref(access), c_size_t(1))
    return address
def made(size, **more):
    code, handle = create_physical(app, size, **more)
    assert code == 0, code
    return handle
def fill(address, size, byte):
    app.call("cuMemsetD8_v2", c_uint64(address), byte, c_size_t(size))
    app.synchronize()
def unmap(address, size):
    return app.result("cuMemUnmap", c_uint64(address), c_size_t(size))
def release(handle):
    return app.result("cuMemRelease", c_uint64(handle))
"""


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage, blocks=2 * STORE_SEGMENT_BLOCKS)


def program(stage: Stage, vgpu: StagedVgpu, body: str) -> Program:
    return Program(stage, vgpu, WORK + body)


def test_it_leaves_the_card_and_is_at_all_its_addresses_again(stage: Stage, vgpu: StagedVgpu) -> None:
    """Memory of several chunks, mapped twice; of one chunk; released, but mapped; and not mapped at all."""
    work = program(
        stage,
        vgpu,
        """
large, small, unmapped = 70 << 20, 20 << 20, 4 << 20
handle = made(large)
first = mapped(handle, reserve(large), large)
second = mapped(handle, reserve(large), large)
fill(first, large, 7)
segment = reserve(4 * small)
for part in range(3):
    piece = made(small, handle_types=1)
    mapped(piece, segment + part * small, small)
    fill(segment + part * small, small, 20 + part)
    assert release(piece) == 0
kept = made(unmapped)
fill(mapped(kept, segment + 3 * small, unmapped), unmapped, 9)
assert unmap(segment + 3 * small, unmapped) == 0
for _ in range(3):
    say()
    app.kernel(0.5).launch()
    app.synchronize()
    fill(second, 5, 8)
    shown = [bytes_of(first, large), bytes_of(second, large), app.read(first, 6).hex()]
    fill(first, 5, 7)
    again = mapped(kept, segment + 3 * small, unmapped)
    shown += [bytes_of(segment + part * small, small) for part in range(3)] + [bytes_of(again, unmapped)]
    assert unmap(again, unmapped) == 0
    say(shown, handle == first)
""",
    )
    for _ in range(3):
        work.hear()
        owned = (70 + 60 + 4) * MIB
        assert (work.on_card(), vgpu.slot().charged_bytes) == (owned, owned)
        work.leave()
        assert (work.on_card(), vgpu.slot().away_bytes, vgpu.slot().charged_bytes) == (0, owned, owned)
        work.go_on()
        eventually(lambda: vgpu.slot().want, "it wants the GPU")
        work.come_back()
        shown, _ = work.hear()  # type: ignore[misc]
        assert shown == [[7, 8], [7, 8], "080808080807", [20], [21], [22], [9]]
        assert (work.on_card(), vgpu.slot().away_bytes) == (owned, 0)
        vgpu.withdraw()
        work.go_on()


def test_it_goes_with_the_last_of_its_handles_and_mappings(stage: Stage, vgpu: StagedVgpu) -> None:
    work = program(
        stage,
        vgpu,
        """
size = 4 << 20
handle, place = made(size), reserve(3 * size)
mapped(handle, place, size)
mapped(handle, place + size, size)
again = c_uint64()
app.call("cuMemRetainAllocationHandle", byref(again), c_void_p(place + 100))
say(again.value == handle, release(handle), release(handle), release(handle))     # the third is one too many
say(unmap(place, size // 2), unmap(place, 3 * size), unmap(place, 2 * size), unmap(place, size), release(handle))
code, last = create_physical(app, size)
say(code, release(last), maps(last, place, size))
""",
    )
    assert work.hear() == [True, 0, 0, 1]
    assert (work.on_card(), vgpu.slot().charged_bytes) == (4 * MIB, 4 * MIB)
    work.go_on()
    assert work.hear() == [1, 1, 0, 1, 1]
    assert (work.on_card(), vgpu.slot().charged_bytes) == (0, 0)
    work.go_on()
    assert work.hear() == [0, 0, 1]
    assert (work.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_what_the_driver_refuses_is_refused(stage: Stage, vgpu: StagedVgpu) -> None:
    work = program(
        stage,
        vgpu,
        """
size = 4 << 20
handle, place = made(size), reserve(2 * size)
def tries(address, size, offset=0, flags=0):
    return maps(handle, address, size, offset, flags)
say(create_physical(app, 1000)[0], create_physical(app, size, device=7)[0] != 0,
    tries(place, 0), tries(place, 2 * size), tries(place, size, offset=size), tries(place, size, flags=1),
    tries(place + 1000, size), tries(place + 2 * size, size))
say(tries(place, size), tries(place, size), tries(place + size, size))
""",
    )
    assert work.hear() == [1, True, 1, 801, 801, 1, 1, 1]
    assert work.on_card() == 4 * MIB
    work.go_on()
    assert work.hear() == [0, 1, 0]


def test_questions_are_answered_of_the_mapping(stage: Stage, vgpu: StagedVgpu) -> None:
    work = program(
        stage,
        vgpu,
        """
size = 70 << 20
handle = made(size, handle_types=9)
place = mapped(handle, reserve(size), size)
split = made(size)
other = mapped(split, reserve(size), size)
properties = (ctypes.c_int * 8)()
app.call("cuMemGetAllocationPropertiesFromHandle", byref(properties), c_uint64(handle))
flags = c_uint64()
def answers():
    app.call("cuMemGetAccess", byref(flags), byref(Access(1, 0, 0)), c_uint64(place))
    base, length = range_of(other + (50 << 20))
    start, end = attribute(11, other + (50 << 20)), attribute(12, other + size - 1)
    return [base - other, length, start - other, end, flags.value]
say(list(properties)[:4], answers())
say(answers())
""",
    )
    expected = [0, 70 * MIB, 0, 70 * MIB, 3]
    assert work.hear() == [[1, 9, 1, 0], expected]
    work.leave()
    work.go_on()
    eventually(lambda: vgpu.slot().want, "it wants the GPU")
    work.come_back()
    assert work.hear() == [expected]


def test_exported_memory_stays_on_the_card(stage: Stage, vgpu: StagedVgpu) -> None:
    work = program(
        stage,
        vgpu,
        """
size = 40 << 20
shared, own, split = made(size, handle_types=1), made(size, handle_types=1), made(size)
for byte, handle in enumerate((shared, own), 1):
    fill(mapped(handle, reserve(size), size), size, byte)
descriptor = ctypes.c_int()
def exports(handle):
    return app.result("cuMemExportToShareableHandle", byref(descriptor), c_uint64(handle), 1, c_uint64(0))
say(exports(shared), exports(shared), exports(split))
say(exports(own))
assert release(shared) == 0
say()
""",
    )
    assert work.hear() == [0, 0, 1]
    assert vgpu.slot().charged_bytes == 120 * MIB
    assert vgpu.slot().committed_bytes[0] == 80 * MIB
    assert vgpu.slot().committed_bytes[SHARED] == 40 * MIB
    work.leave()
    assert (work.on_card(), vgpu.slot().away_bytes) == (40 * MIB, 80 * MIB)
    work.go_on()
    eventually(lambda: vgpu.slot().want, "it wants the GPU")
    work.come_back()
    assert work.hear() == [0]
    assert vgpu.slot().committed_bytes[SHARED] == 80 * MIB


def test_it_waits_for_room_and_is_refused_over_the_limit(stage: Stage) -> None:
    vgpu = swappable(stage, 100 * MIB)
    vgpu.grants.card_limit_bytes = 10 * MIB
    work = program(
        stage,
        vgpu,
        """
first = made(8 << 20)
say(create_physical(app, 94 << 20)[0])
second = made(6 << 20)
say(release(first), release(second))
""",
    )
    assert work.hear() == [2]
    work.go_on()
    eventually(lambda: vgpu.slot().room_bytes == 6 * MIB, "it asks for room")
    work.leave()
    vgpu.grants.card_limit_bytes = 14 * MIB
    work.come_back()
    assert work.hear() == [0, 0]
    assert (work.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_access_that_was_not_set_is_not_there_after_a_swap(stage: Stage, vgpu: StagedVgpu) -> None:
    """Memory that the program may only read, and memory that it has mapped without access, is copied all the same."""
    work = program(
        stage,
        vgpu,
        """
size = 4 << 20
first, second, place = made(size), made(size), reserve(4 * size)
for handle, byte, flags in ((first, 5, 0), (second, 6, 1)):
    at = place + 2 * size * (byte - 5)
    fill(mapped(handle, at, size), size, byte)
    app.call("cuMemUnmap", c_uint64(at), c_size_t(size))
    mapped(handle, at, size, flags=flags)
    mapped(handle, at + size, size, flags=0)
flags = c_uint64()
def access():
    found = []
    for at in range(place, place + 4 * size, size):
        app.call("cuMemGetAccess", byref(flags), byref(Access(1, 0, 0)), c_uint64(at))
        found.append(flags.value != 0)
    return found
say(access())
say(access())
allowed = Access(1, 0, 3)
app.call("cuMemSetAccess", c_uint64(place), c_size_t(4 * size), byref(allowed), c_size_t(1))
say([bytes_of(at, size) for at in range(place, place + 4 * size, size)])
""",
    )
    assert work.hear() == [[False, False, True, False]]
    work.leave()
    work.go_on()
    work.come_back()
    assert work.hear() == [[False, False, True, False]]
    work.go_on()
    assert work.hear() == [[[5], [5], [6], [6]]]


def test_tiles_of_sparse_arrays_stay_on_the_card(stage: Stage, vgpu: StagedVgpu) -> None:
    work = program(
        stage,
        vgpu,
        """
tiles, other = made(4 << 20, flags=1 << 16), made(4 << 20)
say()
say(release(tiles), release(other))
""",
    )
    work.hear()
    assert (vgpu.slot().committed_bytes[0], vgpu.slot().committed_bytes[2]) == (4 * MIB, 4 * MIB)
    work.leave()
    assert (work.on_card(), vgpu.slot().away_bytes) == (4 * MIB, 4 * MIB)
    work.go_on()
    work.come_back()
    assert work.hear() == [0, 0]
    assert (work.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_it_is_not_moved_under_a_copy_in_another_context(stage: Stage, vgpu: StagedVgpu) -> None:
    """It was mapped in the first context, and each context of the device may use it."""
    work = program(
        stage,
        vgpu,
        """
size = 4 << 20
place = mapped(made(size), reserve(size), size)
fill(place, size, 9)
second = c_void_p()
app.call("cuCtxCreate_v2", byref(second), 0, app.device)
flag = ctypes.c_uint32()
app.call("cuMemHostRegister_v2", byref(flag), c_size_t(4), 0)
stream = app.new_stream(1)
app.call("cuMemsetD8Async", c_uint64(place), 9, c_size_t(size), stream)
app.call("cuStreamSynchronize", stream)
say()
app.call("cuStreamWaitValue32_v2", stream, c_uint64(ctypes.addressof(flag)), c_uint(1), c_uint(0))
data = (ctypes.c_char * 512)(*b"\\x07" * 512)
app.call("cuMemcpyHtoDAsync_v2", c_uint64(place), data, c_size_t(512), stream)
say()
flag.value = 1
app.call("cuStreamSynchronize", stream)
say(bytes_of(place, 512))
""",
    )
    work.hear()
    eventually(lambda: not vgpu.slot().want, "it is idle")
    work.go_on()
    work.hear()
    vgpu.withdraw()
    vgpu.grants.flags = vgpu.grants.flags | AWAY
    work.until(Where.STUCK)
    assert work.on_card() == 4 * MIB
    work.go_on()
    work.until(Where.AWAY)
    work.come_back()
    assert work.hear() == [[7]]


def test_without_swap_the_handles_are_the_drivers(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=GIB)
    work = program(
        stage,
        vgpu,
        """
handle = made(4 << 20)
place = mapped(handle, reserve(4 << 20), 4 << 20)
say(app.result("cuMemAddressFree", c_uint64(handle), c_size_t(4 << 20)))
""",
    )
    assert work.hear() == [1]  # no address of the hook's
    assert vgpu.slot().committed_bytes[2] == 4 * MIB
