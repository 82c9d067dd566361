"""Fills, copies and prefetches as the gate sees them: work whose length follows from its size.

They have keys among the learned durations as launches have, by kind and size class. Small ones need no lease while
they are rare. Reason: a memset of 4 kB takes 2 us, and the hand-over for it would cost the other vGPUs 500. A program
that does nothing else would fill the GPU with them, back to back. So they pass without a lease up to about a hundredth
of the time, and are gated like all others beyond that.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.logic.meter.durations cimport LaunchKey

cdef enum:
    SMALL_BYTES = 1 << 20
    TRIFLE_PAYS_NS = 400_000     # a hundred times what a small one takes, set-up included
    TRIFLES_SAVED_NS = 10_000_000


cdef struct SmallTransferBudget:
    int64_t paid_ns              # the transfers that passed are a hundredth of the time up to here


cdef inline bint trifle_passes(SmallTransferBudget* trifles, int64_t now_ns) noexcept nogil:
    """Whether one more small transfer may pass at ``now_ns`` without a lease: 25 at once, then one every 0.4 ms."""
    cdef int64_t paid_ns = max(trifles.paid_ns, now_ns - <int64_t>TRIFLES_SAVED_NS) + TRIFLE_PAYS_NS
    if paid_ns > now_ns:
        return 0
    trifles.paid_ns = paid_ns
    return 1


cdef inline uint32_t size_class(uint64_t size_bytes) noexcept nogil:
    """Four classes to an octave: sizes of one class differ by less than a quarter, and so do their lengths."""
    cdef uint32_t octaves = 0
    while size_bytes >= 8:
        size_bytes >>= 1
        octaves += 1
    return 4 * octaves + <uint32_t>size_bytes


cdef inline LaunchKey transfer_key(uint32_t kind, uint64_t size_bytes, uint64_t row_bytes) noexcept nogil:
    """``kind``: WORK_*. ``row_bytes``: of a rectangle, whose narrow rows are slow; 0: all in one piece."""
    cdef LaunchKey key
    key.handle = kind
    key.grid_x = kind
    key.grid_y = size_class(size_bytes)
    key.grid_z = size_class(row_bytes)
    key.block_x = key.block_y = key.block_z = 0
    key.after = key.hash = 0
    return key
