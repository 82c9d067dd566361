"""Linear memory that can leave the card and come back to the same addresses (--oversubscribe swap).

It is made of chunks of physical memory (cuMemCreate) mapped into address ranges of the hook's own. Small allocations
share arenas of 2 MiB (logic/memory/arenas.pxd). swap.pyx takes the chunks off the card and brings them back. The vGPU
is charged for what the chunks take: whole pieces of 2 MiB, as of the driver's own linear memory.

A process that uses several GPUs has no such memory. Reason: its GPUs copy from each other's memory, and access it,
without a call to the vGPU of that memory.

To the program it is what cuMemAlloc gives. cuMemFree waits for the work of its context, as the driver's does, because
cuMemUnmap does not wait (H200: the stream dies). Queries return the allocation's attributes instead of a chunk's. Two
things differ. It cannot be shared by cuIpcGetMemHandle, which returns an error. Under an open capture, where the hook
may not wait, a free is done later.
"""

from libc.stdint cimport int64_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuCtxPopCurrent_v2, real_cuCtxPushCurrent_v2, real_cuCtxSynchronize,
    real_cuDeviceGetAttribute, real_cuIpcGetMemHandle, real_cuMemAddressFree, real_cuMemAddressReserve,
    real_cuMemCreate, real_cuMemGetAddressRange_v2, real_cuMemMap, real_cuMemRelease, real_cuMemSetAccess,
    real_cuMemUnmap, real_cuPointerGetAttribute, real_cuPointerGetAttributes,
)
from cython_ext.hook.hook cimport (
    charge_contexts, vgpu_await_room, vgpu_cancel, vgpu_card_has, vgpu_commit, vgpu_describe, vgpu_fits, vgpu_note,
    vgpu_release, vgpu_reserve, vgpu_say, vgpu_touch, vgpu_touched, vgpu_unstore,
)
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_SWAPPABLE, CHUNK_AWAY, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate,
    attached, state,
)
from cython_ext.pages.layout cimport KIND_DEVICE
from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_find, alloc_insert, alloc_remove
from cython_ext.logic.memory.arenas cimport ARENA_BYTES, arenas_add, arenas_give, arenas_take
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.pieces cimport PIECE_BYTES, SMALL_BYTES, pieces_for
from cython_ext.native cimport load32, now_ns, store64

cdef enum:
    CHUNK_BYTES = 32 << 20       # at most. Of 8 GiB, a step of a swap costs 9 ms, and 0.1 s in chunks of 2 MiB (H200)
    PINNED = 1                   # CU_MEM_ALLOCATION_TYPE_PINNED
    LOCATION_DEVICE = 1          # CU_MEM_LOCATION_TYPE_DEVICE
    READ_WRITE = 3               # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    RDMA_WITH_VMM = 110          # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED

    # CU_POINTER_ATTRIBUTE_*
    POINTER_CONTEXT = 1
    POINTER_BUFFER_ID = 7
    POINTER_RANGE_START = 11
    POINTER_RANGE_BYTES = 12
    POINTER_BLOCK_ID = 20


cdef struct Properties:          # CUmemAllocationProp
    int type
    int handle_types
    int location_type
    int location_id
    void* security
    unsigned char compression
    unsigned char rdma           # network cards may reach it, as they may the driver's own linear memory
    unsigned short usage
    unsigned char[4] reserved


cdef struct Access:              # CUmemAccessDesc
    int location_type
    int location_id
    int flags


# --- chunks

cdef public int vgpu_furnish(Gate* gate, const Block* chunk, unsigned long long* handle) noexcept nogil:
    """Physical memory for a chunk, at its address."""
    cdef Properties properties
    cdef Access access
    cdef int capable = 0, result
    properties.type, properties.location_type, properties.location_id = PINNED, LOCATION_DEVICE, gate.device
    properties.handle_types, properties.security = 0, NULL
    properties.compression = properties.usage = 0
    properties.reserved[0] = properties.reserved[1] = properties.reserved[2] = properties.reserved[3] = 0
    real_cuDeviceGetAttribute(&capable, RDMA_WITH_VMM, gate.device)
    properties.rdma = capable != 0
    access.location_type, access.location_id, access.flags = LOCATION_DEVICE, gate.device, READ_WRITE
    result = real_cuMemCreate(handle, chunk.bytes, &properties, 0)
    if result != CUDA_SUCCESS:
        return result
    result = real_cuMemMap(chunk.address, chunk.bytes, 0, handle[0], 0)
    if result == CUDA_SUCCESS:
        result = real_cuMemSetAccess(chunk.address, chunk.bytes, &access, 1)
        if result != CUDA_SUCCESS:
            real_cuMemUnmap(chunk.address, chunk.bytes)
    if result != CUDA_SUCCESS:
        real_cuMemRelease(handle[0])
    return result


