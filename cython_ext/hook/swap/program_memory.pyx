"""Physical memory that the program makes and maps itself (cuMemCreate), and that can leave the card.

PyTorch's expandable segments and the sleep allocators of model servers are made of it. The program gets a handle of the
hook's own (logic/memory/physical.pxd), and maps the memory where it likes. After a swap the memory is at all its
addresses again, with the access that the program had set.

What stays on the card: memory that another process may have, from cuMemExportToShareableHandle or
cuMemGetHandleForAddressRange on. It is charged as KIND_SHARED from then on, and other memory as KIND_DEVICE.

A function with ``result`` returns 0 where the call is not about such memory. Else it has done the call, with the
driver's or its own result.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuMemExportToShareableHandle, real_cuMemGetAccess, real_cuMemGetHandleForAddressRange,
    real_cuMemMap, real_cuMemSetAccess, real_cuMemUnmap,
)
from cython_ext.hook.hook cimport (
    charge_contexts, vgpu_exported, vgpu_make_chunks, vgpu_make_with_room, vgpu_pin_ahead, vgpu_say, vgpu_share,
    vgpu_touch, vgpu_touched, vgpu_unmake_chunks, vgpu_unstore,
)
from cython_ext.hook.state cimport (
    CHUNK_AWAY, CHUNK_FIXED, CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, attached, is_swappable, state,
)
from cython_ext.logic.memory.alloctable cimport Block, alloc_find
from cython_ext.logic.memory.physical cimport (
    ALLOCATION_PINNED, LOCATION_DEVICE, Access, Mapping, Physical, PhysicalBook, Properties, chunk_in, mapping_add,
    mapping_around, mapping_at, mapping_remove, mappings_are_whole, physical_of, physical_release, physical_remove,
)
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport load64
from cython_ext.pages.layout cimport KIND_DEVICE, KIND_SHARED

cdef enum:
    MAP_INFO_BYTES = 96          # CUarrayMapInfo
    MAP_INFO_HANDLE = 64         # ... where its memory handle is


cdef struct Asked:               # by cuMemCreate
    uint64_t size
    const Properties* properties
    uint64_t handle


cdef inline PhysicalBook* book() noexcept nogil:
    return &state().physical


cdef inline Gate* only_gate() noexcept nogil:
    """A process with several has no such memory."""
    return &state().gates[0]


cdef inline bint is_empty() noexcept nogil:
    return load64(&book().handles.count) == 0


cdef uint32_t charged_as(const Physical* physical) noexcept nogil:
    return KIND_SHARED if physical.fixed else KIND_DEVICE


# --- handles

cdef Physical* use(uint64_t handle) noexcept nogil:
    """The memory, which stays until ``let_go``; NULL: it is no handle of the hook's."""
    cdef Physical* physical
    lock_acquire(&state().memory_lock)
    physical = physical_of(book(), handle)
    if physical != NULL:
        physical.references += 1
    lock_release(&state().memory_lock)
    return physical


cdef void unlock(Physical* physical, bint goes) noexcept nogil:
    """Release memory_lock; before, remove memory that goes from the book, and afterwards from the card. The caller
    touches."""
    cdef Physical gone
    if goes:
        gone = physical[0]
        physical_remove(book(), physical)
    lock_release(&state().memory_lock)
    if goes:
        vgpu_unmake_chunks(only_gate(), gone.handle, gone.bytes, charged_as(&gone))


cdef void let_go(Physical* physical) noexcept nogil:
    """The caller touches."""
    lock_acquire(&state().memory_lock)
    unlock(physical, physical_release(physical))


cdef int create(Gate* gate, void* what) noexcept nogil:
    cdef Asked* asked = <Asked*>what
    return vgpu_make_chunks(gate, asked.size, asked.properties, &asked.handle)


