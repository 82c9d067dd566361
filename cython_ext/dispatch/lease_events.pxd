"""The ring of events that a lease table keeps for the scheduler between two of its visits, and when that is woken.

The scheduler charges by the begin and end of leases, so none of these may be lost. A program may want and not want
2,000 times a second while the scheduler is late. So wants and readings, which the scheduler can read again, fill half
of the ring at most. A reading does not wake the scheduler. GO at the tail of another lease wakes it a little later
(``ring_went``).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.dispatch.vgpu_queue cimport VgpuQueue, PublishedLease, published_idle_ns, published_used_ns
from cython_ext.pages.layout cimport FOREVER_NS

cdef enum:
    EVENT_WANTS = 1
    EVENT_IDLE = 2
    EVENT_WENT = 3
    EVENT_DRAINED = 4
    EVENT_OBSERVED = 5

    RING = 4096              # events between two visits of the scheduler ...
    LEVELS = RING / 2        # ... of which wants and readings leave the others the rest
    HUSH_NS = 5_000_000      # GO at the tail of another lease is reported so late at most


cdef struct LeaseEvent:
    uint32_t kind
    uint32_t key
    uint32_t epoch
    bint wants
    int64_t at_ns
    int64_t end_ns
    int64_t taken_ns         # before GO it had work on the GPU for so long
    int64_t idle_ns
    int64_t longest_kernel_ns
    int64_t refill_ns
    int64_t predicted_end_ns
    int64_t used_ns          # GPU time under the lease


cdef struct EventRing:
    uint32_t count
    bint pressing            # an event that the scheduler may have to act upon now
    int64_t presses_ns       # from when on the others are such; 0: they are only readings
    uint64_t lost            # since the scheduler's last visit
    uint64_t lost_total
    LeaseEvent* events       # RING of them
    uint64_t total


cdef inline LeaseEvent* ring_emit(
    EventRing* ring, uint32_t kind, uint32_t key, uint32_t epoch, int64_t at_ns
) noexcept nogil:
    """A cleared event at the end; if there is no room for it, it is counted as lost and a spare one absorbs it."""
    cdef LeaseEvent* event = &ring.events[ring.count]
    cdef bint of_lease = kind == EVENT_WENT or kind == EVENT_DRAINED
    memset(event, 0, sizeof(LeaseEvent))
    event.kind = kind
    event.key = key
    event.epoch = epoch
    event.at_ns = at_ns
    ring.total += 1
    ring.pressing = ring.pressing or (kind != EVENT_OBSERVED and kind != EVENT_WENT) or ring.count >= LEVELS / 2
    if ring.count < (RING - 1 if of_lease else LEVELS):
        ring.count += 1
    else:
        ring.lost += 1
        ring.lost_total += 1
    return event


cdef inline void queue_reading(
    const VgpuQueue* queue, const PublishedLease* published, LeaseEvent* event
) noexcept nogil:
    """Of a lease in force, into an event that has its moment."""
    event.idle_ns = published_idle_ns(queue, published, event.at_ns)
    event.used_ns = published_used_ns(queue, published, event.at_ns)
    event.wants = queue.want
    event.longest_kernel_ns = queue.report.longest_kernel_ns
    event.refill_ns = queue.report.refill_ns
    event.predicted_end_ns = queue.report.predicted_end_ns


cdef inline void ring_observe(
    EventRing* ring, uint32_t key, const VgpuQueue* queue, const PublishedLease* published, int64_t now_ns
) noexcept nogil:
    """What is read of a lease in force. A newer reading replaces one that the scheduler has not taken yet."""
    cdef LeaseEvent* event = NULL
    if ring.count > 0:
        event = &ring.events[ring.count - 1]
    if event == NULL or event.kind != EVENT_OBSERVED or event.key != key or event.epoch != published.lease.epoch:
        if ring.count >= LEVELS:
            return
        event = ring_emit(ring, EVENT_OBSERVED, key, published.lease.epoch, now_ns)
    event.at_ns = now_ns
    queue_reading(queue, published, event)


cdef inline void ring_went(EventRing* ring, const PublishedLease* published, bint at_tail) noexcept nogil:
    """``at_tail``: of another lease. The other's drain follows in a moment, and reports that GO as well. Without it the
    scheduler is woken while half of the lease is left. It is woken at once for any other GO."""
    cdef int64_t by_ns = published.go_ns + min(<int64_t>HUSH_NS, (published.lease.end_ns - published.go_ns) / 2)
    if not at_tail:
        ring.pressing = 1
    elif ring.presses_ns == 0 or by_ns < ring.presses_ns:
        ring.presses_ns = by_ns


cdef inline void ring_step(EventRing* ring, int64_t now_ns) noexcept nogil:
    if 0 < ring.presses_ns <= now_ns:
        ring.pressing = 1


cdef inline int64_t ring_due_ns(const EventRing* ring) noexcept nogil:
    """When the scheduler is to be woken for what is there; FOREVER_NS if it need not be, or is already."""
    return ring.presses_ns if ring.presses_ns > 0 and not ring.pressing else FOREVER_NS


cdef inline void ring_forget(EventRing* ring, uint32_t key) noexcept nogil:
    """The vGPU is gone, and its events are dropped."""
    cdef uint32_t i, kept = 0
    for i in range(ring.count):
        if ring.events[i].key != key:
            ring.events[kept] = ring.events[i]
            kept += 1
    ring.count = kept


cdef inline void ring_visited(EventRing* ring) noexcept nogil:
    """The scheduler has what was there."""
    ring.count = 0
    ring.pressing = 0
    ring.presses_ns = 0
    ring.lost = 0
