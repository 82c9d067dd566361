"""--oversubscribe swap: memory that leaves the card and comes back, and a program that only sees a pause."""

from __future__ import annotations

import json

import pytest

from cython_ext.pages.storepage import STORE_SEGMENT_BLOCKS, StorePage
from cython_ext.readings import GrantsFlag, Where
from cython_ext.simengine import Engine
from tests.hook.stage import GIB, Stage, StagedVgpu, eventually
from tests.hook.talk import THREADS, Talk

MIB = 1 << 20
AWAY = GrantsFlag.STILL | GrantsFlag.AWAY
LAUNCH_FAILED = 719

WORK = """
def filled(size, byte):
    address = app.allocate(size)
    app.call("cuMemsetD8_v2", c_uint64(address), byte, c_size_t(size))
    app.synchronize()
    return address
def bytes_of(address, size):
    return sorted({app.read(at, 1)[0] for at in range(address, address + size, 49_999)})
def attribute(which, address, kind=c_uint64):
    value = kind()
    code = app.result("cuPointerGetAttribute", byref(value), which, c_uint64(address))
    return value.value if code == 0 else None
def range_of(address):
    base, size = c_uint64(), c_size_t()
    assert app.result("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address)) == 0
    return base.value, size.value
"""


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage)


def swappable(stage: Stage, memory_bytes: int = 8 * GIB, blocks: int = STORE_SEGMENT_BLOCKS) -> StagedVgpu:
    """``blocks``: of its store, of which ``memory_bytes`` may be more."""
    vgpu = stage.vgpu(memory_bytes=memory_bytes)
    vgpu.grants.flags = vgpu.grants.flags | GrantsFlag.SWAPPABLE
    vgpu.store = StorePage.create(blocks)
    vgpu.store.grow(blocks)
    return vgpu


class Program(Talk):
    def __init__(self, stage: Stage, vgpu: StagedVgpu, body: str, **environment: str) -> None:
        super().__init__(stage, vgpu, WORK + body, **environment)
        self.engine = Engine(stage.gpus)

    def hear(self) -> object:
        """What it said; it waits for a word."""
        return json.loads(self.stage.heard(self.process))

    def go_on(self) -> None:
        self.stage.tell(self.process)

    def on_card(self) -> int:
        self.engine.refresh()
        return self.engine.memory_used_bytes - self.engine.context_bytes * len(self.engine.contexts())

    def leave(self) -> None:
        self.vgpu.withdraw()
        self.vgpu.grants.flags = self.vgpu.grants.flags & ~GrantsFlag.PRESENT | AWAY
        self.until(Where.AWAY)

    def come_back(self) -> None:
        self.vgpu.grants.flags = self.vgpu.grants.flags & ~AWAY | GrantsFlag.PRESENT
        self.until(Where.RESIDENT)
        self.vgpu.open()

    def until(self, where: Where) -> None:
        eventually(lambda: self.vgpu.slot().where == where, where.name)


def test_it_is_what_cumemalloc_gives(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
small = [app.allocate(size) for size in (1, 511, 512, 513, 1 << 20)]
large = filled(70 << 20, 7)
pitched, pitch = c_uint64(), c_size_t()
app.call("cuMemAllocPitch_v2", byref(pitched), byref(pitch), c_size_t(1000), c_size_t(10), c_uint(4))
say([address % 512 for address in small], len({*small}), bytes_of(large, 70 << 20), pitch.value)
inside = large + (40 << 20)
context = c_void_p()
app.call("cuCtxGetCurrent", byref(context))
same_buffer = attribute(7, inside) == attribute(7, large) != attribute(7, small[0])
say([at - large for at in (range_of(inside)[0], attribute(11, inside))], range_of(inside)[1], attribute(12, inside),
    attribute(1, inside) == context.value, same_buffer, range_of(small[3])[1], attribute(10, large, ctypes.c_bool))
for address in (*small[1:], large, pitched.value):
    app.free(address)
say(app.result("cuMemFree_v2", c_uint64(large)))
app.free(small[0])
say()
""",
    )
    assert program.hear() == [[0] * 5, 5, [7], 1024]
    assert (program.on_card(), vgpu.slot().charged_bytes) == (72 * MIB, 72 * MIB)
    program.go_on()
    assert program.hear() == [[0, 0], 70 * MIB, 70 * MIB, True, True, 513, False]
    program.go_on()
    assert program.hear() == [1]
    assert (program.on_card(), vgpu.slot().charged_bytes) == (2 * MIB, 2 * MIB)
    program.go_on()
    assert program.hear() == []
    assert (program.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_over_the_limit_the_call_itself_fails(stage: Stage) -> None:
    vgpu = swappable(stage, 100 * MIB)
    program = Program(
        stage,
        vgpu,
        """
first = app.allocate(90 << 20)
say(first is not None, app.allocate(11 << 20), app.allocate(10 << 20) is not None, app.allocate(1), app.memory_info())
""",
    )
    assert program.hear() == [True, None, True, None, [0, 100 * MIB]]
    assert (vgpu.slot().refusals, program.on_card()) == (2, 100 * MIB)


def test_it_leaves_the_card_and_comes_back_to_the_same_addresses(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
blocks = [(filled(size, byte), size, byte) for byte, size in enumerate((1, 3000, 1 << 20, 2 << 20, 100 << 20), 1)]
for _ in range(3):
    say()
    app.kernel(0.5).launch()
    app.synchronize()
    say([bytes_of(address, size) == [byte] for address, size, byte in blocks])
""",
    )
    for _ in range(3):
        program.hear()
        charged = vgpu.slot().charged_bytes
        assert program.on_card() == charged > 102 * MIB
        program.leave()
        assert program.on_card() == 0
        assert (vgpu.slot().away_bytes, vgpu.slot().charged_bytes) == (charged, charged)
        program.go_on()
        eventually(lambda: vgpu.slot().want, "it wants the GPU")
        program.come_back()
        assert program.hear() == [[True] * 5]
        assert (program.on_card(), vgpu.slot().away_bytes) == (charged, 0)
        vgpu.withdraw()
        program.go_on()


