"""Linear memory, with a pitch or without: charged are the pieces that it takes from the card (logic/memory/pieces.pxd).

The driver's answer shows which pieces an allocation takes. Before the call the hook reserves the pieces that the
allocation would take alone. Where the limit leaves less, the hook still asks for a small allocation if paid pieces
have room: the allocation then takes none. The driver may find that room too scattered, and take one piece more. Until
a later free makes up for that piece, the hook asks for no allocation in this way. It does not free the allocation at
once, because cuMemFree waits for all queued work.
"""

from libc.stdint cimport UINT64_MAX, int64_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuCtxGetCurrent, real_cuMemAlloc, real_cuMemAlloc_v2, real_cuMemAllocPitch, real_cuMemAllocPitch_v2,
)
from cython_ext.hook.hook cimport (
    charge_contexts, gate_here, vgpu_allocate_managed, vgpu_allocate_swappable, vgpu_cancel, vgpu_fits,
    vgpu_gate_here, vgpu_note_linear, vgpu_reserve, vgpu_reserve_now,
)
from cython_ext.hook.state cimport CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, is_swappable, state
from cython_ext.pages.layout cimport GRANTS_MANAGED, GRANTS_SWAPPABLE, KIND_DEVICE
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.pieces cimport PIECE_BYTES, pieces_are_shared, pieces_for, pieces_for_rows
from cython_ext.native cimport load32, rarely

cdef enum:
    ATTACH_GLOBAL = 1        # CU_MEM_ATTACH_GLOBAL
    PITCH_BYTES = 512        # rows begin at a multiple of it (H200)


cdef bint fits_between(Gate* gate, uint64_t size) noexcept nogil:
    """Whether pieces that are paid for may have room for it."""
    cdef bint room
    lock_acquire(&state().memory_lock)
    room = <int64_t>size <= gate.pieces.room_bytes
    lock_release(&state().memory_lock)
    return room and vgpu_fits(gate, 0)


cdef bint reserve_scarce(Gate* gate, uint64_t size, uint64_t alone, uint64_t* reserved) noexcept nogil:
    """It was not granted at once."""
    cdef bint small = pieces_are_shared(size)
    if not (small and fits_between(gate, size)):
        if vgpu_reserve(gate, KIND_DEVICE, alone):
            return 1
        if not (small and fits_between(gate, size)):     # others may have brought some meanwhile
            return 0
    reserved[0] = 0
    return 1


cdef inline bint reserve(Gate* gate, uint64_t size, uint64_t alone, uint64_t* reserved) noexcept nogil:
    """1: the caller asks the driver for ``size`` bytes. They take ``alone`` bytes where no other allocation shares a
    piece. ``reserved`` bytes are reserved. A NULL gate has no limit."""
    reserved[0] = alone
    charge_contexts(gate)
    if gate == NULL or size == 0 or vgpu_reserve_now(gate, KIND_DEVICE, alone):
        return 1
    return reserve_scarce(gate, size, alone, reserved)


cdef inline int settle(Gate* gate, uint64_t reserved, int result, uint64_t address, uint64_t size) noexcept nogil:
    """The driver has answered: pay for the pieces, or let it have them back."""
    if gate == NULL:
        return result
    if rarely(result != CUDA_SUCCESS):
        vgpu_cancel(gate, reserved)
    else:
        vgpu_note_linear(gate, reserved, address, size)
    return result


cdef inline void* current_context() noexcept nogil:
    """NULL: the driver would not allocate at all."""
    cdef void* context = NULL
    return context if real_cuCtxGetCurrent(&context) == CUDA_SUCCESS else NULL


cdef inline bint is_managed(const Gate* gate) noexcept nogil:
    """--oversubscribe managed: the driver moves to the host what does not fit. Such memory is charged as asked for."""
    return gate != NULL and load32(&gate.grants.flags) & GRANTS_MANAGED != 0


cdef bint allocated_otherwise(Gate* gate, unsigned long long* pointer, size_t size, int* result) noexcept nogil:
    """Whether it is one that need not stay on the card; with what result."""
    if is_managed(gate):
        result[0] = vgpu_allocate_managed(gate, pointer, size, ATTACH_GLOBAL)
    elif is_swappable(gate) and pointer != NULL and size and current_context() != NULL:
        result[0] = vgpu_allocate_swappable(gate, pointer, size, current_context(), 0)
    else:
        return 0
    return 1


cdef public int cuMemAlloc_v2(unsigned long long* pointer, size_t size) noexcept nogil:
    cdef Gate* gate = gate_here()
    cdef uint64_t reserved
    cdef int result
    if gate != NULL and rarely(load32(&gate.grants.flags) & (GRANTS_MANAGED | GRANTS_SWAPPABLE) != 0):
        if allocated_otherwise(gate, pointer, size, &result):
            return result
    if not reserve(gate, size, pieces_for(size), &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAlloc_v2(pointer, size)
    return settle(gate, reserved, result, pointer[0] if result == CUDA_SUCCESS else 0, size)


cdef public int cuMemAlloc(unsigned int* pointer, unsigned int size) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t reserved
    cdef int result
    if not reserve(gate, size, pieces_for(size), &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAlloc(pointer, size)
    return settle(gate, reserved, result, pointer[0] if result == CUDA_SUCCESS else 0, size)


cdef bint reserve_rows(Gate* gate, uint64_t width, uint64_t height, uint64_t* reserved) noexcept nogil:
    cdef uint64_t alone = pieces_for_rows(width, height, PITCH_BYTES)
    return reserve(gate, width * height if alone <= PIECE_BYTES else alone, alone, reserved)


cdef public int cuMemAllocPitch_v2(
    unsigned long long* pointer, size_t* pitch, size_t width, size_t height, unsigned int element
) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t reserved, row
    cdef int result
    cdef bint swappable = is_swappable(gate) and current_context() != NULL
    if (
        (swappable or is_managed(gate)) and pointer != NULL and pitch != NULL and width and height
        and element in (4, 8, 16)
    ):
        row = (width + PITCH_BYTES - 1) / PITCH_BYTES * PITCH_BYTES
        if row < width or height > UINT64_MAX / row:
            return CUDA_ERROR_OUT_OF_MEMORY
        if swappable:
            result = vgpu_allocate_swappable(gate, pointer, row * height, current_context(), 0)
        else:
            result = vgpu_allocate_managed(gate, pointer, row * height, ATTACH_GLOBAL)
        if result == CUDA_SUCCESS:
            pitch[0] = row
        return result
    if not reserve_rows(gate, width, height, &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAllocPitch_v2(pointer, pitch, width, height, element)
    if result != CUDA_SUCCESS:
        return settle(gate, reserved, result, 0, 0)
    return settle(gate, reserved, result, pointer[0], pitch[0] * height)


cdef public int cuMemAllocPitch(
    unsigned int* pointer, unsigned int* pitch, unsigned int width, unsigned int height, unsigned int element
) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t reserved
    cdef int result
    if not reserve_rows(gate, width, height, &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAllocPitch(pointer, pitch, width, height, element)
    if result != CUDA_SUCCESS:
        return settle(gate, reserved, result, 0, 0)
    return settle(gate, reserved, result, pointer[0], <uint64_t>pitch[0] * height)
