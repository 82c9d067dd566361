"""Memory of several contexts of a simulated GPU: exported by one process, imported by others.

It counts once. When the context that is charged with it goes, another holder is charged. The caller holds the lock.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.sim.state cimport SIM_CONTEXTS, SIM_SHARES, SimContext, SimGpu, SimShare


cdef inline SimShare* sim_find_share(SimGpu* gpu, uint64_t id) noexcept nogil:
    """NULL: no process holds it any more. ``id`` 0: a free place, or NULL."""
    cdef uint32_t i
    for i in range(SIM_SHARES):
        if gpu.shares[i].id == id:
            return &gpu.shares[i]
    return NULL


cdef inline bint sim_holds_share(const SimShare* share, uint32_t context) noexcept nogil:
    return share.holders[context % SIM_CONTEXTS / 64] >> (context % 64) & 1


cdef inline void sim_join_share(SimShare* share, uint32_t context) noexcept nogil:
    share.holders[context % SIM_CONTEXTS / 64] |= <uint64_t>1 << (context % 64)


cdef inline bint sim_open_share(SimGpu* gpu, uint64_t id, uint64_t bytes, uint32_t context) noexcept nogil:
    """``context`` is charged with the bytes already. 0: there are too many shares."""
    cdef SimShare* share = sim_find_share(gpu, 0)
    if share == NULL:
        return 0
    share.bytes = bytes
    share.charged = context + 1
    share.holders[0] = share.holders[1] = 0
    sim_join_share(share, context)
    share.id = id
    return 1


cdef inline void sim_leave_share(SimGpu* gpu, SimShare* share, uint32_t context) noexcept nogil:
    cdef SimContext* before = &gpu.contexts[context % SIM_CONTEXTS]
    cdef uint32_t heir
    share.holders[context % SIM_CONTEXTS / 64] &= ~(<uint64_t>1 << (context % 64))
    if share.charged != context + 1:
        return
    before.memory_bytes -= min(before.memory_bytes, share.bytes)
    share.charged = 0
    for heir in range(SIM_CONTEXTS):
        if sim_holds_share(share, heir):
            gpu.contexts[heir].memory_bytes += share.bytes
            share.charged = heir + 1
            return
    share.id = 0


cdef inline void sim_leave_shares(SimGpu* gpu, uint32_t context) noexcept nogil:
    """The context goes."""
    cdef uint32_t i
    for i in range(SIM_SHARES):
        if gpu.shares[i].id != 0 and sim_holds_share(&gpu.shares[i], context):
            sim_leave_share(gpu, &gpu.shares[i], context)
