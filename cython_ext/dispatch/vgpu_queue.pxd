"""The parts of a lease table: queues with their leases, reports that come in, views that go out, and sets of keys. The
functions here read one queue alone. The functions that move leases, and the theory: lease_table.pxd.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.pages.layout cimport FOREVER_NS, LEASE_ON_GO, LEASE_OPEN, MAX_VGPUS, Lease, Plan, epoch_reached
from cython_ext.logic.gate.handover cimport CLOSE_NS, EARLY_NS

cdef enum:
    MOST_LEASES = 8                # live leases of one vGPU: one in force, one next, the others have not drained
    PREDECESSORS = 64        # of one lease: an MPS server has 48 processes, each of a vGPU of its own perhaps
    QUIET_NS = 200_000


cdef struct Predecessor:
    uint32_t key
    uint32_t epoch


cdef struct PublishedLease:
    Lease lease              # as the page shows it
    int64_t window_ns
    bint early
    bint on_want             # no GO before the vGPU wants (a standby lease)
    bint alone               # nor while a lease is in force, or one that is not a standby lease waits
    bint was_standby         # alone, or was before it was granted: a process may have started under it early
    bint went
    bint unacknowledged             # went alone, and was not published since
    bint split_drain            # ended for a process that had drained it; no new end is taken
    int64_t ready_ns         # publication, or the last predecessor's drain
    int64_t go_ns
    uint64_t busy_at_go_ns
    uint32_t waits
    Predecessor[64] after


cdef struct Report:
    bint want
    uint32_t returned_epoch
    uint32_t drained_epoch
    uint32_t tail_epoch
    uint32_t split_drain_epoch
    int64_t drained_ns
    uint64_t busy_ns
    int64_t counted_ns       # busy_ns is known up to here
    int64_t longest_kernel_ns
    int64_t refill_ns
    int64_t predicted_end_ns
    uint32_t submitted_epoch
    int64_t submitted_ns


cdef struct VgpuQueue:
    bint present
    bint want
    int64_t want_changed_ns
    uint32_t newest          # epoch last published here
    uint32_t live
    PublishedLease[8] leases
    Report report            # the last one
    int64_t observed_ns


cdef struct GrantView:
    # what a vGPU's grants page must show
    Plan plan
    uint32_t go_epoch        # of the current lease, once it went
    uint32_t open_epoch
    uint32_t free_epoch
    int64_t window_ns        # 0: no lease, leave the page's value


# --- sets of keys

cdef inline bint has(const uint64_t* bits, uint32_t key) noexcept nogil:
    return (bits[key >> 6] >> (key & 63)) & 1


cdef inline void put(uint64_t* bits, uint32_t key, bint value) noexcept nogil:
    cdef uint64_t bit = (<uint64_t>1) << (key & 63)
    if value:
        bits[key >> 6] |= bit
    else:
        bits[key >> 6] &= ~bit


cdef inline int next_key(const uint64_t* bits, int key) noexcept nogil:
    """The first set bit at or after ``key``; −1 if there is none."""
    while key < MAX_VGPUS:
        if bits[key >> 6] >> (key & 63) == 0:
            key = (key | 63) + 1
        elif (bits[key >> 6] >> (key & 63)) & 1:
            return key
        else:
            key += 1
    return -1


cdef inline bint any_but(const uint64_t* bits, uint32_t key) noexcept nogil:
    """Whether the set has a key other than ``key``."""
    cdef int first = next_key(bits, 0)
    return first >= 0 and (<uint32_t>first != key or next_key(bits, first + 1) >= 0)


# --- one queue

cdef inline int64_t published_opens_ns(const PublishedLease* published) noexcept nogil:
    """From when on the lease may begin. Behind others that have drained it may begin a little before its start: those
    were closed, and the rest of their time is free (logic/gate/handover.pxd)."""
    if published.early:
        return 0
    if published.lease.flags & LEASE_ON_GO and not published.on_want:
        return published.lease.start_ns - EARLY_NS
    return published.lease.start_ns


cdef inline void published_begins(PublishedLease* published) noexcept nogil:
    """The lease begins at ``go_ns``. It keeps its length. Where it has a little of its predecessor's time it keeps its
    end: in rounds all leases end together."""
    cdef int64_t later_ns = published.go_ns - published.lease.start_ns
    published.lease.start_ns = published.go_ns
    if not published.lease.flags & LEASE_OPEN and (later_ns > 0 or published.early or published.on_want):
        published.lease.end_ns += later_ns


cdef inline int64_t published_due_ns(const VgpuQueue* queue, uint32_t index) noexcept nogil:
    """From when on the queue's first waiting lease may get GO in the present state; FOREVER_NS if that takes an event.
    """
    cdef const PublishedLease* published = &queue.leases[index]
    cdef int64_t due = published_opens_ns(published)
    if published.on_want and not queue.want:
        return FOREVER_NS
    if index > 0:
        due = max(due, queue.leases[index - 1].lease.end_ns)
    if published.waits > 0:
        due = FOREVER_NS
    return min(due, published.lease.go_by_ns)


cdef inline uint32_t first_waiting(const VgpuQueue* queue) noexcept nogil:
    cdef uint32_t i = 0
    while i < queue.live and queue.leases[i].went:
        i += 1
    return i


cdef inline int64_t published_idle_ns(
    const VgpuQueue* queue, const PublishedLease* published, int64_t at_ns
) noexcept nogil:
    """Held time up to ``at_ns`` in which nothing ran, by a tenant's report, within 0 … held. Time that is not known yet
    counts as busy."""
    cdef int64_t known = min(at_ns, queue.report.counted_ns) - published.go_ns
    cdef uint64_t busy = queue.report.busy_ns - published.busy_at_go_ns
    if known <= 0 or queue.report.busy_ns < published.busy_at_go_ns or busy >= <uint64_t>known:
        return 0
    return known - <int64_t>busy


cdef inline int64_t published_used_ns(
    const VgpuQueue* queue, const PublishedLease* published, int64_t at_ns
) noexcept nogil:
    """GPU time used under the lease up to ``at_ns``, as far as is known, by a tenant's report, within 0 … held."""
    if queue.report.busy_ns < published.busy_at_go_ns:
        return 0
    return <int64_t>min(
        queue.report.busy_ns - published.busy_at_go_ns, <uint64_t>max(at_ns - published.go_ns, <int64_t>0)
    )


