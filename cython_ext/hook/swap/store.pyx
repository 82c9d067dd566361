"""The hook's end of the store: blocks of host memory that it takes and gives back (logic/memory/store.pxd), and pins.

The GPU reaches host memory at full speed only once it is pinned, which takes longer than a copy (0.3 s a GiB, H200).
So that is done part by part, ahead of the first move (pin_ahead.pyx), or when a block is first used, and stays. What is
pinned ahead is reserved: other processes take other blocks as long as there are some.

A piece that comes back to the card keeps its copy, with the hash of it, until another process needs the block. Leaving
again, it is copied only if its hash is another one (piece_hash.pyx). Parts of zeros, such as those of a cache that is
not used yet, are copied neither way: the card fills them again. A piece of zeros needs no block.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, madvise, mmap, munmap

from cython_ext.hook.generated.driver cimport real_cuMemHostRegister_v2, real_cuMemHostUnregister
from cython_ext.hook.hook cimport vgpu_log
from cython_ext.hook.state cimport (
    CHUNK_AWAY, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_SUCCESS, PLACE_BLANK, PLACE_COPIED, PLACE_ZEROS, Gate,
    Store, StoredPiece, state,
)
from cython_ext.pages.layout cimport LAYOUT_VERSION, STORE_MAGIC, StorePage
from cython_ext.logic.memory.alloctable cimport Block, alloc_find, alloc_insert, alloc_remove
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.piece_hash cimport PieceHash, parts_to_copy
from cython_ext.logic.memory.store cimport (
    BLOCK_BYTES, is_used, name_in, store_drop, store_give, store_give_all, store_keep, store_name, store_owners,
    store_reclaim, store_reserve, store_size, store_take, store_take_kept, store_take_reserved, store_unreserve,
)
from cython_ext.logic.meter.durations cimport mix64
from cython_ext.native cimport load32, load64, now_ns

cdef extern from "hook/connect.h" nogil:
    long vgpu_file_size(int fd) noexcept
    uint64_t vgpu_file_number(int fd) noexcept

cdef extern from "<sys/mman.h>" nogil:
    const int MADV_DONTFORK

cdef enum:
    PIN_BLOCKS = 16          # are pinned together: 32 MiB, which takes 10 ms (H200)
    PORTABLE = 1             # CU_MEMHOSTREGISTER_PORTABLE

    PIN_NONE = 0             # not tried yet
    PIN_DONE = 1
    PIN_NOT = 2              # driver, or limits, do not allow it: copies are slower

    BLOCKS_FREE = 0
    BLOCKS_OWN = 1           # that this process uses, keeps or reserves
    BLOCKS_OTHERS = 2        # that others keep or reserve, and it may take

    # Gate.store_stage
    STAGE_RESERVED = 0       # blocks that this process reserves
    STAGE_PINNED = 1         # free blocks of parts that are pinned here
    STAGE_FREE = 2           # ... of other parts
    STAGE_RESERVED_BY_OTHERS = 3     # ... in parts that are pinned here
    STAGE_RESERVED_ELSEWHERE = 4     # ... in other parts
    STAGE_NAMED = 5          # what the three processes keep that the server has named
    STAGE_OTHERS = 8         # what any other process keeps
    STAGE_OWN = 9            # what this process keeps, for other pieces

    SETTLED_NS = 5_000_000_000       # a store that has not grown for so long is as large as it will be


cdef bint map_store(Store* store, int fd, uint64_t file) noexcept nogil:
    cdef uint64_t size = max(vgpu_file_size(fd), 0), offset = 0
    cdef StorePage* page
    cdef void* pins
    cdef void* hashes
    if size < sizeof(StorePage):
        return 0
    page = <StorePage*>mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if page == <void*>MAP_FAILED:
        return 0
    store.blocks = page.blocks
    pins = mmap(NULL, pins_size(store), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    hashes = mmap(NULL, hashes_size(store), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if (
        page.header.magic != STORE_MAGIC or page.header.min_version > LAYOUT_VERSION or pins == MAP_FAILED
        or hashes == MAP_FAILED or store.blocks == 0 or store_size(store.blocks, &offset) > size
    ):
        munmap(page, size)
        if pins != MAP_FAILED:
            munmap(pins, pins_size(store))
        if hashes != MAP_FAILED:
            munmap(hashes, hashes_size(store))
        return 0
    madvise(page, size, MADV_DONTFORK)
    store.size, store.file = size, file
    store.memory = <uint8_t*>page + offset
    store.pins, store.hashes = <uint8_t*>pins, <PieceHash*>hashes
    store.page = page
    return 1


cdef void unmap_store(Store* store) noexcept nogil:
    if store.page != NULL:
        munmap(store.page, store.size)
        munmap(store.pins, pins_size(store))
        munmap(store.hashes, hashes_size(store))
    store.page = NULL


cdef inline uint64_t pins_size(const Store* store) noexcept nogil:
    return store.blocks / PIN_BLOCKS + 1


cdef inline uint64_t hashes_size(const Store* store) noexcept nogil:
    return (store.blocks + 1) * sizeof(PieceHash)


cdef public bint vgpu_map_store(Gate* gate, int fd) noexcept nogil:
    """0: it is not a store that this hook knows. Where a server's predecessor and the broker died together, the new
    store differs from the old one. The old one keeps the memory that is swapped out until that has come back."""
    cdef uint64_t file = vgpu_file_number(fd)
    if gate.store.page == NULL:
        return map_store(&gate.store, fd, file)
    if file == gate.store.file:
        unmap_store(&gate.heir)      # of a server that has ended: its successor has the gate's store again
        return 1
    if gate.heir.page != NULL and file == gate.heir.file:
        return 1
    unmap_store(&gate.heir)
    return map_store(&gate.heir, fd, file)


cdef bint has_blocks(Gate* gate) noexcept nogil:
    """Whether any piece has a block in the store, or a copy there."""
    cdef bint found = 0
    cdef uint64_t i
    lock_acquire(&state().memory_lock)
    for i in range(gate.places.capacity):
        found |= gate.places.blocks[i].address != 0 and gate.places.blocks[i].kind != PLACE_ZEROS
    lock_release(&state().memory_lock)
    return found


cdef public void vgpu_renew_store(Gate* gate) noexcept nogil:
    """If there is a later store, and no memory is swapped out into this one, the gate changes to that. Zeros are in
    none. The caller has a context current."""
    cdef uint64_t i, mine
    if gate.heir.page == NULL or (gate.away_bytes and has_blocks(gate)):
        return
    if gate.away_bytes == 0:
        drop_kept(gate)
    mine = name(gate)
    store_give_all(gate.store.page, gate.store.blocks, &mine, 1)     # what is reserved
    for i in range(gate.store.blocks / PIN_BLOCKS):      # the driver refuses those that are not pinned
        real_cuMemHostUnregister(gate.store.memory + i * PIN_BLOCKS * BLOCK_BYTES)
    unmap_store(&gate.store)
    gate.store = gate.heir
    gate.heir.page = NULL
    gate.store_next = 0


cdef inline uint64_t name(const Gate* gate) noexcept nogil:
    return store_name(gate.slot.pid, gate.slot.start_time)


cdef inline uint64_t ready_blocks(const Gate* gate) noexcept nogil:
    return min(<uint64_t>load32(&gate.store.page.ready), gate.store.blocks)


cdef inline uint64_t parts_of(uint64_t ready) noexcept nogil:
    """What is pinned together: whole parts, as a store gets its memory by whole segments."""
    return ready / PIN_BLOCKS


cdef int64_t take_from(Gate* gate, uint32_t stage) noexcept nogil:
    """A block of the kind of this stage, of the part in which the last one was found, or of one behind it; -1: there is
    none."""
    cdef uint64_t parts = parts_of(ready_blocks(gate)), k, part, begin, end
    cdef bint pinned
    cdef int64_t block = -1
    for k in range(parts):
        part = (gate.store_next + k) % parts
        begin, end = part * PIN_BLOCKS, (part + 1) * PIN_BLOCKS
        pinned = gate.store.pins[part] != PIN_NONE
        if stage == STAGE_RESERVED:
            block = store_take_reserved(gate.store.page, name(gate), 1, begin, end)
        elif pinned != (stage == STAGE_PINNED or stage == STAGE_RESERVED_BY_OTHERS):
            continue
        elif stage < STAGE_RESERVED_BY_OTHERS:
            block = store_take(gate.store.page, name(gate), begin, end)
        else:
            block = store_take_reserved(gate.store.page, name(gate), 0, begin, end)
        if block >= 0:
            gate.store_next = part
            return block
    return -1


cdef void pin(Gate* gate, uint64_t part) noexcept nogil:
    """The caller has a context current. One thread at a time pins: the one that moves, or one that touches."""
    cdef int64_t began_ns = now_ns()
    cdef int result
    if gate.store.pins[part] != PIN_NONE:
        return
    result = real_cuMemHostRegister_v2(
        gate.store.memory + part * PIN_BLOCKS * BLOCK_BYTES, PIN_BLOCKS * BLOCK_BYTES, PORTABLE
    )
    if result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
        result = CUDA_SUCCESS            # by a context that has ended, and the driver has kept it
    gate.store.pins[part] = PIN_DONE if result == CUDA_SUCCESS else PIN_NOT
    gate.pinning_ns += now_ns() - began_ns
    vgpu_log(b"pinned part, result", part, result)


cdef public void vgpu_forget_pins(Gate* gate) noexcept nogil:
    """A context has ended, which may have taken its pins along. No thread pins meanwhile."""
    cdef uint64_t part
    if gate.store.page == NULL:
        return
    for part in range(pins_size(&gate.store)):
        gate.store.pins[part] = PIN_NONE


cdef bint is_of_kind(const Gate* gate, uint64_t owner, uint32_t kind) noexcept nogil:
    if kind == BLOCKS_FREE:
        return owner == 0
    if kind == BLOCKS_OWN:
        return name_in(owner) == name(gate)
    return owner != 0 and not is_used(owner) and name_in(owner) != name(gate)


cdef struct Blocks:          # of parts that this process has pinned
    uint64_t own             # BLOCKS_OWN
    uint64_t others          # BLOCKS_OTHERS


cdef void count_pinned(const Gate* gate, Blocks* found) noexcept nogil:
    cdef const uint64_t* owners = store_owners(gate.store.page)
    cdef uint64_t owner, part, i
    found.own = found.others = 0
    for part in range(parts_of(ready_blocks(gate))):
        if gate.store.pins[part] != PIN_DONE:
            continue
        for i in range(part * PIN_BLOCKS, (part + 1) * PIN_BLOCKS):
            owner = load64(&owners[i])
            found.own += is_of_kind(gate, owner, BLOCKS_OWN)
            found.others += is_of_kind(gate, owner, BLOCKS_OTHERS)


cdef public uint64_t vgpu_pinned_blocks(Gate* gate) noexcept nogil:
    """How many blocks this process has pinned for itself. The caller touches, as for the next."""
    cdef Blocks found
    if gate.store.page == NULL:
        return 0
    count_pinned(gate, &found)
    return found.own


cdef bint is_pinned_now(Gate* gate, uint64_t part) noexcept nogil:
    """Pin the part, unless it is. 0: the driver does not pin it now, and it is tried again."""
    if gate.store.pins[part] == PIN_NONE:
        pin(gate, part)
        if gate.store.pins[part] != PIN_DONE:
            gate.store.pins[part] = PIN_NONE
    return gate.store.pins[part] == PIN_DONE


cdef uint64_t reserve_in(Gate* gate, uint64_t part, uint64_t most) noexcept nogil:
    """How many free blocks of the part this process has now reserved."""
    cdef uint64_t i, count = 0
    for i in range(part * PIN_BLOCKS, (part + 1) * PIN_BLOCKS):
        if count < most:
            count += store_reserve(gate.store.page, i, name(gate))
    return count


cdef int64_t next_part(const Gate* gate, uint32_t pins, uint32_t kind) noexcept nogil:
    """A part whose pins are so (PIN_*), with such blocks; -1: there is none. Processes begin at different parts."""
    cdef const uint64_t* owners = store_owners(gate.store.page)
    cdef uint64_t parts = parts_of(ready_blocks(gate)), begin = mix64(gate.slot.pid), part, k, i
    for k in range(parts):
        part = (begin + k) % parts
        if gate.store.pins[part] != pins:
            continue
        for i in range(part * PIN_BLOCKS, (part + 1) * PIN_BLOCKS):
            if is_of_kind(gate, load64(&owners[i]), kind):
                return part
    return -1


cdef public void vgpu_reserve_no_more_than(Gate* gate, uint64_t owned) noexcept nogil:
    """Give back what this process reserves, as long as it has more than so many blocks. The caller touches."""
    cdef uint64_t blocks, own = 0, i
    cdef const uint64_t* owners
    if gate.store.page == NULL:
        return
    blocks = ready_blocks(gate)
    owners = store_owners(gate.store.page)
    for i in range(blocks):
        own += is_of_kind(gate, load64(&owners[i]), BLOCKS_OWN)
    for i in range(blocks):
        if own > owned and store_unreserve(gate.store.page, i, name(gate)):
            own -= 1


cdef bint is_settled(Gate* gate) noexcept nogil:
    """Whether the store has not grown for a while."""
    cdef uint64_t ready = ready_blocks(gate)
    if ready != gate.store_ready:
        gate.store_ready, gate.store_grew_ns = ready, now_ns()
    return now_ns() - gate.store_grew_ns > SETTLED_NS


cdef public bint vgpu_pin_next(Gate* gate, uint64_t owned) noexcept nogil:
    """Pin one more part, and reserve its free blocks, if this process has pinned less than so many blocks for itself.
    Where none is free, and the store does not grow, parts are pinned whose blocks others keep or reserve, until as many
    could be taken. 0: there is no more to do, or the driver does not pin it now. The caller has a context current."""
    cdef Blocks found
    cdef int64_t part
    if gate.store.page == NULL or gate.heir.page != NULL:
        return 0
    count_pinned(gate, &found)
    if found.own >= owned:
        return 0
    part = next_part(gate, PIN_NONE, BLOCKS_OWN)     # its pins have gone with a context
    if part >= 0:
        return is_pinned_now(gate, part)
    part = next_part(gate, PIN_DONE, BLOCKS_FREE)
    if part < 0:
        part = next_part(gate, PIN_NONE, BLOCKS_FREE)
    if part >= 0:
        return is_pinned_now(gate, part) and reserve_in(gate, part, owned - found.own) > 0
    if found.own + found.others >= owned or not is_settled(gate):
        return 0
    part = next_part(gate, PIN_NONE, BLOCKS_OTHERS)
    return part >= 0 and is_pinned_now(gate, part)


cdef inline void drop(Gate* gate, const Block* place) noexcept nogil:
    """Its block, if it has one and no other process has taken it, is free."""
    if place.kind != PLACE_ZEROS:
        store_drop(gate.store.page, place.aux, name(gate))


cdef void drop_kept(Gate* gate) noexcept nogil:
    """All copies of what is on the card, and their places."""
    cdef uint64_t i
    lock_acquire(&state().memory_lock)
    for i in range(gate.places.capacity):
        if gate.places.blocks[i].address:
            drop(gate, &gate.places.blocks[i])
            gate.places.blocks[i].address = 0
    gate.places.count = 0
    lock_release(&state().memory_lock)


cdef bint place_at(Gate* gate, uint64_t address, Block* place) noexcept nogil:
    cdef Block* found
    lock_acquire(&state().memory_lock)
    found = alloc_find(&gate.places, address)
    if found != NULL:
        place[0] = found[0]
    lock_release(&state().memory_lock)
    return found != NULL


cdef void mark(Gate* gate, uint64_t address, uint32_t kind) noexcept nogil:
    cdef Block* found
    lock_acquire(&state().memory_lock)
    found = alloc_find(&gate.places, address)
    if found != NULL:
        found.kind = kind
    lock_release(&state().memory_lock)


cdef bint remove_place(Gate* gate, uint64_t address, Block* place) noexcept nogil:
    cdef bint known
    lock_acquire(&state().memory_lock)
    known = alloc_remove(&gate.places, address, place)
    lock_release(&state().memory_lock)
    return known


cdef bint add_place(Gate* gate, uint64_t address, uint64_t block, uint32_t kind) noexcept nogil:
    cdef Block place
    cdef bint noted
    place.address, place.bytes, place.aux, place.kind, place.flags = address, BLOCK_BYTES, block, kind, 0
    lock_acquire(&state().memory_lock)
    noted = alloc_insert(&gate.places, &place)
    lock_release(&state().memory_lock)
    return noted


cdef int64_t take_kept(Gate* gate, uint64_t keeper) noexcept nogil:
    """The search goes on where it ended."""
    cdef uint64_t blocks = ready_blocks(gate), begin = min(gate.kept_next, blocks)
    cdef int64_t block = store_take_kept(gate.store.page, name(gate), keeper, begin, blocks)
    if block < 0:
        block = store_take_kept(gate.store.page, name(gate), keeper, 0, begin)
    if block >= 0:
        gate.kept_next = block
    return block


cdef int64_t take_in_stage(Gate* gate, uint32_t stage) noexcept nogil:
    cdef uint64_t keeper
    if stage < STAGE_NAMED:
        return take_from(gate, stage)
    if stage == STAGE_OTHERS:
        return take_kept(gate, 0)
    if stage == STAGE_OWN:
        return take_kept(gate, name(gate))
    keeper = load64(&gate.store.page.first_taken[stage - STAGE_NAMED])
    return take_kept(gate, keeper) if keeper else -1


cdef int64_t take_block(Gate* gate) noexcept nogil:
    """One that this process reserves, or a free one; else one that another reserves, or that a process keeps. -1: there
    is none. A source that was empty is searched again by the next go."""
    cdef int64_t block = take_in_stage(gate, gate.store_stage)
    while block < 0 and gate.store_stage < STAGE_OWN:
        gate.store_stage += 1
        block = take_in_stage(gate, gate.store_stage)
    if gate.store_stage == STAGE_FREE or gate.store_stage == STAGE_RESERVED_ELSEWHERE:
        gate.store_stage -= 1        # its part is pinned now, and may have more
    return block


cdef bint reclaim(Gate* gate, uint64_t address) noexcept nogil:
    """Its block that was kept. 0: it has none, or another process has taken it."""
    cdef Block place
    if not place_at(gate, address, &place):
        return 0
    if place.kind != PLACE_ZEROS and store_reclaim(gate.store.page, place.aux, name(gate)):
        pin(gate, place.aux / PIN_BLOCKS)
        return 1
    remove_place(gate, address, &place)
    return 0


cdef inline bint hash_at(const Gate* gate, uint64_t address, PieceHash* hash) noexcept nogil:
    """The piece's, as it leaves. 0: it has none."""
    cdef const Block* now = alloc_find(&gate.hashes, address)
    if now != NULL:
        hash.a, hash.b, hash.parts = now.bytes, now.aux, <uint64_t>now.kind << 32 | now.flags
    return now != NULL


