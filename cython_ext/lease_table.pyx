"""The table from Python: commands in, events out, and the decisions on a clock of the caller's (``PyLeaseTable``)."""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from cython_ext.lease_events cimport RING, LeaseEvent, ring_visited
from cython_ext.vgpu_queue cimport PREDECESSORS, MOST_LEASES, VgpuQueue, GrantView, Report, PublishedLease, queue_view
from cython_ext.grantspage cimport lease_reading
from cython_ext.layout cimport FOREVER_NS, LEASE_OPEN, MAX_VGPUS

from cython_ext.readings import Event, EventKind, PlanReading

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
    """A ``Lease`` as Python says it. Raises ``ValueError`` on what no lease can be."""
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


cdef class PyLeaseTable:
    """The dispatcher's decisions, clock and pages being the caller's: what the property tests drive.

    Arguments and results are those of ``Dispatcher``; times are whatever the caller says they are.
    """

    cdef LeaseTable* table

    def __cinit__(self):
        self.table = table_new()

    def __dealloc__(self):
        table_free(self.table)

    def add(self, uint32_t key, int64_t now_ns):
        cdef Report report
        memset(&report, 0, sizeof(report))
        table_add(self.table, key, &report, now_ns)

    def remove(self, uint32_t key, int64_t now_ns):
        table_remove(self.table, key, now_ns)
        table_step(self.table, now_ns)

    def publish(self, uint32_t key, epoch, start_ns, end_ns, after, go_by_ns, early, on_want, int64_t now_ns,
                bint alone=0):
        """True: accepted; False: the epoch is over. Raises ``ValueError`` (empty) and ``OverflowError`` (too many)."""
        cdef PublishedLease published
        read_turn(&published, epoch, start_ns, end_ns, after, go_by_ns, early, on_want, alone, 1_000_000)
        table_step(self.table, now_ns)
        result = table_publish(self.table, key, &published, now_ns)
        if result == TABLE_EMPTY:
            raise ValueError(f"lease {epoch} ends before it starts")
        if result == TABLE_FULL:
            raise OverflowError(f"vGPU {key} has {MOST_LEASES} live leases")
        table_step(self.table, now_ns)
        return result == TABLE_OK

    def withdraw(self, uint32_t key, epoch, int64_t now_ns):
        table_step(self.table, now_ns)
        result = table_withdraw(self.table, key, lease_epoch(epoch), now_ns)
        table_step(self.table, now_ns)
        return bool(result)

    def report(self, uint32_t key, int64_t now_ns, *, bint want, uint32_t returned_epoch=0, uint32_t drained_epoch=0,
               uint32_t tail_epoch=0, uint32_t split_drain_epoch=0, int64_t drained_ns=0, busy_ns=0, counted_ns=None,
               uint32_t submitted_epoch=0, int64_t submitted_ns=0):
        """``counted_ns``: up to when ``busy_ns`` is known; None is now."""
        cdef Report report
        memset(&report, 0, sizeof(report))
        report.want = want
        report.returned_epoch = returned_epoch
        report.drained_epoch = drained_epoch
        report.tail_epoch = tail_epoch
        report.split_drain_epoch = split_drain_epoch
        report.drained_ns = drained_ns
        report.busy_ns = busy_ns
        report.counted_ns = now_ns if counted_ns is None else counted_ns
        report.submitted_epoch = submitted_epoch
        report.submitted_ns = submitted_ns
        table_step(self.table, now_ns)
        table_report(self.table, key, &report, now_ns)
        table_step(self.table, now_ns)

    def step(self, int64_t now_ns):
        table_step(self.table, now_ns)

    def deadline_ns(self):
        """When to step next; None: only an event can matter."""
        cdef bint sharp
        deadline = table_deadline(self.table, &sharp)
        return None if deadline == FOREVER_NS else deadline

    def events(self):
        """What happened since the last call, oldest first; and how many events did not fit."""
        found = [event_reading(&self.table.ring.events[i]) for i in range(self.table.ring.count)]
        lost = self.table.ring.lost
        ring_visited(&self.table.ring)
        return found, lost

    @property
    def pressing(self):
        """Whether the scheduler would be woken for the events."""
        return bool(self.table.ring.pressing)

    def outstanding(self, uint32_t key):
        """Live leases of a vGPU, oldest first: (epoch, whether GO was given)."""
        cdef VgpuQueue* queue = &self.table.queues[key]
        return [(queue.leases[i].lease.epoch, bool(queue.leases[i].went)) for i in range(queue.live)]

    def plan(self, uint32_t key):
        """What the vGPU's page would show."""
        cdef GrantView view
        queue_view(&self.table.queues[key], self.table.free, &view)
        return PlanReading(
            lease_reading(&view.plan.current), lease_reading(&view.plan.next), view.open_epoch, view.go_epoch,
            view.free_epoch, 0,
        )