cdef public bint vgpu_create_physical(
    Gate* gate, unsigned long long* handle, size_t size, const void* properties, unsigned long long flags, int* result
) noexcept nogil:
    """cuMemCreate. A size that the driver refuses is left to it."""
    cdef const Properties* given = <const Properties*>properties
    cdef Asked asked
    if not is_swappable(gate) or handle == NULL or flags or size == 0 or size % PIECE_BYTES:
        return 0
    if given.type != ALLOCATION_PINNED or given.usage:       # tiles of sparse arrays stay on the card
        return 0
    charge_contexts(gate)
    vgpu_pin_ahead(gate)
    asked.size, asked.properties = size, given
    result[0] = vgpu_make_with_room(gate, size, create, &asked)
    if result[0] == CUDA_SUCCESS:
        state().swappable = 1
        handle[0] = asked.handle
    return 1


cdef public bint vgpu_release_physical(uint64_t handle, int* result) noexcept nogil:
    """cuMemRelease."""
    cdef Physical* physical
    if is_empty():
        return 0
    vgpu_touch(only_gate())
    lock_acquire(&state().memory_lock)
    physical = physical_of(book(), handle)
    result[0] = CUDA_SUCCESS if physical != NULL and physical.references else CUDA_ERROR_INVALID_VALUE
    lock_release(&state().memory_lock)
    if physical != NULL and result[0] == CUDA_SUCCESS:
        let_go(physical)
    vgpu_touched(only_gate())
    return physical != NULL


cdef public bint vgpu_retain_physical(unsigned long long* handle, uint64_t address, int* result) noexcept nogil:
    """cuMemRetainAllocationHandle."""
    cdef Mapping* mapping
    if is_empty():
        return 0
    lock_acquire(&state().memory_lock)
    mapping = mapping_around(book(), address)
    if mapping != NULL:
        mapping.physical.references += 1
        handle[0] = mapping.physical.handle
    lock_release(&state().memory_lock)
    result[0] = CUDA_SUCCESS
    return mapping != NULL


cdef public bint vgpu_physical_properties(void* properties, uint64_t handle, int* result) noexcept nogil:
    """cuMemGetAllocationPropertiesFromHandle."""
    cdef Physical* physical
    if is_empty() or properties == NULL:
        return 0
    lock_acquire(&state().memory_lock)
    physical = physical_of(book(), handle)
    if physical != NULL:
        (<Properties*>properties)[0] = physical.properties
    lock_release(&state().memory_lock)
    result[0] = CUDA_SUCCESS
    return physical != NULL


# --- mappings

cdef bint driver_handle(
    Gate* gate, const Physical* physical, uint64_t offset, unsigned long long* handle
) noexcept nogil:
    """Of the chunk there. 0: it is swapped out, which happens to a thread that touches only while the process ends."""
    cdef Block* chunk
    cdef bint here
    lock_acquire(&gate.chunks_lock)
    chunk = alloc_find(&gate.chunks, physical.handle + offset)
    here = chunk != NULL and chunk.flags & CHUNK_AWAY == 0
    if here:
        handle[0] = chunk.aux
    lock_release(&gate.chunks_lock)
    return here


cdef int map_chunks(Gate* gate, const Physical* physical, uint64_t address) noexcept nogil:
    cdef unsigned long long handle = 0
    cdef uint64_t offset = 0
    cdef int result = CUDA_SUCCESS
    while result == CUDA_SUCCESS and offset < physical.bytes:
        if driver_handle(gate, physical, offset, &handle):
            result = real_cuMemMap(address + offset, chunk_in(physical, offset), 0, handle, 0)
        else:
            result = CUDA_ERROR_DEINITIALIZED
        if result == CUDA_SUCCESS:
            offset += chunk_in(physical, offset)
    if result != CUDA_SUCCESS and offset:
        real_cuMemUnmap(address, offset)
    return result


cdef int map_here(Gate* gate, Physical* physical, uint64_t address) noexcept nogil:
    cdef Mapping* mapping
    cdef int result = map_chunks(gate, physical, address)
    if result != CUDA_SUCCESS:
        return result
    lock_acquire(&state().memory_lock)
    mapping = mapping_add(book(), physical, address)
    if mapping != NULL:
        real_cuCtxGetCurrent(&mapping.context)
    lock_release(&state().memory_lock)
    if mapping == NULL:
        real_cuMemUnmap(address, physical.bytes)
        return CUDA_ERROR_OUT_OF_MEMORY
    return CUDA_SUCCESS


