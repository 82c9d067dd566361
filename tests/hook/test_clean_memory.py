"""--oversubscribe swap: a piece whose copy in the store is still the same is not copied again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cython_ext.pages.storepage import STORE_BLOCK_BYTES, STORE_SEGMENT_BLOCKS, StorePage
from cython_ext.readings import GrantsFlag, Where
from cython_ext.testing.bindings_memory import parts_to_copy
from tests.hook.stage import Stage, StagedVgpu, eventually
from tests.hook.test_swap import AWAY, MIB, Program, swappable

OWNED = 80 * MIB
PIECES = OWNED // STORE_BLOCK_BYTES
BODY = f"""
import random
owned = {OWNED}
memory = app.allocate(owned)
data = bytearray(CONTENT)
def write(at, piece):
    app.call("cuMemcpyHtoD_v2", c_uint64(memory + at), piece, c_size_t(len(piece)))
write(0, bytes(data))
while True:
    print(json.dumps([app.read(memory, owned) == data]), flush=True)
    for at, byte in json.loads(input()):
        data[at] = byte
        write(at, bytes([byte]))
"""


class Owner(Program):
    """A program with random bytes in all its memory, or ``content``. It changes bytes where the test names them.
    Memory that it gets from the driver is no zeros."""

    def __init__(
        self, stage: Stage, vgpu: StagedVgpu, content: str = "random.randbytes(owned)", **environment: str
    ) -> None:
        super().__init__(stage, vgpu, BODY.replace("CONTENT", content), VGPU_SIM_FRESH="x", **environment)

    def swap(self) -> int:
        """Out and in; how many pieces were not copied."""
        self.leave()
        clean = self.vgpu.slot().clean_blocks
        self.come_back()
        return clean

    def change(self, *changes: tuple[int, int]) -> object:
        """(place, byte); whether all its memory is what it was before."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{[list(change) for change in changes]}\n")
        self.process.stdin.flush()
        return self.hear()


@pytest.fixture
def vgpu(stage: Stage) -> StagedVgpu:
    return swappable(stage)


def store_of(vgpu: StagedVgpu) -> StorePage:
    assert vgpu.store is not None
    return vgpu.store


def test_what_was_not_written_is_not_copied_again(stage: Stage, vgpu: StagedVgpu) -> None:
    owner = Owner(stage, vgpu)
    assert owner.hear() == [True]
    assert owner.swap() == 0
    assert (store_of(vgpu).used, sum(store_of(vgpu).kept().values())) == (0, PIECES)
    assert owner.swap() == PIECES
    assert owner.change() == [True]
    assert owner.swap() == PIECES
    assert owner.change() == [True]


def test_a_byte_that_is_written_between_two_swaps_is_not_lost(stage: Stage, vgpu: StagedVgpu) -> None:
    """Also where it is what another byte was, and where all other bytes of a piece stay the same."""
    owner = Owner(stage, vgpu)
    assert owner.hear() == [True]
    owner.swap()
    last = OWNED - 1
    for changes, dirty in (
        (((0, 1),), 1),
        (((0, 2), (last, 3)), 2),
        (((0, 1),), 1),  # as it was two swaps ago
        (((5 * STORE_BLOCK_BYTES - 1, 9), (5 * STORE_BLOCK_BYTES, 9)), 2),
        ((), 0),
    ):
        assert owner.change(*changes) == [True]
        assert owner.swap() == PIECES - dirty
        assert owner.change() == [True]


ROWS_OF_NOISE = "b''.join(random.randbytes(50_000) + bytes(150_000) for _ in range(owned // 200_000 + 1))[:owned]"
"""So each piece has parts of zeros, and others."""


@pytest.mark.parametrize("content", ["random.randbytes(owned)", ROWS_OF_NOISE], ids=["noise", "rows"])
def test_another_process_takes_what_is_kept_and_both_have_their_own_memory(
    stage: Stage, vgpu: StagedVgpu, content: str
) -> None:
    """The store has room for one of the two, and some blocks. The second leaves while the first is on the card."""
    second_vgpu = stage.vgpu(memory_bytes=1 << 30)
    second_vgpu.grants.flags = vgpu.grants.flags
    second_vgpu.store = store_of(vgpu)
    vgpus = [vgpu, second_vgpu]
    owners = [Owner(stage, each, content) for each in vgpus]
    assert [owner.hear() for owner in owners] == [[True], [True]]
    assert STORE_SEGMENT_BLOCKS < 2 * PIECES
    for turn in range(4):
        mine, other = owners[turn % 2], owners[1 - turn % 2]
        mine.swap()
        kept = store_of(vgpu).kept()
        assert kept[mine.vgpu.slot().pid, mine.vgpu.slot().start_time & (2**40 - 1)] == PIECES
        assert sum(kept.values()) <= STORE_SEGMENT_BLOCKS
        assert mine.change((turn, turn)) == [True]
        assert other.change() == [True]
        assert mine.change() == [True]


