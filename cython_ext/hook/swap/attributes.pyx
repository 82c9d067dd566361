"""What the program asks about memory that can leave the card: it is answered from the hook's books.

The driver would answer about a chunk. While the memory is swapped out, the driver knows nothing of it.
"""

from libc.stdint cimport uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuIpcGetMemHandle, real_cuMemGetAddressRange_v2, real_cuMemGetHandleForAddressRange,
    real_cuPointerGetAttribute, real_cuPointerGetAttributes,
)
from cython_ext.hook.hook cimport vgpu_say, vgpu_share_range, vgpu_touch, vgpu_touched
from cython_ext.hook.state cimport (
    BLOCK_GATE, BLOCK_SWAPPABLE, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, Gate, attached, state,
)
from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_find
from cython_ext.logic.memory.physical cimport Mapping, mapping_around
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release

cdef enum:
    # CU_POINTER_ATTRIBUTE_*
    POINTER_CONTEXT = 1
    POINTER_BUFFER_ID = 7
    POINTER_RANGE_START = 11
    POINTER_RANGE_BYTES = 12
    POINTER_MAPPING_BYTES = 18
    POINTER_MAPPING_START = 19
    POINTER_BLOCK_ID = 20


cdef struct Found:
    uint64_t address         # of the allocation, or of the mapping
    uint64_t bytes
    uint64_t context         # 0: it belongs to none
    Gate* gate


cdef bint find_linear(uint64_t address, Found* found) noexcept nogil:
    cdef AllocTable* table = &state().allocations
    cdef Block* each = alloc_find(table, address)
    cdef uint64_t i = 0
    if each != NULL and each.flags & BLOCK_SWAPPABLE == 0:
        each = NULL
    while each == NULL and i < table.capacity:
        if table.blocks[i].address and table.blocks[i].flags & BLOCK_SWAPPABLE:
            if table.blocks[i].address <= address < table.blocks[i].address + table.blocks[i].bytes:
                each = &table.blocks[i]
        i += 1
    if each == NULL:
        return 0
    found.address, found.bytes, found.context = each.address, each.bytes, each.aux
    found.gate = &state().gates[each.flags & BLOCK_GATE]
    return 1


cdef bint find_mapped(uint64_t address, Found* found) noexcept nogil:
    cdef const Mapping* mapping = mapping_around(&state().physical, address)
    if mapping == NULL:
        return 0
    found.address, found.bytes, found.context = mapping.address, mapping.physical.bytes, 0
    found.gate = &state().gates[0]
    return 1


cdef bint find_swappable(uint64_t address, Found* found) noexcept nogil:
    """What ``address`` is within: a linear allocation, or a mapping of the program's."""
    cdef bint known
    if not attached() or not state().swappable:
        return 0
    lock_acquire(&state().memory_lock)
    known = find_linear(address, found) or find_mapped(address, found)
    lock_release(&state().memory_lock)
    return known


cdef public bint vgpu_is_swappable_linear(uint64_t address) noexcept nogil:
    cdef Found found
    cdef bint known
    if not attached() or not state().swappable:
        return 0
    lock_acquire(&state().memory_lock)
    known = find_linear(address, &found)
    lock_release(&state().memory_lock)
    return known


cdef public int cuMemGetAddressRange_v2(
    unsigned long long* base, size_t* size, unsigned long long address
) noexcept nogil:
    cdef Found found
    if not find_swappable(address, &found):
        return real_cuMemGetAddressRange_v2(base, size, address)
    if base != NULL:
        base[0] = found.address
    if size != NULL:
        size[0] = found.bytes
    return CUDA_SUCCESS


cdef inline bint is_known(int which, const Found* found) noexcept nogil:
    """Of a mapping the driver answers with the context, and with the range of addresses that the program reserved."""
    if which in (POINTER_BUFFER_ID, POINTER_BLOCK_ID, POINTER_MAPPING_START, POINTER_MAPPING_BYTES):
        return 1
    return found.context != 0 and which in (POINTER_CONTEXT, POINTER_RANGE_START, POINTER_RANGE_BYTES)


cdef int attribute(void* value, int which, const Found* found) noexcept nogil:
    """One that ``is_known``."""
    if which == POINTER_CONTEXT:
        (<uint64_t*>value)[0] = found.context
    elif which == POINTER_RANGE_START or which == POINTER_MAPPING_START:
        (<uint64_t*>value)[0] = found.address
    elif which == POINTER_RANGE_BYTES or which == POINTER_MAPPING_BYTES:
        (<size_t*>value)[0] = found.bytes
    else:
        return real_cuPointerGetAttribute(value, which, found.address)   # of its first chunk, wherever it is asked
    return CUDA_SUCCESS


cdef public int cuPointerGetAttribute(void* value, int which, unsigned long long address) noexcept nogil:
    cdef Found found
    cdef int result
    if value == NULL or not find_swappable(address, &found):
        return real_cuPointerGetAttribute(value, which, address)
    vgpu_touch(found.gate)
    if is_known(which, &found):
        result = attribute(value, which, &found)
    else:
        result = real_cuPointerGetAttribute(value, which, address)
    vgpu_touched(found.gate)
    return result


cdef public int cuPointerGetAttributes(
    unsigned int count, int* which, void** values, unsigned long long address
) noexcept nogil:
    cdef Found found
    cdef unsigned int i
    cdef int result
    if not find_swappable(address, &found):
        return real_cuPointerGetAttributes(count, which, values, address)
    vgpu_touch(found.gate)
    result = real_cuPointerGetAttributes(count, which, values, address)
    if result == CUDA_SUCCESS:
        for i in range(count):
            if is_known(which[i], &found):
                attribute(values[i], which[i], &found)
    vgpu_touched(found.gate)
    return result


cdef public int cuIpcGetMemHandle(void* handle, unsigned long long address) noexcept nogil:
    cdef Found found
    if not find_swappable(address, &found):
        return real_cuIpcGetMemHandle(handle, address)
    vgpu_say(
        found.gate.vgpu_id,
        b" is swapped, and memory that another process has open cannot be: cuIpcGetMemHandle fails. ",
        b"Create the vGPU without --oversubscribe for programs that share GPU memory between processes"
    )
    return CUDA_ERROR_NOT_SUPPORTED


cdef public int cuMemGetHandleForAddressRange(
    void* handle, unsigned long long address, size_t size, int type, unsigned long long flags
) noexcept nogil:
    cdef Found found
    cdef int result
    if not find_swappable(address, &found):
        return real_cuMemGetHandleForAddressRange(handle, address, size, type, flags)
    if vgpu_share_range(handle, address, size, type, flags, &result):
        return result
    vgpu_say(
        found.gate.vgpu_id,
        b" is swapped, and memory that a device has open cannot be: cuMemGetHandleForAddressRange fails. ",
        b"Create the vGPU without --oversubscribe for programs that give GPU memory to other devices"
    )
    return CUDA_ERROR_NOT_SUPPORTED
