"""The ring in which a process records what it observes of the GPU while a client traces: one writer, late readers.

Theory of operation
-------------------
Records have numbers from 1. Number n lies at place (n − 1) % TRACE_RING. Its ``sequence`` has the low 32 bits of the
number, and is 0 while the record is being written. ``Slot.traced`` is the number of the newest. The writer waits for no
reader. A late reader finds other numbers at a place, and counts the records that it missed. It does the same with a
record whose writer was killed in the middle. A reader changes nothing, so there may be several.

The busy intervals are those of the backlog (window.pxd): busy from a submission into an empty queue to the completion
that was observed to empty it. Their sum is the growth of ``Slot.busy_ns``. A long interval is recorded in parts, each
up to where it is known.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from cython_ext.pages.layout cimport TRACE_RING, TraceRecord
from cython_ext.logic.gate.window cimport Backlog, newest_submission_ns
from cython_ext.native cimport fence, load32, load64, store32, store64

cdef enum:
    PART_NS = 2_000_000      # of an interval that goes on
    KEY_BITS = 24            # of a kernel's hash: enough to distinguish a program's kernels, and no address

cdef extern from *:
    """
    #define TRACE_GRAPH (1ULL << 63)     /* TRACE_LAUNCH's value: a graph; below it the length, below that the key */
    """
    const uint64_t TRACE_GRAPH


cdef inline void trace_put(
    TraceRecord* ring, uint64_t* count, uint32_t kind, int64_t begin_ns, int64_t end_ns, uint64_t value
) noexcept nogil:
    """``count``: ``Slot.traced``. The caller is the only writer."""
    cdef uint64_t number = load64(count) + 1
    cdef TraceRecord* record = &ring[(number - 1) % TRACE_RING]
    store32(&record.sequence, 0)
    fence()
    record.kind = kind
    record.begin_ns = begin_ns
    record.end_ns = end_ns
    record.value = value
    store32(&record.sequence, <uint32_t>number)
    store64(count, number)


cdef inline bint trace_get(const TraceRecord* ring, uint64_t number, TraceRecord* found) noexcept nogil:
    """Copy record ``number``; 0 if it was overwritten, or never was whole."""
    cdef const TraceRecord* record = &ring[(number - 1) % TRACE_RING]
    if load32(&record.sequence) != <uint32_t>number:
        return 0
    found[0] = record[0]
    fence()
    return load32(&record.sequence) == <uint32_t>number


cdef inline bint trace_closed(
    const Backlog* backlog, int64_t since_ns, int64_t* recorded_ns, int64_t* begin_ns, int64_t* end_ns
) noexcept nogil:
    """The queue was observed to be empty: the part of the busy interval since ``since_ns`` that is not recorded yet."""
    begin_ns[0] = max(since_ns, recorded_ns[0])
    end_ns[0] = recorded_ns[0] = backlog.drained_ns
    return end_ns[0] > begin_ns[0]


cdef inline bint trace_part(
    const Backlog* backlog, int64_t* recorded_ns, int64_t* begin_ns, int64_t* end_ns
) noexcept nogil:
    """Whether a part of the present busy interval is to be recorded, and which: up to where it is known."""
    if not backlog.busy:
        return 0
    begin_ns[0] = max(backlog.since_ns, recorded_ns[0])
    end_ns[0] = max(backlog.seen_busy_ns, newest_submission_ns(backlog))
    if end_ns[0] - begin_ns[0] < PART_NS:
        return 0
    recorded_ns[0] = end_ns[0]
    return 1


cdef inline uint64_t trace_launch_value(int64_t lasted_ns, uint64_t key_hash, bint graph) noexcept nogil:
    """Its measured length in ns, below 2³⁸ (4 minutes), above KEY_BITS of its key."""
    cdef uint64_t length = <uint64_t>min(max(lasted_ns, 0), ((<int64_t>1) << 38) - 1)
    return (TRACE_GRAPH if graph else 0) | length << KEY_BITS | (key_hash & ((1 << KEY_BITS) - 1))


cdef inline uint64_t trace_drain_value(uint32_t epoch, int64_t window_ns) noexcept nogil:
    """The lease's epoch above the window after it, in µs."""
    return (<uint64_t>epoch << 32) | <uint32_t>(window_ns / 1000)