def test_blocks_of_the_processes_that_the_server_names_are_taken_first(stage: Stage) -> None:
    vgpu = swappable(stage, blocks=2 * STORE_SEGMENT_BLOCKS)
    vgpus = [vgpu, *(stage.vgpu(memory_bytes=1 << 30) for _ in range(3))]
    for each in vgpus[1:]:
        each.grants.flags, each.store = vgpu.grants.flags, store_of(vgpu)
    owners = [Owner(stage, each) for each in vgpus]
    names = []
    for owner in owners:
        assert owner.hear() == [True]
        slot = owner.vgpu.slot()
        names.append((slot.pid, slot.start_time & (2**40 - 1)))
    for owner in owners[:3]:
        owner.swap()
    kept = store_of(vgpu).kept()
    assert [kept[name] for name in names[:3]] == [PIECES] * 3
    store_of(vgpu).take_first([names[1]])
    owners[3].swap()
    kept = store_of(vgpu).kept()
    free = 2 * STORE_SEGMENT_BLOCKS - 3 * PIECES
    assert kept == {names[0]: PIECES, names[1]: PIECES - (PIECES - free), names[2]: PIECES, names[3]: PIECES}
    assert [owner.change() for owner in owners] == [[True]] * 4


def test_freed_memory_leaves_no_copy_behind(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        f"""
memory = filled({OWNED}, 1)
say()
app.free(memory)
memory = filled({OWNED}, 2)
say()
say(bytes_of(memory, {OWNED}))
""",
    )
    program.hear()
    program.leave()
    program.come_back()
    assert sum(store_of(vgpu).kept().values()) == PIECES
    program.go_on()
    program.hear()
    assert store_of(vgpu).kept() == {}
    program.leave()
    assert vgpu.slot().clean_blocks == 0
    program.come_back()
    program.go_on()
    assert program.hear() == [[2]]


def test_the_copies_of_a_process_that_was_killed_are_given_back(stage: Stage, vgpu: StagedVgpu) -> None:
    owner = Owner(stage, vgpu)
    owner.hear()
    owner.swap()
    slot = vgpu.slot()
    owner.process.kill()
    owner.process.wait()
    assert store_of(vgpu).give_back([(slot.pid, slot.start_time)]) == PIECES
    assert store_of(vgpu).kept() == {}


def test_memory_that_the_program_maps_itself_is_clean_too(stage: Stage, vgpu: StagedVgpu) -> None:
    program = Program(
        stage,
        vgpu,
        """
from tests.hook.test_program_memory import WORK as MORE
exec(MORE)
size = 20 << 20
address = reserve(2 * size)
for part in (0, 1):
    mapped(made(size), address + part * size, size, 3 if part else 1)
fill(address + size, size, 5)
while True:
    say(bytes_of(address + size, size))
""",
    )
    assert program.hear() == [[5]]
    for clean in (10, 20):  # the part that no kernel has written is zeros
        program.leave()
        assert vgpu.slot().clean_blocks == clean
        program.come_back()
        program.go_on()
        assert program.hear() == [[5]]