cdef inline int64_t queue_quiet_ns(const VgpuQueue* queue) noexcept nogil:
    """When the queue's oldest lease that went is over because its vGPU has not wanted it for QUIET_NS."""
    return max(queue.want_changed_ns, queue.leases[0].go_ns) + QUIET_NS


cdef inline bint published_at_tail(
    const VgpuQueue* queue, const PublishedLease* published, int64_t now_ns
) noexcept nogil:
    """Whether the lease takes no more work, by its relay's report, and will soon have drained."""
    return (
        published.went and queue.report.tail_epoch == published.lease.epoch
        and published.lease.end_ns - now_ns <= CLOSE_NS
    )


cdef inline bint any_at_tail(const uint64_t* holding, const VgpuQueue* queues) noexcept nogil:
    """Whether the oldest lease of one of those queues takes no more work, by its relay's report."""
    cdef int key = next_key(holding, 0)
    while key >= 0 and not epoch_reached(queues[key].report.tail_epoch, queues[key].leases[0].lease.epoch):
        key = next_key(holding, key + 1)
    return key >= 0


cdef inline void queue_view(const VgpuQueue* queue, bint free, GrantView* view) noexcept nogil:
    """The view for the vGPU's page: the newest lease that went, else the oldest that waits; and the one after it.
    ``free``: the GPU is free."""
    cdef uint32_t current = first_waiting(queue)
    cdef const PublishedLease* published
    memset(view, 0, sizeof(GrantView))
    if queue.live == 0:
        return
    current = current - 1 if current > 0 else 0
    published = &queue.leases[current]
    view.plan.current = published.lease
    view.window_ns = published.window_ns
    if published.went:
        view.go_epoch = published.lease.epoch
        if published.lease.flags & LEASE_OPEN:
            view.open_epoch = published.lease.epoch
    elif published.on_want:
        view.plan.current.go_by_ns = FOREVER_NS
        view.free_epoch = queue_free_epoch(queue) if free else 0
    if current + 1 < queue.live:
        view.plan.next = queue.leases[current + 1].lease
        if queue.leases[current + 1].on_want:
            view.plan.next.go_by_ns = FOREVER_NS


cdef inline uint32_t queue_free_epoch(const VgpuQueue* queue) noexcept nogil:
    """The lease under which a process may start early while the GPU is free; 0: none."""
    return queue.leases[0].lease.epoch if queue.live > 0 and queue.leases[0].alone and not queue.leases[0].went else 0
