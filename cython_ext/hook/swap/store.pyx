"""The hook's end of the store: blocks of host memory that it takes and gives back (logic/memory/store.pxd), and pins.

The GPU reaches host memory at full speed only once it is pinned, which takes longer than a copy (0.3 s a GiB, H200).
So that is done segment by segment, where blocks are first used by this process, and stays; blocks of segments that are
pinned already are taken first.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, madvise, mmap, munmap

from cython_ext.hook.generated.driver cimport real_cuMemHostRegister_v2, real_cuMemHostUnregister
from cython_ext.hook.hook cimport vgpu_log
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, Store, state
from cython_ext.pages.layout cimport LAYOUT_VERSION, STORE_MAGIC, StorePage
from cython_ext.logic.memory.alloctable cimport Block, alloc_find, alloc_insert, alloc_remove
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.store cimport (
    BLOCK_BYTES, SEGMENT_BLOCKS, store_give, store_name, store_size, store_take,
)
from cython_ext.native cimport load32, now_ns

cdef extern from "hook/connect.h" nogil:
    long vgpu_file_size(int fd) noexcept
    uint64_t vgpu_file_number(int fd) noexcept

cdef extern from "<sys/mman.h>" nogil:
    const int MADV_DONTFORK

cdef enum:
    PORTABLE = 1             # CU_MEMHOSTREGISTER_PORTABLE

    PIN_NONE = 0             # not tried yet
    PIN_DONE = 1
    PIN_NOT = 2              # driver, or limits, do not allow it: copies are slower


cdef bint map_store(Store* store, int fd, uint64_t file) noexcept nogil:
    cdef uint64_t size = max(vgpu_file_size(fd), 0), offset = 0
    cdef StorePage* page
    cdef void* pins
    if size < sizeof(StorePage):
        return 0
    page = <StorePage*>mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if page == <void*>MAP_FAILED:
        return 0
    store.blocks = page.blocks
    pins = mmap(NULL, pins_size(store), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if (
        page.header.magic != STORE_MAGIC or page.header.min_version > LAYOUT_VERSION or pins == MAP_FAILED
        or store.blocks == 0 or store_size(store.blocks, &offset) > size
    ):
        munmap(page, size)
        return 0
    madvise(page, size, MADV_DONTFORK)
    store.size, store.file = size, file
    store.memory = <uint8_t*>page + offset
    store.pins = <uint8_t*>pins
    store.page = page
    return 1


cdef void unmap_store(Store* store) noexcept nogil:
    if store.page != NULL:
        munmap(store.page, store.size)
        munmap(store.pins, pins_size(store))
    store.page = NULL


cdef inline uint64_t pins_size(const Store* store) noexcept nogil:
    return store.blocks / SEGMENT_BLOCKS + 1


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


cdef public void vgpu_renew_store(Gate* gate) noexcept nogil:
    """No memory of the process is in the store: if there is a later store, the gate changes to that. The caller has a
    context current."""
    cdef uint64_t i
    if gate.heir.page == NULL or gate.places.count:
        return
    for i in range(pins_size(&gate.store)):
        if gate.store.pins[i] == PIN_DONE:
            real_cuMemHostUnregister(gate.store.memory + i * SEGMENT_BLOCKS * BLOCK_BYTES)
    unmap_store(&gate.store)
    gate.store = gate.heir
    gate.heir.page = NULL
    gate.store_next = 0


cdef inline uint64_t name(const Gate* gate) noexcept nogil:
    return store_name(gate.slot.pid, gate.slot.start_time)


cdef int64_t take_from(Gate* gate, bint pinned) noexcept nogil:
    """A block of a segment that is pinned here, or of one that is not; -1: there is none."""
    cdef uint64_t ready = min(<uint64_t>load32(&gate.store.page.ready), gate.store.blocks)
    cdef uint64_t segments = (ready + SEGMENT_BLOCKS - 1) / SEGMENT_BLOCKS, k, segment
    cdef int64_t block
    for k in range(segments):
        segment = (gate.store_next + k) % segments
        if (gate.store.pins[segment] != PIN_NONE) == pinned:
            block = store_take(
                gate.store.page, name(gate), segment * SEGMENT_BLOCKS, min(ready, (segment + 1) * SEGMENT_BLOCKS)
            )
            if block >= 0:
                gate.store_next = segment
                return block
    return -1


cdef void pin(Gate* gate, uint64_t segment) noexcept nogil:
    """All of it, as it has got its memory. The caller has a context current."""
    cdef uint64_t begin = segment * SEGMENT_BLOCKS, count = min(gate.store.blocks - begin, <uint64_t>SEGMENT_BLOCKS)
    cdef int64_t began_ns = now_ns()
    cdef int result
    if gate.store.pins[segment] != PIN_NONE:
        return
    result = real_cuMemHostRegister_v2(gate.store.memory + begin * BLOCK_BYTES, count * BLOCK_BYTES, PORTABLE)
    gate.store.pins[segment] = PIN_DONE if result == CUDA_SUCCESS else PIN_NOT
    gate.pinning_ns += now_ns() - began_ns
    vgpu_log(b"pinned segment, result", segment, result)


cdef void give_from(Gate* gate, uint64_t address, uint64_t end) noexcept nogil:
    """The blocks of the pieces from ``address`` on."""
    cdef Block place
    cdef bint known = 1
    while known and address < end:
        lock_acquire(&state().memory_lock)
        known = alloc_remove(&gate.places, address, &place)
        lock_release(&state().memory_lock)
        if known:
            store_give(gate.store.page, place.aux)
        address += BLOCK_BYTES


cdef public bint vgpu_store(Gate* gate, const Block* chunk) noexcept nogil:
    """Blocks for all of the chunk's pieces, or for none. The caller has a context current."""
    cdef uint64_t address = chunk.address, end = address + chunk.bytes
    cdef Block place
    cdef bint noted = 1
    cdef int64_t block = -1
    if gate.store.page == NULL:
        return 0
    place.bytes = BLOCK_BYTES
    place.kind = place.flags = 0
    while noted and address < end:
        block = take_from(gate, 1)
        if block < 0:
            block = take_from(gate, 0)
        if block < 0:
            break
        pin(gate, block / SEGMENT_BLOCKS)
        place.address, place.aux = address, block
        lock_acquire(&state().memory_lock)
        noted = alloc_insert(&gate.places, &place)
        lock_release(&state().memory_lock)
        if not noted:
            store_give(gate.store.page, block)
        address += BLOCK_BYTES
    if block < 0 or not noted:
        give_from(gate, chunk.address, end)
        return 0
    return 1


cdef public void vgpu_unstore(Gate* gate, const Block* chunk) noexcept nogil:
    """It is on the card again, or no more."""
    give_from(gate, chunk.address, chunk.address + chunk.bytes)


cdef public void* vgpu_stored(Gate* gate, uint64_t address) noexcept nogil:
    """Where the piece at ``address`` is in the store."""
    cdef Block* place
    cdef void* found = NULL
    lock_acquire(&state().memory_lock)
    place = alloc_find(&gate.places, address)
    if place != NULL:
        found = gate.store.memory + place.aux * BLOCK_BYTES
    lock_release(&state().memory_lock)
    return found