cdef inline bint is_zeros(const Gate* gate, uint64_t address) noexcept nogil:
    """As the piece leaves."""
    cdef PieceHash now
    return hash_at(gate, address, &now) and now.parts == 0


cdef bint store_zeros(Gate* gate, uint64_t address) noexcept nogil:
    """An older copy of the piece is dropped."""
    cdef Block place
    if remove_place(gate, address, &place):
        drop(gate, &place)
    return add_place(gate, address, UINT64_MAX, PLACE_ZEROS)


cdef bint store_piece(Gate* gate, uint64_t address) noexcept nogil:
    cdef int64_t block
    if is_zeros(gate, address):
        return store_zeros(gate, address)
    if reclaim(gate, address):
        return 1
    block = take_block(gate)
    if block < 0:
        return 0
    pin(gate, block / PIN_BLOCKS)
    if add_place(gate, address, block, PLACE_BLANK):
        return 1
    store_give(gate.store.page, block)
    return 0


cdef void keep_from(Gate* gate, uint64_t address, uint64_t end) noexcept nogil:
    """The blocks of the pieces from ``address`` on: those with a copy are kept, others are free."""
    cdef Block place
    while address < end:
        if place_at(gate, address, &place):
            if place.kind == PLACE_COPIED:
                store_keep(gate.store.page, place.aux, name(gate))
            elif remove_place(gate, address, &place) and place.kind != PLACE_ZEROS:
                store_give(gate.store.page, place.aux)
        address += BLOCK_BYTES


