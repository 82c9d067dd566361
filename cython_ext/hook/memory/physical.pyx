"""Physical memory with mappings of its own (cuMemCreate): charged until every handle is released and every mapping
unmapped. Memory of several processes: shared.pyx. Memory that can leave the card has a book of its own
(swap/program_memory.pyx).

``State.handles``: handle → bytes, with handles and mappings not yet given up counted in Block.aux. ``State.mappings``:
address → handle (aux).
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuMemCreate, real_cuMemGetAllocationPropertiesFromHandle, real_cuMemMap, real_cuMemMapArrayAsync,
    real_cuMemMapArrayAsync_ptsz, real_cuMemRelease, real_cuMemRetainAllocationHandle, real_cuMemUnmap,
    real_cuMulticastBindMem, real_cuMulticastBindMem_v2,
)
from cython_ext.hook.hook cimport (
    vgpu_cancel, vgpu_check_map_infos, vgpu_check_multicast, vgpu_commit, vgpu_create_physical,
    vgpu_handle_gone, vgpu_imported_mapped, vgpu_is_swappable_linear, vgpu_map_physical,
    vgpu_physical_properties, vgpu_release_physical, vgpu_reserve, vgpu_retain_physical,
    vgpu_unmap_physical,
)
from cython_ext.hook.state cimport (
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, attached, state,
)
from cython_ext.pages.layout cimport KIND_VMM
from cython_ext.logic.memory.alloctable cimport Block, alloc_find, alloc_insert, alloc_remove
from cython_ext.logic.memory.physical cimport LOCATION_DEVICE, Properties
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release

cdef void let_go(uint64_t handle) noexcept nogil:
    """One handle or mapping fewer; the last one gives the charge back. The caller holds memory_lock."""
    cdef Block* block = alloc_find(&state().handles, handle)
    cdef Block gone
    if block == NULL:
        return
    block.aux -= 1
    if block.aux == 0 and alloc_remove(&state().handles, handle, &gone):
        vgpu_handle_gone(&gone)


cdef public int cuMemCreate(
    unsigned long long* handle, size_t size, const void* properties, unsigned long long flags
) noexcept nogil:
    cdef const Properties* given = <const Properties*>properties
    cdef Gate* gate = NULL
    cdef Block block
    cdef uint32_t i
    cdef int result
    if attached() and given != NULL and given.location_type == LOCATION_DEVICE:
        for i in range(state().gate_count):
            if state().gates[i].device == given.location_id:
                gate = &state().gates[i]
        if vgpu_create_physical(gate, handle, size, properties, flags, &result):
            return result
    if not vgpu_reserve(gate, KIND_VMM, size):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemCreate(handle, size, properties, flags)
    if gate == NULL:
        return result
    if result != CUDA_SUCCESS:
        vgpu_cancel(gate, size)
        return result
    block.address = handle[0]
    block.bytes = size
    block.kind = KIND_VMM
    block.flags = gate - &state().gates[0]
    block.aux = 1
    lock_acquire(&state().memory_lock)
    alloc_insert(&state().handles, &block)
    lock_release(&state().memory_lock)
    vgpu_commit(gate, KIND_VMM, size)
    return result


cdef public int cuMemRetainAllocationHandle(unsigned long long* handle, void* address) noexcept nogil:
    cdef Block* block
    cdef int result
    if attached() and vgpu_retain_physical(handle, <uint64_t>address, &result):
        return result
    if vgpu_is_swappable_linear(<uint64_t>address):
        return CUDA_ERROR_INVALID_VALUE      # of a chunk it would be one of the hook's
    result = real_cuMemRetainAllocationHandle(handle, address)
    if result == CUDA_SUCCESS and attached():
        lock_acquire(&state().memory_lock)
        block = alloc_find(&state().handles, handle[0])
        if block != NULL:
            block.aux += 1
        lock_release(&state().memory_lock)
    return result


cdef public int cuMemRelease(unsigned long long handle) noexcept nogil:
    cdef int result
    if not attached():
        return real_cuMemRelease(handle)
    if vgpu_release_physical(handle, &result):
        return result
    lock_acquire(&state().memory_lock)       # held across: the driver may hand the number out again at once
    result = real_cuMemRelease(handle)
    if result == CUDA_SUCCESS:
        let_go(handle)
    lock_release(&state().memory_lock)
    return result


cdef public int cuMemMap(
    unsigned long long pointer, size_t size, size_t offset, unsigned long long handle, unsigned long long flags
) noexcept nogil:
    cdef Block* block
    cdef Block mapping
    cdef int result
    if attached() and vgpu_map_physical(pointer, size, offset, handle, flags, &result):
        return result
    result = real_cuMemMap(pointer, size, offset, handle, flags)
    if result == CUDA_SUCCESS and attached():
        lock_acquire(&state().memory_lock)
        block = alloc_find(&state().handles, handle)
        if block != NULL:
            mapping.address = pointer
            mapping.bytes = size
            mapping.kind = KIND_VMM
            mapping.flags = 0
            mapping.aux = handle
            if alloc_insert(&state().mappings, &mapping):
                block.aux += 1
                vgpu_imported_mapped(block, offset + size)
        lock_release(&state().memory_lock)
    return result


cdef public int cuMemUnmap(unsigned long long pointer, size_t size) noexcept nogil:
    """The range may span several mappings, whole ones (the driver refuses anything else)."""
    cdef uint64_t at = pointer
    cdef Block mapping
    cdef int result
    if not attached():
        return real_cuMemUnmap(pointer, size)
    if vgpu_unmap_physical(pointer, size, &result):
        return result
    lock_acquire(&state().memory_lock)
    result = real_cuMemUnmap(pointer, size)
    while result == CUDA_SUCCESS and at < pointer + size and alloc_remove(&state().mappings, at, &mapping):
        let_go(mapping.aux)
        at += mapping.bytes
    lock_release(&state().memory_lock)
    return result


# --- other calls with a handle

cdef public int cuMemGetAllocationPropertiesFromHandle(void* properties, unsigned long long handle) noexcept nogil:
    cdef int result
    if attached() and vgpu_physical_properties(properties, handle, &result):
        return result
    return real_cuMemGetAllocationPropertiesFromHandle(properties, handle)


cdef public int cuMemMapArrayAsync(void* infos, unsigned int count, void* stream) noexcept nogil:
    cdef int result = vgpu_check_map_infos(infos, count)
    return real_cuMemMapArrayAsync(infos, count, stream) if result == CUDA_SUCCESS else result


cdef public int cuMemMapArrayAsync_ptsz(void* infos, unsigned int count, void* stream) noexcept nogil:
    cdef int result = vgpu_check_map_infos(infos, count)
    return real_cuMemMapArrayAsync_ptsz(infos, count, stream) if result == CUDA_SUCCESS else result


cdef public int cuMulticastBindMem(
    unsigned long long multicast, size_t place, unsigned long long handle, size_t offset, size_t size,
    unsigned long long flags
) noexcept nogil:
    cdef int result = vgpu_check_multicast(handle)
    return real_cuMulticastBindMem(multicast, place, handle, offset, size, flags) if result == CUDA_SUCCESS else result


cdef public int cuMulticastBindMem_v2(
    unsigned long long multicast, int device, size_t place, unsigned long long handle, size_t offset, size_t size,
    unsigned long long flags
) noexcept nogil:
    cdef int result = vgpu_check_multicast(handle)
    if result != CUDA_SUCCESS:
        return result
    return real_cuMulticastBindMem_v2(multicast, device, place, handle, offset, size, flags)