def test_pieces_of_zeros_need_no_block_and_come_back_as_zeros(stage: Stage, vgpu: StagedVgpu) -> None:
    owner, odd = Owner(stage, vgpu, "bytes(owned)"), 11 * MIB
    assert owner.hear() == [True]
    changes = [
        [],
        [(odd, 9)],
        [],
        [(odd, 0), (OWNED - 1, 1)],
        [(OWNED - 1, 0)],
        [(at, 1) for at in range(0, OWNED, MIB)],
    ]
    written: dict[int, int] = {}
    for change in changes:
        assert owner.change(*change) == [True]
        written |= dict(change)
        pieces = {at // STORE_BLOCK_BYTES for at, byte in written.items() if byte}
        owner.leave()
        assert store_of(vgpu).used == len(pieces)
        assert vgpu.slot().away_bytes == OWNED
        assert vgpu.slot().clean_blocks >= PIECES - len(pieces)
        owner.come_back()
        assert owner.on_card() == OWNED
    assert owner.change() == [True]


ROW_BYTES, USED_BYTES, PART_BYTES, PARTS = 1_638_400, 20_480, 32 << 10, 64
ROWS = OWNED // ROW_BYTES


def bytes_with(*used: tuple[int, int]) -> int:
    """How much is copied of memory that is zeros but for these ranges of bytes."""
    pieces = Counter[int]()
    for part in {part for begin, end in used for part in range(begin // PART_BYTES, (end - 1) // PART_BYTES + 1)}:
        pieces[part // PARTS] += 1 << part % PARTS
    return PART_BYTES * sum(parts_to_copy(parts).bit_count() for parts in pieces.values())


def test_of_a_cache_only_the_used_parts_are_copied(stage: Stage, vgpu: StagedVgpu, tmp_path: Path) -> None:
    """Its rows are made for long answers, and used at their beginnings. The store's blocks had other memory before."""
    log = tmp_path / "hook.log"
    other = stage.vgpu(memory_bytes=1 << 30)
    other.grants.flags, other.store = vgpu.grants.flags, store_of(vgpu)
    before = Owner(stage, other)
    before.hear()
    before.swap()
    before.process.kill()
    before.process.wait()
    assert store_of(vgpu).give_back([(other.slot().pid, other.slot().start_time)]) == PIECES
    content = (
        f"(random.randbytes({USED_BYTES}) + bytes({ROW_BYTES - USED_BYTES})) * {ROWS} + bytes(owned % {ROW_BYTES})"
    )
    cache = Owner(stage, vgpu, content, VGPU_HOOK_LOG=str(log))
    assert cache.hear() == [True]
    used = [(row * ROW_BYTES, row * ROW_BYTES + USED_BYTES) for row in range(ROWS)]
    cache.swap()
    assert cache.change() == [True]
    # another token in each row, in a part that was zeros before; and one that is taken back
    tokens = [row * ROW_BYTES + PART_BYTES + USED_BYTES for row in range(ROWS)]
    assert cache.change(*((at, 7) for at in tokens)) == [True]
    cache.swap()
    assert cache.change((tokens[3], 0)) == [True]
    cache.swap()
    assert cache.change() == [True]
    copied = [int(line.split()[-2]) for line in log.read_text().splitlines() if "copied bytes" in line]
    longer = [*used, *((at, at + 1) for at in tokens)]
    kept = [*used, *((at, at + 1) for at in tokens if at != tokens[3])]
    piece = tokens[3] // STORE_BLOCK_BYTES * STORE_BLOCK_BYTES
    assert OWNED / 20 > bytes_with(*longer) > bytes_with(*kept) > bytes_with(*used)
    assert copied[:4] == [bytes_with(*used)] * 2 + [bytes_with(*longer)] * 2
    assert copied[4] == bytes_with(*((begin, end) for begin, end in kept if piece <= begin < piece + STORE_BLOCK_BYTES))
    assert copied[5] == bytes_with(*kept)
    assert vgpu.slot().clean_blocks == (OWNED - copied[4]) // STORE_BLOCK_BYTES


@pytest.fixture
def cache(stage: Stage, vgpu: StagedVgpu) -> Owner:
    owner = Owner(stage, vgpu, "bytes(owned)")
    assert owner.hear() == [True]
    return owner


places = st.builds(
    lambda part, at: part * PART_BYTES + at,
    st.integers(0, OWNED // PART_BYTES - 1) | st.integers(0, 2 * PARTS),
    st.sampled_from([0, 7, PART_BYTES // 2, PART_BYTES - 1]),
)


writes = st.tuples(st.dictionaries(places, st.sampled_from([0, 1, 255]), max_size=40), st.integers(0, 9))
"""Bytes by their places, and how many places that were written before are zeros again."""


@given(st.lists(writes, min_size=1, max_size=3))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_parts_are_written_come_back(cache: Owner, writes: list[tuple[dict[int, int], int]]) -> None:
    """At the end, and at the beginning of the next example, all are zeros."""
    written = dict[int, int]()
    for changes, again in writes:
        step = changes | dict.fromkeys(list(written)[:again], 0)
        written |= step
        assert cache.change(*step.items()) == [True]
        cache.swap()
        assert cache.change() == [True]
    assert cache.change(*((at, 0) for at in written)) == [True]
    assert cache.swap() == PIECES
    assert cache.change() == [True]


@pytest.mark.parametrize("fault", ["zeros", "same"])
def test_a_kernel_that_is_wrong_about_a_sample_is_not_used(stage: Stage, vgpu: StagedVgpu, fault: str) -> None:
    """It takes all pieces for zeros, or for the same."""
    owner = Owner(stage, vgpu, VGPU_SIM_HASHES=fault)
    assert owner.hear() == [True]
    for _ in range(2):
        assert owner.swap() == 0
        assert owner.change((5, 5)) == [True]
        assert owner.change() == [True]


@pytest.mark.parametrize("launches", [0, 1, 2])
def test_without_a_hash_the_whole_piece_is_copied(stage: Stage, vgpu: StagedVgpu, launches: int) -> None:
    """Also where a part of it was copied before."""
    owner = Owner(stage, vgpu, "bytes(owned)", VGPU_SIM_HASHES=str(launches))
    assert owner.hear() == [True]
    for turn in range(4):
        assert owner.change((turn * PART_BYTES * 5, 1), (OWNED - 1, turn)) == [True]
        clean = owner.swap()
        assert (clean == 0) == (turn >= launches)
        assert owner.change() == [True]


@pytest.mark.parametrize("content", ["bytes(owned)", "bytes(owned - 1) + b'x'"])
def test_high_bits_of_a_few_floats_are_noticed(stage: Stage, vgpu: StagedVgpu, content: str) -> None:
    """Three floats become 2.0. With one step of the hash after a vector, the hash stayed the same."""
    owner = Owner(stage, vgpu, content)
    assert owner.hear() == [True]
    owner.swap()
    assert owner.change((80 + 15, 0x40), (4096 + 80 + 3, 0x40), (4096 + 80 + 7, 0x40)) == [True]
    owner.swap()
    assert owner.change() == [True]


def test_a_store_without_room_is_enough_for_zeros(stage: Stage) -> None:
    vgpu = stage.vgpu(memory_bytes=1 << 30)
    vgpu.grants.flags = swappable(stage).grants.flags
    vgpu.store = StorePage.create(STORE_SEGMENT_BLOCKS)
    owner = Owner(stage, vgpu, "bytes(owned)")
    assert owner.hear() == [True]
    owner.swap()
    assert owner.change() == [True]


def leaves_at_the_second_try(program: Program, away_bytes: int, expected: object) -> None:
    """The store has no room for more than ``away_bytes`` and a little. It grows once the memory is back."""
    vgpu = program.vgpu
    vgpu.withdraw()
    vgpu.grants.flags = vgpu.grants.flags | AWAY
    eventually(lambda: vgpu.slot().away_bytes > away_bytes, "most of it has left")
    program.come_back()
    program.go_on()
    assert program.hear() == expected
    store_of(vgpu).grow(STORE_SEGMENT_BLOCKS)
    program.leave()


def test_a_move_that_is_given_up_keeps_what_is_whole(stage: Stage) -> None:
    """The store has no room for a part of it. Once it has grown, the copies of before are the same."""
    vgpu = stage.vgpu(memory_bytes=1 << 30)
    vgpu.grants.flags = swappable(stage).grants.flags
    vgpu.store = StorePage.create(3 * STORE_SEGMENT_BLOCKS)
    vgpu.store.grow(2 * STORE_SEGMENT_BLOCKS)
    program = Program(
        stage,
        vgpu,
        """
blocks = [filled(70 << 20, byte) for byte in range(1, 6)]
while True:
    say([bytes_of(block, 70 << 20) for block in blocks])
""",
    )
    expected = [[[byte] for byte in range(1, 6)]]
    assert program.hear() == expected
    leaves_at_the_second_try(program, 200 * MIB, expected)
    assert 100 < vgpu.slot().clean_blocks < 175
    assert vgpu.slot().where == Where.AWAY
    program.come_back()
    program.go_on()
    assert program.hear() == expected


def test_a_move_with_zeros_may_be_given_up_in_a_store_without_room(stage: Stage) -> None:
    """Half of each allocation is zeros. The store has no room for all of the others at first."""
    vgpu = stage.vgpu(memory_bytes=1 << 30)
    vgpu.grants.flags = swappable(stage).grants.flags
    vgpu.store = StorePage.create(2 * STORE_SEGMENT_BLOCKS)
    vgpu.store.grow(STORE_SEGMENT_BLOCKS)
    program = Program(
        stage,
        vgpu,
        """
blocks = [filled(70 << 20, byte) for byte in range(1, 6)]
for block in blocks:
    app.call("cuMemsetD8_v2", c_uint64(block + (5 << 20)), 0, c_size_t(35 << 20))
app.synchronize()
while True:
    say([bytes_of(block, 70 << 20) for block in blocks])
""",
        VGPU_SIM_FRESH="x",
    )
    expected = [[[0, byte] for byte in range(1, 6)]]
    assert program.hear() == expected
    leaves_at_the_second_try(program, 150 * MIB, expected)
    assert vgpu.store.used <= 2 * STORE_SEGMENT_BLOCKS
    program.come_back()
    program.go_on()
    assert program.hear() == expected


@pytest.mark.parametrize(
    "content",
    [
        "b''.join(bytes(4 << 20) if part % 2 else random.randbytes(4 << 20) for part in range(owned >> 22))",
        ROWS_OF_NOISE,
    ],
    ids=["pieces", "rows"],
)
def test_memory_with_zeros_that_is_half_back_leaves_again(stage: Stage, vgpu: StagedVgpu, content: str) -> None:
    owner = Owner(stage, vgpu, content)
    assert owner.hear() == [True]
    for present in (34, 66, 34):
        owner.leave()
        vgpu.grants.present_bytes = present * MIB
        vgpu.grants.flags = vgpu.grants.flags & ~AWAY | GrantsFlag.PRESENT
        eventually(lambda: owner.on_card() > 0, "some of it has come")
        owner.leave()
        assert owner.on_card() == 0
        vgpu.grants.present_bytes = 0
        owner.come_back()
        assert owner.change() == [True]


def test_an_address_that_left_as_zeros_is_given_again(stage: Stage) -> None:
    """Also more chunks at once than have copies in one go."""
    vgpu = swappable(stage, blocks=3 * STORE_SEGMENT_BLOCKS)
    program = Program(
        stage,
        vgpu,
        """
blocks = [filled(2 << 20, byte if byte % 9 == 0 else 0) for byte in range(1, 151)]
while True:
    say([bytes_of(block, 2 << 20)[0] for block in blocks])
    for number in range(0, 150, 2):
        app.call("cuMemFree_v2", c_uint64(blocks[number]))
    for number in range(0, 150, 2):
        blocks[number] = filled(2 << 20, 200 - number)
""",
        VGPU_SIM_FRESH="x",
    )
    expected = [byte if byte % 9 == 0 else 0 for byte in range(1, 151)]
    for _ in range(3):
        assert program.hear() == [expected]
        program.leave()
        assert vgpu.slot().away_bytes == 300 * MIB
        program.come_back()
        program.go_on()
        expected = [200 - number if number % 2 == 0 else byte for number, byte in enumerate(expected)]


def test_another_vgpu_may_begin_and_cease_to_come_at_any_moment_of_a_move(stage: Stage, vgpu: StagedVgpu) -> None:
    """GRANTS_PASSED changes while chunks are on their way."""
    program = Program(
        stage,
        vgpu,
        """
blocks = [filled(2 << 20, byte) for byte in range(1, 56)]
while True:
    say([bytes_of(block, 2 << 20) for block in blocks] == [[byte] for byte in range(1, 56)])
    for number, block in enumerate(blocks):
        if number % 3 == 0:
            app.call("cuMemsetD8_v2", c_uint64(block), number + 1, c_size_t(2 << 20))
    app.synchronize()
""",
    )
    for turn in range(6):
        assert program.hear() == [True]
        vgpu.withdraw()
        vgpu.grants.flags = vgpu.grants.flags & ~GrantsFlag.PRESENT | AWAY | passed(turn)
        flips = 0
        while vgpu.slot().where != Where.AWAY:
            vgpu.grants.flags = vgpu.grants.flags ^ GrantsFlag.PASSED
            flips += 1
            assert flips < 2_000_000, "it leaves"
        vgpu.grants.flags = vgpu.grants.flags & ~GrantsFlag.PASSED
        program.come_back()
        program.go_on()


def passed(turn: int) -> GrantsFlag:
    return GrantsFlag.PASSED if turn % 2 else GrantsFlag(0)