cdef public bint vgpu_store(Gate* gate, const Block* chunk) noexcept nogil:
    """Blocks for all of the chunk's pieces but those of zeros, or for none. The caller has a context current."""
    cdef uint64_t address = chunk.address, end = address + chunk.bytes
    if gate.store.page == NULL:
        return 0
    while address < end:
        if not store_piece(gate, address):
            keep_from(gate, chunk.address, address)
            return 0
        address += BLOCK_BYTES
    return 1


cdef public void vgpu_keep(Gate* gate, const Block* chunk) noexcept nogil:
    """The chunk, which had blocks, is on the card: the copies that are whole are kept."""
    keep_from(gate, chunk.address, chunk.address + chunk.bytes)


cdef public void vgpu_unstore(Gate* gate, const Block* chunk) noexcept nogil:
    """The chunk is no more, or no copy of it is kept. Its blocks are free."""
    cdef uint64_t address = chunk.address, end = address + chunk.bytes
    cdef Block place
    while gate.store.page != NULL and address < end:
        if remove_place(gate, address, &place):
            if chunk.flags & CHUNK_AWAY and place.kind != PLACE_ZEROS:
                store_give(gate.store.page, place.aux)
            else:
                drop(gate, &place)
        address += BLOCK_BYTES


cdef public bint vgpu_is_clean(Gate* gate, uint64_t address) noexcept nogil:
    """Whether the piece needs no copy: its block has one of it as it left, or it is zeros. The caller has called
    ``vgpu_store``."""
    cdef const PieceHash* known
    cdef PieceHash now
    cdef Block place
    if not place_at(gate, address, &place) or place.kind == PLACE_BLANK:
        return 0
    if place.kind == PLACE_ZEROS:
        return 1
    if not hash_at(gate, address, &now):
        return 0
    known = &gate.store.hashes[place.aux]
    return known.a == now.a and known.b == now.b


