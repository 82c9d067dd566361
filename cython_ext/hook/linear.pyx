"""Linear memory, with a pitch or without: charged are the pieces that it takes from the card (logic/pieces.pxd).

Which these are is known when the driver has answered. What an allocation takes alone is reserved before; where so much
is not left, a small one may still fit into a piece that is paid for. It is given back at once where it does not.
"""

from libc.stdint cimport uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuMemAlloc, real_cuMemAlloc_v2, real_cuMemAllocPitch, real_cuMemAllocPitch_v2, real_cuMemFree_v2,
)
from cython_ext.hook.hook cimport (
    BLOCK_PIECES, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, state, vgpu_cancel, vgpu_commit, vgpu_describe,
    vgpu_fits, vgpu_gate_here, vgpu_reserve, vgpu_reserve_more, vgpu_settle_ahead, vgpu_trim_pools,
)
from cython_ext.layout cimport KIND_DEVICE
from cython_ext.logic.alloctable cimport Block, alloc_insert
from cython_ext.logic.lock cimport lock_acquire, lock_release
from cython_ext.logic.pieces cimport PIECE_BYTES, pieces_for, pieces_give, pieces_take
from cython_ext.native cimport load64


cdef bint fits_between(Gate* gate, uint64_t size) noexcept nogil:
    """There is no piece more to be had, and it may be that none is needed."""
    if size >= PIECE_BYTES or vgpu_fits(gate, PIECE_BYTES):
        return 0
    vgpu_trim_pools()
    return not vgpu_fits(gate, PIECE_BYTES) and size <= load64(&state().pieces.room_bytes)


cdef bint reserve(Gate* gate, uint64_t size, uint64_t* reserved) noexcept nogil:
    """1: go on and ask the driver; ``reserved`` bytes are. A NULL gate has no limit."""
    if gate == NULL or size == 0 or fits_between(gate, size):
        reserved[0] = 0
        return 1
    reserved[0] = pieces_for(size)
    return vgpu_reserve(gate, KIND_DEVICE, reserved[0])


cdef int settle(Gate* gate, uint64_t reserved, int result, uint64_t address, uint64_t size) noexcept nogil:
    """The driver has answered: pay for the pieces, or let it have them back."""
    cdef uint64_t taken
    cdef Block block
    cdef bint paid
    if gate == NULL:
        return result
    if result != CUDA_SUCCESS:
        vgpu_cancel(gate, KIND_DEVICE, reserved)
        return result
    vgpu_describe(gate, KIND_DEVICE, address, size, &block)
    block.flags |= BLOCK_PIECES
    lock_acquire(&state().memory_lock)
    taken = pieces_take(&state().pieces, address, size)
    paid = taken <= reserved or vgpu_reserve_more(gate, KIND_DEVICE, taken - reserved)
    if paid:
        alloc_insert(&state().allocations, &block)       # without room for it: charged to the end, never uncharged
    else:
        pieces_give(&state().pieces, address, size)
    lock_release(&state().memory_lock)
    if not paid:
        vgpu_settle_ahead()
        real_cuMemFree_v2(address)
        vgpu_cancel(gate, KIND_DEVICE, reserved)
        return CUDA_ERROR_OUT_OF_MEMORY
    vgpu_commit(gate, KIND_DEVICE, taken)
    vgpu_cancel(gate, KIND_DEVICE, reserved - min(taken, reserved))
    return result


cdef public int cuMemAlloc_v2(unsigned long long* pointer, size_t size) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t reserved
    cdef int result
    if not reserve(gate, size, &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAlloc_v2(pointer, size)
    return settle(gate, reserved, result, pointer[0] if result == CUDA_SUCCESS else 0, size)


cdef public int cuMemAlloc(unsigned int* pointer, unsigned int size) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t reserved
    cdef int result
    if not reserve(gate, size, &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAlloc(pointer, size)
    return settle(gate, reserved, result, pointer[0] if result == CUDA_SUCCESS else 0, size)


cdef public int cuMemAllocPitch_v2(
    unsigned long long* pointer, size_t* pitch, size_t width, size_t height, unsigned int element
) noexcept nogil:
    cdef Gate* gate = vgpu_gate_here()
    cdef uint64_t reserved
    cdef int result
    if not reserve(gate, width * height, &reserved):
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
    if not reserve(gate, <uint64_t>width * height, &reserved):
        return CUDA_ERROR_OUT_OF_MEMORY
    result = real_cuMemAllocPitch(pointer, pitch, width, height, element)
    if result != CUDA_SUCCESS:
        return settle(gate, reserved, result, 0, 0)
    return settle(gate, reserved, result, pointer[0], <uint64_t>pitch[0] * height)