cdef public bint vgpu_map_physical(
    uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags, int* result
) noexcept nogil:
    """cuMemMap, with the driver's refusals: 580 maps whole handles alone."""
    cdef Gate* gate = only_gate()
    cdef Physical* physical = NULL if is_empty() else use(handle)
    if physical == NULL:
        return 0
    vgpu_touch(gate)
    if size == 0 or size % PIECE_BYTES or offset % PIECE_BYTES or flags:
        result[0] = CUDA_ERROR_INVALID_VALUE
    elif size != physical.bytes or offset:
        result[0] = CUDA_ERROR_NOT_SUPPORTED
    else:
        result[0] = map_here(gate, physical, address)
    let_go(physical)
    vgpu_touched(gate)
    return 1


cdef void forget_mappings(uint64_t address, uint64_t size) noexcept nogil:
    """They are unmapped. Memory without handles goes with its last mapping. The caller touches."""
    cdef uint64_t at = address
    cdef Mapping* mapping
    cdef Physical* physical
    while at < address + size:
        lock_acquire(&state().memory_lock)
        mapping = mapping_at(book(), at)
        physical = mapping.physical
        at += physical.bytes
        unlock(physical, mapping_remove(book(), mapping))


cdef public bint vgpu_unmap_physical(uint64_t address, size_t size, int* result) noexcept nogil:
    """cuMemUnmap of whole mappings. A range that has other memory, too, is refused."""
    cdef Gate* gate = only_gate()
    cdef bint ours, whole
    if is_empty():
        return 0
    vgpu_touch(gate)
    lock_acquire(&state().memory_lock)
    ours = mapping_at(book(), address) != NULL
    whole = mappings_are_whole(book(), address, size)
    lock_release(&state().memory_lock)
    result[0] = CUDA_ERROR_INVALID_VALUE
    if whole:
        result[0] = real_cuMemUnmap(address, size)
        if result[0] == CUDA_SUCCESS:
            forget_mappings(address, size)
    vgpu_touched(gate)
    return ours


cdef void note_access(
    const Gate* gate, uint64_t address, uint64_t size, const Access* accesses, size_t count
) noexcept nogil:
    cdef uint64_t at = address
    cdef Mapping* mapping
    cdef size_t i
    lock_acquire(&state().memory_lock)
    mapping = mapping_around(book(), at)
    while mapping != NULL and mapping.address < address + size:
        real_cuCtxGetCurrent(&mapping.context)
        for i in range(count):
            if accesses[i].location_type == LOCATION_DEVICE and accesses[i].location_id == gate.device:
                mapping.access = accesses[i].flags
        mapping = mapping_at(book(), mapping.address + mapping.physical.bytes)
    lock_release(&state().memory_lock)


cdef public int cuMemSetAccess(
    unsigned long long address, size_t size, const void* accesses, size_t count
) noexcept nogil:
    cdef int result
    if state() == NULL or is_empty():
        return real_cuMemSetAccess(address, size, accesses, count)
    vgpu_touch(only_gate())
    result = real_cuMemSetAccess(address, size, accesses, count)
    if result == CUDA_SUCCESS:
        note_access(only_gate(), address, size, <const Access*>accesses, count)
    vgpu_touched(only_gate())
    return result


cdef public int cuMemGetAccess(
    unsigned long long* flags, const void* location, unsigned long long address
) noexcept nogil:
    cdef int result
    if state() == NULL or is_empty():
        return real_cuMemGetAccess(flags, location, address)
    vgpu_touch(only_gate())
    result = real_cuMemGetAccess(flags, location, address)
    vgpu_touched(only_gate())
    return result


# --- what others may have

cdef void fix(Gate* gate, Physical* physical) noexcept nogil:
    """From here on it stays on the card. The caller touches."""
    cdef uint64_t offset = 0
    cdef Block* chunk
    cdef bint first
    lock_acquire(&gate.chunks_lock)
    while offset < physical.bytes:
        chunk = alloc_find(&gate.chunks, physical.handle + offset)
        if chunk != NULL:
            chunk.flags |= CHUNK_FIXED
            vgpu_unstore(gate, chunk)        # no copy of it is kept
        offset += chunk_in(physical, offset)
    first = not physical.fixed
    physical.fixed = 1
    lock_release(&gate.chunks_lock)
    if first:
        vgpu_share(gate, KIND_DEVICE, physical.bytes)