cdef public uint64_t vgpu_overwrite(Gate* gate, uint64_t address) noexcept nogil:
    """A copy into the piece's block begins. The result is the parts of the piece that are to be copied."""
    cdef PieceHash now
    cdef Block place
    cdef uint64_t parts = UINT64_MAX
    if hash_at(gate, address, &now):
        parts = parts_to_copy(now.parts)
    if place_at(gate, address, &place) and place.kind != PLACE_ZEROS:
        gate.store.hashes[place.aux].parts = parts
    mark(gate, address, PLACE_BLANK)
    return parts


cdef public void vgpu_note_copy(Gate* gate, uint64_t address) noexcept nogil:
    """The piece's block has a copy of it. Without a hash of it, the copy is not kept."""
    cdef PieceHash now
    cdef Block place
    if not hash_at(gate, address, &now) or not place_at(gate, address, &place) or place.kind == PLACE_ZEROS:
        return
    gate.store.hashes[place.aux].a, gate.store.hashes[place.aux].b = now.a, now.b
    mark(gate, address, PLACE_COPIED)


cdef public bint vgpu_stored(Gate* gate, uint64_t address, StoredPiece* found) noexcept nogil:
    """Where the piece at ``address`` is in the store. 0: it is not there."""
    cdef Block place
    if not place_at(gate, address, &place):
        return 0
    found.memory, found.parts = NULL, 0
    if place.kind != PLACE_ZEROS:
        found.memory = gate.store.memory + place.aux * BLOCK_BYTES
        found.parts = gate.store.hashes[place.aux].parts
    return 1


cdef public uint64_t vgpu_room_for_run(const Gate* gate, const uint8_t* memory) noexcept nogil:
    """How many bytes of the store one copy may take from there on. The driver refuses a copy of two parts, because each
    is pinned by itself."""
    cdef uint64_t part_bytes = PIN_BLOCKS * <uint64_t>BLOCK_BYTES
    return part_bytes - (memory - gate.store.memory) % part_bytes
