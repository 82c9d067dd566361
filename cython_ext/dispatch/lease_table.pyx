"""What the dispatcher needs around its lease table: the memory of a table, a lease from Python, an event for Python."""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from cython_ext.dispatch.lease_events cimport RING, LeaseEvent
from cython_ext.dispatch.vgpu_queue cimport PREDECESSORS, PublishedLease
from cython_ext.pages.layout cimport FOREVER_NS, LEASE_OPEN, MAX_VGPUS

from cython_ext.readings import Event, EventKind

cdef tuple KINDS = (None, *EventKind)


cdef int64_t moment(object value, str what) except? -1:
    if not 0 <= value < INT64_MAX:
        raise ValueError(f"{what} must lie within 0 … 2⁶³ − 2 ns on CLOCK_MONOTONIC, not {value}")
    return value


cdef uint32_t lease_epoch(object value) except 0:
    if not 0 < value < 2**32:
        raise ValueError(f"an epoch lies within 1 … 2³² − 1, not {value}")
    return value


cdef int read_turn(
    PublishedLease* published, object epoch, object start_ns, object end_ns, object after, object go_by_ns, bint early,
    bint on_want, bint alone, object window_ns,
) except -1:
    """Read a lease from Python objects. Raises ``ValueError`` for values that no lease has."""
    memset(published, 0, sizeof(PublishedLease))
    published.lease.epoch = lease_epoch(epoch)
    published.lease.start_ns = moment(start_ns, "start_ns")
    published.lease.go_by_ns = moment(go_by_ns, "go_by_ns")
    published.window_ns = moment(window_ns, "window_ns")
    published.early = early
    published.on_want = on_want
    published.alone = alone
    if alone and not (early and on_want):
        raise ValueError(f"lease {epoch}: only an early, standby lease can be one for a free GPU (alone)")
    if end_ns is None:
        published.lease.flags = LEASE_OPEN
        published.lease.end_ns = FOREVER_NS
    else:
        published.lease.end_ns = moment(end_ns, "end_ns")
    for key, predecessor in after:
        if published.waits == PREDECESSORS:
            raise ValueError(f"lease {epoch} waits for more than {PREDECESSORS} others")
        if not 0 <= key < MAX_VGPUS:
            raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {MAX_VGPUS - 1}")
        published.after[published.waits].key = key
        published.after[published.waits].epoch = lease_epoch(predecessor)
        published.waits += 1
    return 0


cdef object event_reading(const LeaseEvent* event):
    return Event(
        KINDS[event.kind], event.key, event.epoch, event.at_ns, None if event.end_ns == FOREVER_NS else event.end_ns,
        event.idle_ns, event.wants, event.longest_kernel_ns, event.refill_ns, event.predicted_end_ns,
        event.taken_ns, event.used_ns,
    )


cdef LeaseTable* table_new() except NULL:
    cdef LeaseTable* table = <LeaseTable*>calloc(1, sizeof(LeaseTable))
    if table != NULL:
        table.ring.events = <LeaseEvent*>calloc(RING, sizeof(LeaseEvent))
    if table == NULL or table.ring.events == NULL:
        free(table)
        raise MemoryError
    return table


cdef void table_free(LeaseTable* table) noexcept:
    if table != NULL:
        free(table.ring.events)
        free(table)