def test_what_waits_for_room_has_it_once_there_is_some(stage: Stage, vgpu: StagedVgpu) -> None:
    """What it may own, but the card has no room for: it asks, and goes on when the server has made others leave."""
    vgpu.grants.card_limit_bytes = 10 * MIB
    program = Program(
        stage,
        vgpu,
        """
say(app.allocate(8 << 20) is not None, app.memory_info())
say(app.allocate(6 << 20) is not None)
say(app.allocate(9 * GIB))
""",
    )
    assert program.hear() == [True, [8 * GIB - 8 * MIB, 8 * GIB]]
    program.go_on()
    eventually(lambda: vgpu.slot().room_bytes == 6 * MIB, "it asks for room")
    assert vgpu.slot().want
    program.leave()  # it may be the one that has to
    assert program.on_card() == 0
    vgpu.grants.card_limit_bytes = 14 * MIB
    program.come_back()
    assert program.hear() == [True]
    assert (vgpu.slot().room_bytes, vgpu.slot().refusals, program.on_card()) == (0, 0, 14 * MIB)
    program.go_on()
    assert program.hear() == [None]


@pytest.mark.parametrize(
    "touch",
    [
        'app.call("cuMemcpyHtoD_v2", c_uint64(block), b"\\x09" * 512, c_size_t(512))',
        "app.read(block, 1)",
        'app.call("cuMemcpyHtoDAsync_v2", c_uint64(block), b"\\x09" * 512, c_size_t(512), app.stream)',
        'app.call("cuMemsetD8_v2", c_uint64(block), 9, c_size_t(512))',
        "app.allocate(5 << 20)",
        "app.free(other)",
        "attribute(7, block)",
    ],
)
def test_whoever_touches_it_waits_until_it_is_back_and_says_that_it_wants(
    stage: Stage, vgpu: StagedVgpu, touch: str
) -> None:
    program = Program(
        stage,
        vgpu,
        f"""
block, other = filled(4 << 20, 9), filled(4 << 20, 8)
say()
{touch}
say(bytes_of(block, 4 << 20))
""",
    )
    program.hear()
    eventually(lambda: not vgpu.slot().want, "it is idle")
    program.leave()
    program.go_on()
    eventually(lambda: vgpu.slot().want, "it wants the GPU")
    assert vgpu.slot().where == Where.AWAY
    program.come_back()
    assert program.hear() == [[9]]


def test_memory_is_not_moved_under_a_copy_that_is_queued(stage: Stage, vgpu: StagedVgpu) -> None:
    """The stream's copies wait for the host, which is this test: the move is given up, tried again, and then done."""
    program = Program(
        stage,
        vgpu,
        """
block = filled(4 << 20, 9)
flag = ctypes.c_uint32()
app.call("cuMemHostRegister_v2", byref(flag), c_size_t(4), 0)
stream = app.new_stream(1)
app.call("cuStreamWaitValue32_v2", stream, c_uint64(ctypes.addressof(flag)), c_uint(1), c_uint(0))
data = (ctypes.c_char * 512)(*b"\\x07" * 512)
app.call("cuMemcpyHtoDAsync_v2", c_uint64(block), data, c_size_t(512), stream)
say()
flag.value = 1
app.call("cuStreamSynchronize", stream)
say(bytes_of(block, 512))
""",
    )
    program.hear()
    vgpu.withdraw()
    vgpu.grants.flags = vgpu.grants.flags | AWAY
    program.until(Where.STUCK)
    assert program.on_card() == 4 * MIB
    vgpu.grants.flags = vgpu.grants.flags & ~AWAY | GrantsFlag.PRESENT
    program.until(Where.RESIDENT)  # it never left, and says so
    vgpu.grants.flags = vgpu.grants.flags & ~GrantsFlag.PRESENT | AWAY
    program.go_on()
    program.until(Where.AWAY)
    program.come_back()
    assert program.hear() == [[7]]