cdef public int cuMemExportToShareableHandle(
    void* shareable, unsigned long long handle, int type, unsigned long long flags
) noexcept nogil:
    cdef Gate* gate
    cdef Physical* physical
    cdef unsigned long long real = 0
    cdef int result = CUDA_ERROR_DEINITIALIZED
    physical = NULL if state() == NULL or is_empty() else use(handle)
    if physical == NULL:
        result = real_cuMemExportToShareableHandle(shareable, handle, type, flags)
        if result == CUDA_SUCCESS and attached():
            vgpu_exported(handle)
        return result
    gate = only_gate()
    vgpu_touch(gate)
    if physical.chunk_bytes < physical.bytes:
        result = CUDA_ERROR_INVALID_VALUE        # it was made without a type of handles
    elif driver_handle(gate, physical, 0, &real):
        result = real_cuMemExportToShareableHandle(shareable, real, type, flags)
    if result == CUDA_SUCCESS:
        fix(gate, physical)
    let_go(physical)
    vgpu_touched(gate)
    return result


cdef Physical* mapped_around(uint64_t address) noexcept nogil:
    """As ``use``."""
    cdef Mapping* mapping
    cdef Physical* physical = NULL
    lock_acquire(&state().memory_lock)
    mapping = mapping_around(book(), address)
    if mapping != NULL:
        physical = mapping.physical
        physical.references += 1
    lock_release(&state().memory_lock)
    return physical


cdef public bint vgpu_share_range(
    void* handle, uint64_t address, size_t size, int type, unsigned long long flags, int* result
) noexcept nogil:
    """cuMemGetHandleForAddressRange, such as for network cards."""
    cdef Gate* gate = only_gate()
    cdef Physical* physical
    cdef uint64_t at = address
    if is_empty():
        return 0
    physical = mapped_around(address)
    if physical == NULL:
        return 0
    vgpu_touch(gate)
    result[0] = real_cuMemGetHandleForAddressRange(handle, address, size, type, flags)
    while physical != NULL:
        if result[0] == CUDA_SUCCESS:
            fix(gate, physical)
        let_go(physical)
        at += PIECE_BYTES
        physical = mapped_around(at) if at < address + size else NULL
    vgpu_touched(gate)
    return 1


cdef int refused(const char* call) noexcept nogil:
    vgpu_say(
        only_gate().vgpu_id, b" is swapped, and this call is not possible with memory of cuMemCreate that is: ", call
    )
    return CUDA_ERROR_NOT_SUPPORTED


cdef bint is_handle(uint64_t handle) noexcept nogil:
    cdef bint found
    if state() == NULL or is_empty():
        return 0
    lock_acquire(&state().memory_lock)
    found = physical_of(book(), handle) != NULL
    lock_release(&state().memory_lock)
    return found


cdef public int vgpu_check_map_infos(const void* infos, unsigned int count) noexcept nogil:
    """cuMemMapArrayAsync: CUDA_SUCCESS, or the refusal of handles that the driver does not know."""
    cdef unsigned int i
    for i in range(count):
        if is_handle((<const uint64_t*>(<const char*>infos + i * MAP_INFO_BYTES + MAP_INFO_HANDLE))[0]):
            return refused(b"cuMemMapArrayAsync")
    return CUDA_SUCCESS


cdef public int vgpu_check_multicast(uint64_t handle) noexcept nogil:
    return refused(b"cuMulticastBindMem") if is_handle(handle) else CUDA_SUCCESS


# --- contexts

cdef public void vgpu_physical_of_context_died(const void* context, void* heir) noexcept nogil:
    """``heir``: the context in its place; NULL: there is none. The caller holds memory_lock."""
    cdef Physical* physical
    cdef Mapping* mapping
    cdef uint64_t i
    for i in range(book().handles.capacity):
        if book().handles.blocks[i].address == 0:
            continue
        physical = <Physical*>book().handles.blocks[i].aux
        if physical.context == context:
            physical.context = heir
        mapping = physical.mappings
        while mapping != NULL:
            if mapping.context == context:
                mapping.context = heir
            mapping = mapping.next
