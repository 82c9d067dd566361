"""Physical memory that can leave the card: chunks at addresses that the vGPU keeps.

Linear memory (swappable.pyx) and the program's own physical memory (program_memory.pyx) are made of chunks. A chunk of
linear memory is mapped at an address of the hook's. A chunk of the program's memory is mapped where the program maps
it. The hook maps it at its own address, too (its window), where the program has no mapping that can be copied.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuDeviceGetAttribute, real_cuMemAddressFree, real_cuMemAddressReserve,
    real_cuMemCreate, real_cuMemMap, real_cuMemRelease, real_cuMemSetAccess, real_cuMemUnmap,
)
from cython_ext.hook.hook cimport (
    vgpu_await_room, vgpu_cancel, vgpu_card_has, vgpu_commit, vgpu_drop_returned, vgpu_fits, vgpu_release,
    vgpu_reserve, vgpu_touch, vgpu_touched, vgpu_unstore,
)
from cython_ext.hook.state cimport (
    CHUNK_AWAY, CHUNK_PROGRAM, CHUNK_WINDOW, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, state,
)
from cython_ext.logic.memory.alloctable cimport Block, alloc_insert, alloc_remove
from cython_ext.logic.memory.physical cimport (
    ALLOCATION_PINNED, LOCATION_DEVICE, Access, Mapping, Physical, Properties, physical_add, physical_of,
    physical_remove,
)
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport now_ns, store64
from cython_ext.pages.layout cimport KIND_DEVICE

cdef enum:
    CHUNK_BYTES = 32 << 20       # at most. Of 8 GiB, a step of a swap costs 9 ms, and 0.1 s in chunks of 2 MiB (H200)
    READ_WRITE = 3               # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    RDMA_WITH_VMM = 110          # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED


# --- one chunk

cdef Physical* physical_behind(const Block* chunk) noexcept nogil:
    """The program's memory that the chunk is a part of; NULL: it is linear memory, or that memory is going."""
    cdef Physical* physical
    if chunk.flags & CHUNK_PROGRAM == 0:
        return NULL
    lock_acquire(&state().memory_lock)
    physical = physical_of(&state().physical, chunk.address - chunk.kind * <uint64_t>CHUNK_BYTES)
    lock_release(&state().memory_lock)
    return physical


cdef void describe(const Gate* gate, const Physical* physical, Properties* properties) noexcept nogil:
    cdef int capable = 0
    if physical != NULL:
        properties[0] = physical.properties
        return
    memset(properties, 0, sizeof(Properties))
    properties.type, properties.location_type = ALLOCATION_PINNED, LOCATION_DEVICE
    properties.location_id = gate.device
    real_cuDeviceGetAttribute(&capable, RDMA_WITH_VMM, gate.device)
    properties.rdma = capable != 0


cdef int show(uint64_t address, uint64_t size, unsigned long long handle, int device, int flags) noexcept nogil:
    """Map physical memory, with this access of the device."""
    cdef Access access
    cdef int result = real_cuMemMap(address, size, 0, handle, 0)
    if result != CUDA_SUCCESS or flags == 0:
        return result
    access.location_type, access.location_id, access.flags = LOCATION_DEVICE, device, flags
    result = real_cuMemSetAccess(address, size, &access, 1)
    if result != CUDA_SUCCESS:
        real_cuMemUnmap(address, size)
    return result


cdef inline bint is_at_own_address(const Block* chunk) noexcept nogil:
    return chunk.flags & CHUNK_PROGRAM == 0 or chunk.flags & CHUNK_WINDOW != 0


cdef int open_window(const Gate* gate, Block* chunk, unsigned long long handle) noexcept nogil:
    cdef int result = show(chunk.address, chunk.bytes, handle, gate.device, READ_WRITE)
    if result == CUDA_SUCCESS:
        chunk.flags |= CHUNK_WINDOW
    return result


cdef uint64_t mapped_place(const Block* chunk, const Physical* physical) noexcept nogil:
    """Where the program has it mapped for reading and writing; 0: nowhere."""
    cdef const Mapping* mapping = physical.mappings if physical != NULL else NULL
    while mapping != NULL:
        if mapping.access == READ_WRITE:
            return mapping.address + chunk.kind * <uint64_t>CHUNK_BYTES
        mapping = mapping.next
    return 0


