"""What linear memory is charged: the pieces of 2 MiB that it takes from the card, whoever shares them."""

from __future__ import annotations

import json
import random

import pytest

from cython_ext.simengine import Engine
from tests.hook.stage import Stage, StagedVgpu
from tests.hook.talk import THREADS, Talk

KIB, MIB = 1 << 10, 1 << 20

BODY = """
def kib(size):
    return app.allocate(size << 10)
def pitched(width, height):
    address, pitch = c_uint64(), c_size_t()
    code = app.result(
        "cuMemAllocPitch_v2", byref(address), byref(pitch), c_size_t(width), c_size_t(height), c_uint(4)
    )
    return code, address.value
"""


class Program(Talk):
    """``card``: what all of the GPU's memory that is not a context's own comes to."""

    def __init__(self, stage: Stage, vgpu: StagedVgpu, body: str) -> None:
        super().__init__(stage, vgpu, BODY + body)
        self.engine = Engine(stage.gpus)

    def words(self) -> tuple[object, int, int, int]:
        """What it said; bytes charged, and taken from the card; refusals."""
        said = json.loads(self.stage.heard(self.process))
        slot = self.vgpu.slot()
        taken = self.engine.memory_used_bytes - self.engine.context_bytes
        self.stage.tell(self.process)
        assert slot.reserved_bytes == 0
        return said, slot.charged_bytes, taken, slot.refusals


def test_small_ones_share_a_piece_and_large_ones_have_their_own(stage: Stage) -> None:
    program = Program(
        stage,
        stage.vgpu(),
        """
small = [app.allocate(512) for _ in range(4096)]
say()
small.append(app.allocate(1))
say()
for address in small[:-1]:
    app.free(address)
say()
app.free(small[-1])
say()
for _ in range(8):
    kib(1025)
say()
""",
    )
    assert [program.words()[1] for _ in range(5)] == [2 * MIB, 4 * MIB, 2 * MIB, 0, 16 * MIB]


def test_at_the_limit_what_fits_into_a_piece_that_is_paid_for_is_granted(stage: Stage) -> None:
    program = Program(
        stage,
        stage.vgpu(memory_bytes=8 * MIB),
        """
kib(6 << 10)
say([kib(size) is not None for size in (700, 700, 700, 600, 100)])
""",
    )
    said, charged, taken, refusals = program.words()
    assert said == [[True, True, False, True, False]]
    assert (charged, taken, refusals) == (8 * MIB, 8 * MIB, 2)


def test_where_the_room_is_scattered_one_piece_more_is_taken_and_nothing_after_it(stage: Stage) -> None:
    """It is charged, beyond the limit; a real card's driver would have refused. To free it would wait for the queue."""
    program = Program(
        stage,
        stage.vgpu(memory_bytes=8 * MIB),
        """
kib(6 << 10)
quarters = [kib(512) for _ in range(4)]
app.free(quarters[0])
app.free(quarters[2])
more = kib(700)
say(more is not None, kib(1))
app.free(more)
say(kib(512) is not None, kib(512) is not None, kib(1))
""",
    )
    said, charged, taken, refusals = program.words()
    assert (said, charged, taken, refusals) == ([True, None], 10 * MIB, 10 * MIB, 1)
    said, charged, taken, _ = program.words()
    assert (said, charged, taken) == ([True, True, None], 8 * MIB, 8 * MIB)


def test_at_the_limit_nothing_waits_for_what_is_queued(stage: Stage) -> None:
    program = Program(
        stage,
        stage.vgpu(memory_bytes=8 * MIB),
        """
kib(6 << 10)
kept = [kib(1024), kib(1000)]
app.kernel(60_000).launch()
say([kib(size) is not None for size in (20, 700, 1)])
""",
    )
    assert program.words()[0] == [[True, False, True]]


SHARE = """
def share(gpu):
    for i in range(500):
        pointer = c_uint64()
        failed.append(gpu.cuMemAlloc_v2(byref(pointer), c_size_t(4096)) != 0)
        failed.append(gpu.cuMemFree_v2(pointer) != 0)
failed = []
first = kib(4)
kib(6 << 10)
in_eight_threads(share)
say(sum(failed))
app.free(first)
say()
"""


def test_threads_that_share_the_last_piece_are_not_refused(stage: Stage) -> None:
    program = Program(stage, stage.vgpu(memory_bytes=8 * MIB), THREADS + SHARE)
    said, charged, taken, refusals = program.words()
    assert (said, charged, taken, refusals) == ([0], 8 * MIB, 8 * MIB, 0)
    assert program.words()[1] == 6 * MIB


def test_rows_that_are_made_longer_do_not_go_beyond_the_limit(stage: Stage) -> None:
    """100 bytes a row become 512: what is asked for would fit, what it takes does not."""
    program = Program(
        stage,
        stage.vgpu(memory_bytes=4 * MIB),
        """
say(pitched(100, 8193)[0])
code, address = pitched(100, 8192)
say(code)
app.free(address)
say()
""",
    )
    assert program.words() == ([2], 0, 0, 1)
    assert program.words() == ([0], 4 * MIB, 4 * MIB, 1)
    assert program.words() == ([], 0, 0, 1)


def test_below_a_limit_that_shrank_nothing_is_granted(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=8 * MIB)
    program = Program(stage, vgpu, "kib(6 << 10)\nkib(100)\nsay()\nsay(kib(100) is not None, kib(2 << 10))")
    stage.heard(program.process)
    assert vgpu.slot().charged_bytes == 8 * MIB
    vgpu.grants.memory_limit_bytes = 4 * MIB  # while it waits to be told: words() would let it go before
    stage.tell(program.process)
    assert program.words()[:2] == ([False, None], 8 * MIB)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_charged_is_what_the_card_has_given(stage: Stage, seed: int) -> None:
    random.seed(seed)
    sizes = [
        random.choice([1, 300, 70 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB + 7, 33 * MIB]) for _ in range(300)
    ]
    program = Program(
        stage,
        stage.vgpu(),
        f"""
import random
random.seed({seed})
blocks = []
for round, size in enumerate({sizes}):
    blocks.append(app.allocate(size))
    if random.random() < 0.5:
        app.free(blocks.pop(random.randrange(len(blocks))))
    if round % 30 == 29:
        say()
for block in blocks:
    app.free(block)
say()
""",
    )
    seen = [program.words() for _ in range(11)]
    assert all(charged == taken for _, charged, taken, _ in seen)
    assert seen[5][1] > 0
    assert seen[-1][1] == 0