cdef public void vgpu_strip(const Block* chunk) noexcept nogil:
    """Its physical memory goes back to the card. Nothing may be using it."""
    real_cuMemUnmap(chunk.address, chunk.bytes)
    real_cuMemRelease(chunk.aux)


cdef bint add_chunk(Gate* gate, uint64_t address, uint64_t size, int* result) noexcept nogil:
    cdef unsigned long long handle
    cdef Block chunk
    cdef bint noted
    chunk.address, chunk.bytes, chunk.kind = address, size, KIND_DEVICE
    chunk.flags = gate - &state().gates[0]
    result[0] = vgpu_furnish(gate, &chunk, &handle)
    if result[0] != CUDA_SUCCESS:
        return 0
    chunk.aux = handle
    lock_acquire(&gate.chunks_lock)
    noted = alloc_insert(&gate.chunks, &chunk)
    lock_release(&gate.chunks_lock)
    if not noted:
        vgpu_strip(&chunk)
        result[0] = CUDA_ERROR_OUT_OF_MEMORY
    return noted


cdef void drop_chunks(Gate* gate, uint64_t address, uint64_t size) noexcept nogil:
    """Drop the chunks of an address range. A chunk that is swapped out (the process ends) has nothing on the card."""
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
        if chunk.flags & CHUNK_AWAY:
            vgpu_unstore(gate, &chunk)
        else:
            vgpu_strip(&chunk)
        at += chunk.bytes


cdef int make(Gate* gate, uint64_t size, uint64_t* address) noexcept nogil:
    """So much memory (whole pieces) at an address that it keeps; charged."""
    cdef unsigned long long place = 0
    cdef uint64_t made = 0
    cdef int mode, result
    if vgpu_fits(gate, size) and not vgpu_card_has(gate, size):
        return CUDA_ERROR_OUT_OF_MEMORY          # it is waited for: nothing is refused yet
    if not vgpu_reserve(gate, KIND_DEVICE, size):
        return CUDA_ERROR_OUT_OF_MEMORY
    mode = relax()
    result = real_cuMemAddressReserve(&place, size, PIECE_BYTES, 0, 0)
    while result == CUDA_SUCCESS and made < size:
        if add_chunk(gate, place + made, min(<uint64_t>CHUNK_BYTES, size - made), &result):
            made += min(<uint64_t>CHUNK_BYTES, size - made)
    if result != CUDA_SUCCESS and place:
        drop_chunks(gate, place, made)
        real_cuMemAddressFree(place, size)
    restore(mode)
    if result != CUDA_SUCCESS:
        vgpu_cancel(gate, size)
        return result
    vgpu_commit(gate, KIND_DEVICE, size)
    address[0] = place
    return CUDA_SUCCESS


cdef void unmake(Gate* gate, uint64_t address, uint64_t size) noexcept nogil:
    drop_chunks(gate, address, size)
    real_cuMemAddressFree(address, size)
    vgpu_release(gate, KIND_DEVICE, size)


# --- allocations

cdef uint64_t take_small(Gate* gate, uint64_t size) noexcept nogil:
    cdef uint64_t address
    lock_acquire(&state().memory_lock)
    address = arenas_take(&gate.arenas, size)
    lock_release(&state().memory_lock)
    return address