cdef public uint64_t vgpu_place_of(const Gate* gate, Block* chunk) noexcept nogil:
    """The address at which the hook copies a chunk that is on the card; 0: the driver gives none. No thread changes
    the program's mappings meanwhile."""
    cdef uint64_t place
    if is_at_own_address(chunk):
        return chunk.address
    place = mapped_place(chunk, physical_behind(chunk))
    if place == 0 and open_window(gate, chunk, chunk.aux) == CUDA_SUCCESS:
        place = chunk.address
    return place


cdef void hide(Block* chunk, const Physical* physical, const Mapping* end) noexcept nogil:
    """Unmap the chunk from the program's mappings before ``end``, NULL: from all, and from the hook's address."""
    cdef const Mapping* mapping = physical.mappings if physical != NULL else NULL
    cdef uint64_t offset = chunk.kind * <uint64_t>CHUNK_BYTES
    while mapping != end:
        real_cuMemUnmap(mapping.address + offset, chunk.bytes)
        mapping = mapping.next
    if is_at_own_address(chunk):
        real_cuMemUnmap(chunk.address, chunk.bytes)
    chunk.flags &= ~<uint32_t>CHUNK_WINDOW


cdef int show_all(
    const Gate* gate, Block* chunk, const Physical* physical, unsigned long long handle
) noexcept nogil:
    """Of the program's memory: at its mappings. A window is opened when it is needed."""
    cdef const Mapping* mapping = physical.mappings if physical != NULL else NULL
    cdef uint64_t offset = chunk.kind * <uint64_t>CHUNK_BYTES
    cdef int result = CUDA_SUCCESS
    if is_at_own_address(chunk):
        return show(chunk.address, chunk.bytes, handle, gate.device, READ_WRITE)
    while mapping != NULL:
        result = show(mapping.address + offset, chunk.bytes, handle, gate.device, mapping.access)
        if result != CUDA_SUCCESS:
            hide(chunk, physical, mapping)
            return result
        mapping = mapping.next
    return result


cdef public int vgpu_furnish(Gate* gate, Block* chunk, unsigned long long* handle) noexcept nogil:
    """Physical memory for a chunk, at its addresses. No thread changes the program's mappings meanwhile."""
    cdef const Physical* physical = physical_behind(chunk)
    cdef Properties properties
    cdef int result
    describe(gate, physical, &properties)
    result = real_cuMemCreate(handle, chunk.bytes, &properties, 0)
    if result != CUDA_SUCCESS:
        return result
    result = show_all(gate, chunk, physical, handle[0])
    if result != CUDA_SUCCESS:
        real_cuMemRelease(handle[0])
    return result


cdef public void vgpu_strip(Block* chunk) noexcept nogil:
    """Its physical memory goes back to the card. Nothing may be using it."""
    hide(chunk, physical_behind(chunk), NULL)
    real_cuMemRelease(chunk.aux)


# --- all chunks of one range of addresses

cdef bint add_chunk(Gate* gate, Block* chunk, int* result) noexcept nogil:
    cdef unsigned long long handle
    cdef bint noted
    result[0] = vgpu_furnish(gate, chunk, &handle)
    if result[0] != CUDA_SUCCESS:
        return 0
    chunk.aux = handle
    lock_acquire(&gate.chunks_lock)
    noted = alloc_insert(&gate.chunks, chunk)
    lock_release(&gate.chunks_lock)
    if not noted:
        vgpu_strip(chunk)
        result[0] = CUDA_ERROR_OUT_OF_MEMORY
    return noted


cdef int add_chunks(
    Gate* gate, uint64_t address, uint64_t size, const Physical* physical, uint64_t* made
) noexcept nogil:
    cdef uint64_t most = CHUNK_BYTES if physical == NULL else physical.chunk_bytes
    cdef Block chunk
    cdef int result = CUDA_SUCCESS
    made[0] = 0
    while result == CUDA_SUCCESS and made[0] < size:
        chunk.address, chunk.bytes = address + made[0], min(most, size - made[0])
        chunk.flags = gate - &state().gates[0]
        chunk.kind = 0
        if physical != NULL:
            chunk.flags |= CHUNK_PROGRAM
            chunk.kind = <uint32_t>(made[0] / CHUNK_BYTES)
        if add_chunk(gate, &chunk, &result):
            made[0] += chunk.bytes
    return result


