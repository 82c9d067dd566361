"""Physical memory of several processes (cuMemExportToShareableHandle): its owner is charged, and nothing else is.

The owner's charge becomes one of KIND_SHARED with the first export. An importer shows in ``Slot.imported_pieces`` how
much it holds of others, and owns nothing of that. The server knows by it which processes hold an owner's memory after
the owner's death (gpuserver/runtime/memory/watch.py).

An imported handle has a Block of KIND_IMPORTED in ``State.handles``. The driver says nothing about its size, so
``Block.bytes`` is 0 until the first mapping, which maps all of it.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.hook.generated.driver cimport (
    real_cuMemGetAllocationPropertiesFromHandle, real_cuMemImportFromShareableHandle,
)
from cython_ext.hook.hook cimport vgpu_release, vgpu_share
from cython_ext.hook.state cimport CUDA_SUCCESS, Gate, KIND_IMPORTED, attached, state
from cython_ext.logic.memory.alloctable cimport Block, alloc_find, alloc_insert
from cython_ext.logic.memory.physical cimport LOCATION_DEVICE, Properties
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.logic.memory.pieces cimport PIECE_BYTES, pieces_for
from cython_ext.native cimport store32
from cython_ext.pages.layout cimport KIND_SHARED, KIND_VMM


cdef public void vgpu_exported(uint64_t handle) noexcept nogil:
    """A handle of the driver's, as it is in ``State.handles``."""
    cdef Block* block
    lock_acquire(&state().memory_lock)
    block = alloc_find(&state().handles, handle)
    if block != NULL and block.kind == KIND_VMM:
        block.kind = KIND_SHARED
        vgpu_share(&state().gates[block.flags], KIND_VMM, block.bytes)
    lock_release(&state().memory_lock)


cdef void imports(Gate* gate, uint64_t imported_bytes) noexcept nogil:
    gate.imported_bytes = imported_bytes
    store32(&gate.slot.imported_pieces, <uint32_t>(pieces_for(imported_bytes) / PIECE_BYTES))


cdef public void vgpu_imported_mapped(Block* block, uint64_t end) noexcept nogil:
    """An imported handle reaches to ``end`` at least. The caller holds memory_lock."""
    cdef Gate* gate = &state().gates[block.flags]
    if block.kind == KIND_IMPORTED and block.bytes < end:
        imports(gate, gate.imported_bytes + end - block.bytes)
        block.bytes = end


cdef public void vgpu_handle_gone(const Block* block) noexcept nogil:
    """Its last handle and mapping: what it was charged with goes. The caller holds memory_lock."""
    cdef Gate* gate = &state().gates[block.flags]
    if block.kind == KIND_IMPORTED:
        imports(gate, gate.imported_bytes - min(gate.imported_bytes, block.bytes))
    else:
        vgpu_release(gate, block.kind, block.bytes)


cdef Gate* gate_of(uint64_t handle) noexcept nogil:
    """Of the device on which the memory is; NULL: it is on none of them."""
    cdef Properties found
    cdef uint32_t i
    if real_cuMemGetAllocationPropertiesFromHandle(&found, handle) != CUDA_SUCCESS:
        return NULL
    for i in range(state().gate_count if found.location_type == LOCATION_DEVICE else 0):
        if state().gates[i].device == found.location_id:
            return &state().gates[i]
    return NULL


cdef public int cuMemImportFromShareableHandle(unsigned long long* handle, void* shareable, int type) noexcept nogil:
    cdef Block block
    cdef Block* known
    cdef Gate* gate = NULL
    cdef int result
    if not attached():
        return real_cuMemImportFromShareableHandle(handle, shareable, type)
    lock_acquire(&state().memory_lock)       # held across: another thread may release the handle at once
    result = real_cuMemImportFromShareableHandle(handle, shareable, type)
    if result == CUDA_SUCCESS:
        gate = gate_of(handle[0])
    if gate != NULL:
        known = alloc_find(&state().handles, handle[0])
        if known != NULL:
            known.aux += 1
        else:
            block.address = handle[0]
            block.bytes = 0
            block.kind = KIND_IMPORTED
            block.flags = gate - &state().gates[0]
            block.aux = 1
            alloc_insert(&state().handles, &block)
    lock_release(&state().memory_lock)
    return result