def test_what_is_freed_under_a_capture_goes_once_it_has_ended(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
block, other = filled(4 << 20, 9), app.allocate(6 << 20)
app.call("cuStreamBeginCapture_v2", app.stream, 2)
app.call("cuMemFree_v2", c_uint64(block))
graph = c_void_p()
app.call("cuStreamEndCapture", app.stream, byref(graph))
say()
app.free(other)
say()
""",
    )
    program.hear()
    assert program.on_card() == 10 * MIB
    program.go_on()
    program.hear()
    assert (program.on_card(), vgpu.slot().charged_bytes) == (0, 0)


def test_a_batch_of_copies_lets_it_leave_afterwards(stage: Stage, vgpu: StagedVgpu) -> None:
    """Two that cross to the host: they touch the memory once, and let go of it."""
    program = Program(
        stage,
        vgpu,
        """
block = filled(4 << 20, 9)
data = (ctypes.c_char * 1024)(*b"\x07" * 1024)
here = ctypes.addressof(data)
sources, targets = (c_uint64 * 2)(here, here + 512), (c_uint64 * 2)(block, block + 512)
sizes, which = (c_size_t * 2)(512, 512), c_size_t()
order = (ctypes.c_char * 24)(1)
app.call("cuMemcpyBatchAsync_v2", targets, sources, sizes, c_size_t(2), order, byref(which), c_size_t(1), app.stream)
app.synchronize()
say()
say(bytes_of(block, 1024))
""",
    )
    program.hear()
    program.leave()
    program.go_on()
    program.come_back()
    assert program.hear() == [[7]]


def test_a_context_is_not_destroyed_while_its_memory_is_away(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
first, context = c_void_p(), c_void_p()
app.call("cuCtxGetCurrent", byref(first))
app.call("cuCtxCreate_v2", byref(context), 0, app.device)
block = app.allocate(4 << 20)
app.call("cuCtxSetCurrent", first)
other = filled(4 << 20, 9)
say()
app.call("cuCtxDestroy_v2", context)
say(app.allocate(1) is not None)
""",
    )
    program.hear()
    eventually(lambda: not vgpu.slot().want, "it is idle")
    program.leave()
    program.go_on()
    eventually(lambda: vgpu.slot().want, "it wants the GPU")
    assert vgpu.slot().charged_bytes == 8 * MIB
    program.come_back()
    assert program.hear() == [True]
    assert vgpu.slot().charged_bytes == 6 * MIB


def test_a_context_takes_its_memory_along(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
context = c_void_p()
app.call("cuCtxCreate_v2", byref(context), 0, app.device)
blocks = [app.allocate(size) for size in (10, 4 << 20)]
say()
app.call("cuCtxDestroy_v2", context)
say(app.allocate(1) is not None)
""",
    )
    program.hear()
    assert vgpu.slot().charged_bytes == 6 * MIB
    program.go_on()
    assert program.hear() == [True]
    assert vgpu.slot().charged_bytes == 2 * MIB


def test_it_cannot_be_shared_with_another_process_and_says_why(stage: Stage, vgpu: StagedVgpu) -> None:
    done = stage.run(
        "from tests.hook.app import App\nfrom ctypes import c_uint64, create_string_buffer\napp = App()\n"
        'print(app.result("cuIpcGetMemHandle", create_string_buffer(64), c_uint64(app.allocate(1 << 20))))',
        stage.environment(vgpu),
    )
    assert done.stdout.strip() == "801"
    assert "without --oversubscribe" in done.stderr


THREADED = """
def churn(gpu):
    for i in range(300):
        pointer = c_uint64()
        failed.append(gpu.cuMemAlloc_v2(byref(pointer), c_size_t((i % 5 + 1) * 300_000)) != 0)
        failed.append(gpu.cuMemFree_v2(pointer) != 0)
failed = []
block = filled(3 << 20, 5)
say()
in_eight_threads(churn)
say(sum(failed), bytes_of(block, 3 << 20))
"""


def test_threads_that_allocate_all_the_while_see_a_pause(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu, THREADS + THREADED)
    program.hear()
    program.go_on()
    for _ in range(5):
        program.leave()
        assert program.on_card() == 0
        program.come_back()
    assert program.hear() == [0, [5]]
    assert vgpu.slot().charged_bytes == 4 * MIB


def test_a_program_may_end_while_its_memory_is_away(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(stage, vgpu, "block = filled(3 << 20, 5)\nsay()\n")
    program.hear()
    program.leave()
    program.go_on()
    assert program.process.wait() == 0


def test_a_move_back_that_the_driver_fails_is_not_reported_as_a_card_without_room(
    stage: Stage, vgpu: StagedVgpu
) -> None:
    program = Program(stage, vgpu, "block = filled(70 << 20, 7)\nsay()")
    program.hear()
    program.leave()
    (index,) = program.engine.contexts()
    program.engine.fail_context(index, LAUNCH_FAILED)
    vgpu.grants.flags = vgpu.grants.flags & ~AWAY | GrantsFlag.PRESENT
    program.until(Where.FAILED_BACK)
    assert vgpu.slot().move_result == LAUNCH_FAILED
    assert vgpu.slot().away_bytes == 70 * MIB
    program.leave()
    assert program.on_card() == 0
