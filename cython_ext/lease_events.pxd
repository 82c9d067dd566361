"""What the scheduler hears of a table: the ring of events between two of its visits, and when it is woken for them.

Leases that begin and end are its books and live on: a program that changes its mind 2,000 times a second while the
scheduler is held up must not push them out. So wants and readings, which can be asked for again, fill half of the ring
at most. Nobody is woken for a reading, and for GO at the tail of another lease a little later (``ring_went``).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.vgpu_queue cimport VgpuQueue, PublishedLease, published_idle_ns, published_used_ns
from cython_ext.layout cimport FOREVER_NS

cdef enum:
    EVENT_WANTS = 1
    EVENT_IDLE = 2
    EVENT_WENT = 3
    EVENT_DRAINED = 4
    EVENT_OBSERVED = 5

    RING = 4096              # events between two visits of the scheduler ...
    LEVELS = RING / 2        # ... of which wants and readings leave the others the rest
    HUSH_NS = 5_000_000      # GO at the tail of another lease may be told of so late


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
    """What is read of a lease in force. Until somebody comes, a newer reading is better, or another that will follow.
    """
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
    """``at_tail``: of another lease. That GO is told of with the other's drain, which follows in a moment; if not,
    while half of the lease is left to plan what comes after it. Any other is told of now."""
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
    """The vGPU is gone: its events are nobody's."""
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