cdef int allocate_small(Gate* gate, uint64_t size, uint64_t* address) noexcept nogil:
    cdef uint64_t arena = 0
    cdef bint noted
    cdef int result
    address[0] = take_small(gate, size)
    while address[0] == 0:
        result = make(gate, ARENA_BYTES, &arena)
        if result != CUDA_SUCCESS:
            return result
        lock_acquire(&state().memory_lock)
        noted = arenas_add(&gate.arenas, arena)
        lock_release(&state().memory_lock)
        if not noted:
            unmake(gate, arena, ARENA_BYTES)
            return CUDA_ERROR_OUT_OF_MEMORY
        address[0] = take_small(gate, size)
    return CUDA_SUCCESS


cdef int allocate(Gate* gate, unsigned long long* pointer, uint64_t size) noexcept nogil:
    cdef uint64_t address = 0
    cdef void* context = NULL
    cdef Block block
    cdef int result
    if size <= SMALL_BYTES:
        result = allocate_small(gate, size, &address)
    else:
        result = make(gate, pieces_for(size), &address)
    if result == CUDA_SUCCESS:
        vgpu_describe(gate, KIND_DEVICE, address, size, &block)
        real_cuCtxGetCurrent(&context)
        block.aux = <uint64_t>context        # its free waits for the work of this context
        block.flags |= BLOCK_SWAPPABLE
        vgpu_note(&block)
        pointer[0] = address
    return result


cdef public int vgpu_allocate_swappable(Gate* gate, unsigned long long* pointer, size_t size) noexcept nogil:
    """cuMemAlloc of a swappable vGPU. ``size``: not 0. What it may own, and the card has no room for, is waited for."""
    cdef uint64_t whole = pieces_for(size)
    cdef int64_t since = now_ns()
    cdef int result = CUDA_ERROR_OUT_OF_MEMORY
    cdef bint asked = 0
    state().swappable = 1
    charge_contexts(gate)
    while True:
        vgpu_touch(gate)
        free_doomed()
        result = allocate(gate, pointer, size)
        vgpu_touched(gate)
        if result != CUDA_ERROR_OUT_OF_MEMORY or not vgpu_fits(gate, whole):
            break
        asked = 1
        if not vgpu_await_room(gate, whole, since):
            break
    if asked:
        store64(&gate.slot.room_bytes, 0)
    return result


# --- frees

cdef public void vgpu_drop_swappable(const Block* block) noexcept nogil:
    """A block that is out of the table, and that nothing uses any more."""
    cdef Gate* gate = &state().gates[block.flags & BLOCK_GATE]
    cdef uint64_t base = block.address - block.address % ARENA_BYTES
    cdef bint emptied
    if block.bytes > SMALL_BYTES:
        unmake(gate, block.address, pieces_for(block.bytes))
        return
    lock_acquire(&state().memory_lock)
    emptied = arenas_give(&gate.arenas, block.address, block.bytes)
    lock_release(&state().memory_lock)
    if emptied:
        unmake(gate, base, ARENA_BYTES)


cdef int finish_work_of(void* context) noexcept nogil:
    """Wait for it, as the driver's cuMemFree does."""
    cdef int result = real_cuCtxPushCurrent_v2(context)
    if result != CUDA_SUCCESS:
        return CUDA_SUCCESS      # the context is gone, and its work with it
    result = real_cuCtxSynchronize()
    real_cuCtxPopCurrent_v2(&context)
    return result


cdef void doom(const Block* block) noexcept nogil:
    lock_acquire(&state().memory_lock)
    alloc_insert(&state().doomed, block)
    lock_release(&state().memory_lock)


cdef void free_doomed() noexcept nogil:
    """What was freed under a capture, once none is open."""
    cdef AllocTable* table = &state().doomed
    cdef Block block
    cdef bint found
    cdef uint64_t i
    while load32(&state().captures) == 0:
        found = 0
        lock_acquire(&state().memory_lock)
        if table.count:
            i = 0
            while table.blocks[i].address == 0:
                i += 1
            block = table.blocks[i]
            found = alloc_remove(table, block.address, &block)
        lock_release(&state().memory_lock)
        if not found:
            return
        finish_work_of(<void*>block.aux)
        vgpu_drop_swappable(&block)