cdef void drop_chunks(Gate* gate, uint64_t address, uint64_t size) noexcept nogil:
    """A chunk that is swapped out (the process ends) has nothing on the card."""
    cdef uint64_t at = address
    cdef Block chunk
    cdef bint known
    while at < address + size:
        lock_acquire(&gate.chunks_lock)
        known = alloc_remove(&gate.chunks, at, &chunk)
        if known and chunk.flags & CHUNK_AWAY:
            gate.away_bytes -= chunk.bytes
            store64(&gate.slot.away_bytes, gate.away_bytes)
        lock_release(&gate.chunks_lock)
        if not known:
            return
        vgpu_unstore(gate, &chunk)
        if chunk.flags & CHUNK_AWAY == 0:
            vgpu_strip(&chunk)
        at += chunk.bytes


cdef Physical* add_physical(uint64_t address, uint64_t size, const Properties* properties) noexcept nogil:
    """Memory that may be exported is one chunk, because an export is of one handle of the driver."""
    cdef bint whole = properties.handle_types != 0
    cdef Physical* physical
    lock_acquire(&state().memory_lock)
    physical = physical_add(&state().physical, address, size, size if whole else <uint64_t>CHUNK_BYTES)
    if physical != NULL:
        physical.properties = properties[0]
        real_cuCtxGetCurrent(&physical.context)
    lock_release(&state().memory_lock)
    return physical


cdef void remove_physical(Physical* physical) noexcept nogil:
    lock_acquire(&state().memory_lock)
    physical_remove(&state().physical, physical)
    lock_release(&state().memory_lock)


cdef int make_at(Gate* gate, uint64_t address, uint64_t size, const Properties* properties) noexcept nogil:
    cdef Physical* physical = NULL
    cdef uint64_t made
    cdef int result
    if properties != NULL:
        physical = add_physical(address, size, properties)
        if physical == NULL:
            return CUDA_ERROR_OUT_OF_MEMORY
    result = add_chunks(gate, address, size, physical, &made)
    if result != CUDA_SUCCESS:
        drop_chunks(gate, address, made)
        if physical != NULL:
            remove_physical(physical)
    return result


cdef public int vgpu_make_chunks(
    Gate* gate, uint64_t size, const Properties* properties, uint64_t* address
) noexcept nogil:
    """So much memory (whole pieces) at an address that it keeps; charged. ``properties``: the program's, of physical
    memory whose handle is ``address``; NULL: for linear memory."""
    cdef unsigned long long place = 0
    cdef int mode, result
    if vgpu_fits(gate, size) and not vgpu_card_has(gate, size):
        vgpu_drop_returned(gate, 0)
        if not vgpu_card_has(gate, size):
            return CUDA_ERROR_OUT_OF_MEMORY      # it is waited for: nothing is refused yet
    if not vgpu_reserve(gate, KIND_DEVICE, size):
        return CUDA_ERROR_OUT_OF_MEMORY
    mode = relax()
    result = real_cuMemAddressReserve(&place, size, PIECE_BYTES, 0, 0)
    if result == CUDA_SUCCESS:
        result = make_at(gate, place, size, properties)
        if result != CUDA_SUCCESS:
            real_cuMemAddressFree(place, size)
    restore(mode)
    if result != CUDA_SUCCESS:
        vgpu_cancel(gate, size)
        return result
    vgpu_commit(gate, KIND_DEVICE, size)
    address[0] = place
    return CUDA_SUCCESS


cdef public void vgpu_unmake_chunks(Gate* gate, uint64_t address, uint64_t size, uint32_t kind) noexcept nogil:
    """``kind``: as which it is charged."""
    drop_chunks(gate, address, size)
    real_cuMemAddressFree(address, size)
    vgpu_release(gate, kind, size)


cdef public int vgpu_make_with_room(
    Gate* gate, uint64_t size, int (*make)(Gate*, void*) noexcept nogil, void* asked
) noexcept nogil:
    """``make(gate, asked)``, of at most ``size`` bytes, once the card has room for what the vGPU may own."""
    cdef int64_t since = now_ns(), vain_ns = 0
    cdef int result = CUDA_ERROR_OUT_OF_MEMORY
    cdef bint waited = 0
    while True:
        vgpu_touch(gate)
        result = make(gate, asked)
        vgpu_touched(gate)
        if result != CUDA_ERROR_OUT_OF_MEMORY or not vgpu_fits(gate, size):
            break
        waited = 1
        if not vgpu_await_room(gate, size, since, &vain_ns):
            break
    if waited:
        store64(&gate.slot.room_bytes, 0)
    return result