cdef public int vgpu_free_swappable(const Block* block) noexcept nogil:
    """cuMemFree; ``block`` is out of the table already."""
    cdef Gate* gate = &state().gates[block.flags & BLOCK_GATE]
    cdef int result
    vgpu_touch(gate)
    free_doomed()
    if load32(&state().captures):
        doom(block)
        result = CUDA_SUCCESS
    else:
        result = finish_work_of(<void*>block.aux)
        if result == CUDA_SUCCESS:
            vgpu_drop_swappable(block)
        else:
            vgpu_note(block)     # a context that is broken frees nothing
    vgpu_touched(gate)
    return result


# --- what the program asks about it

cdef bint find_swappable(uint64_t address, Block* block) noexcept nogil:
    """The swappable allocation that ``address`` is within."""
    cdef AllocTable* table = &state().allocations
    cdef Block* each
    cdef uint64_t i
    cdef bint found = 0
    if not attached() or not state().swappable:
        return 0
    lock_acquire(&state().memory_lock)
    each = alloc_find(table, address)
    if each != NULL and each.flags & BLOCK_SWAPPABLE:
        block[0] = each[0]
        found = 1
    i = 0
    while not found and i < table.capacity:
        each = &table.blocks[i]
        if each.address and each.flags & BLOCK_SWAPPABLE and each.address <= address < each.address + each.bytes:
            block[0] = each[0]
            found = 1
        i += 1
    lock_release(&state().memory_lock)
    return found


cdef public int cuMemGetAddressRange_v2(
    unsigned long long* base, size_t* size, unsigned long long address
) noexcept nogil:
    cdef Block block
    if not find_swappable(address, &block):
        return real_cuMemGetAddressRange_v2(base, size, address)
    if base != NULL:
        base[0] = block.address
    if size != NULL:
        size[0] = block.bytes
    return CUDA_SUCCESS


cdef int attribute(void* value, int which, uint64_t address, const Block* block) noexcept nogil:
    """CU_POINTER_ATTRIBUTE_* of an address within ``block``."""
    if which == POINTER_CONTEXT:
        (<uint64_t*>value)[0] = block.aux
    elif which == POINTER_RANGE_START:
        (<uint64_t*>value)[0] = block.address
    elif which == POINTER_RANGE_BYTES:
        (<size_t*>value)[0] = block.bytes
    elif which == POINTER_BUFFER_ID or which == POINTER_BLOCK_ID:
        return real_cuPointerGetAttribute(value, which, block.address)   # of its first chunk, wherever it is asked
    else:
        return real_cuPointerGetAttribute(value, which, address)
    return CUDA_SUCCESS


cdef public int cuPointerGetAttribute(void* value, int which, unsigned long long address) noexcept nogil:
    cdef Gate* gate
    cdef Block block
    cdef int result
    if value == NULL or not find_swappable(address, &block):
        return real_cuPointerGetAttribute(value, which, address)
    gate = &state().gates[block.flags & BLOCK_GATE]
    vgpu_touch(gate)
    result = attribute(value, which, address, &block)
    vgpu_touched(gate)
    return result


cdef public int cuPointerGetAttributes(
    unsigned int count, int* which, void** values, unsigned long long address
) noexcept nogil:
    cdef Gate* gate
    cdef Block block
    cdef unsigned int i
    cdef int result
    if not find_swappable(address, &block):
        return real_cuPointerGetAttributes(count, which, values, address)
    gate = &state().gates[block.flags & BLOCK_GATE]
    vgpu_touch(gate)
    result = real_cuPointerGetAttributes(count, which, values, address)
    if result == CUDA_SUCCESS:
        for i in range(count):
            if which[i] in (POINTER_CONTEXT, POINTER_RANGE_START, POINTER_RANGE_BYTES, POINTER_BUFFER_ID):
                attribute(values[i], which[i], address, &block)
    vgpu_touched(gate)
    return result


cdef public int cuIpcGetMemHandle(void* handle, unsigned long long address) noexcept nogil:
    cdef Gate* gate
    cdef Block block
    if not find_swappable(address, &block):
        return real_cuIpcGetMemHandle(handle, address)
    gate = &state().gates[block.flags & BLOCK_GATE]
    vgpu_say(
        gate.vgpu_id, b" is swapped, and memory that another process has open cannot be: cuIpcGetMemHandle fails. ",
        b"Create the vGPU without --oversubscribe for programs that share GPU memory between processes"
    )
    return CUDA_ERROR_NOT_SUPPORTED
