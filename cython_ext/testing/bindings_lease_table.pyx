"""The lease table of the dispatcher, for property tests: commands go in, events come out."""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from cython_ext.pages.grantspage cimport lease_reading
from cython_ext.pages.layout cimport FOREVER_NS
from cython_ext.dispatch.lease_events cimport ring_visited
from cython_ext.dispatch.lease_table cimport (
    TABLE_EMPTY, TABLE_FULL, TABLE_OK, LeaseTable, event_reading, lease_epoch, read_turn, table_add, table_deadline,
    table_free, table_new, table_publish, table_remove, table_report, table_step, table_withdraw,
)
from cython_ext.dispatch.vgpu_queue cimport MOST_LEASES, GrantView, PublishedLease, Report, VgpuQueue, queue_view

from cython_ext.readings import PlanReading


cdef class PyLeaseTable:
    """A lease table without thread, clock and pages.

    Arguments and results are those of ``Dispatcher``. The caller passes the time to each call.
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
        """``counted_ns``: the time up to which the relay knows ``busy_ns``; None is now."""
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
        """The time of the next step; None: only a report or a command changes anything."""
        cdef bint sharp
        deadline = table_deadline(self.table, &sharp)
        return None if deadline == FOREVER_NS else deadline

    def events(self):
        """The events since the last call, oldest first, and the number of events that did not fit."""
        found = [event_reading(&self.table.ring.events[i]) for i in range(self.table.ring.count)]
        lost = self.table.ring.lost
        ring_visited(&self.table.ring)
        return found, lost

    @property
    def pressing(self):
        """Whether the dispatcher would wake the scheduler for the events."""
        return bool(self.table.ring.pressing)

    def outstanding(self, uint32_t key):
        """The live leases of a vGPU, oldest first: (epoch, whether the table gave GO)."""
        cdef VgpuQueue* queue = &self.table.queues[key]
        return [(queue.leases[i].lease.epoch, bool(queue.leases[i].went)) for i in range(queue.live)]

    def plan(self, uint32_t key):
        """The plan that the dispatcher would write into the vGPU's page."""
        cdef GrantView view
        queue_view(&self.table.queues[key], self.table.free, &view)
        return PlanReading(
            lease_reading(&view.plan.current), lease_reading(&view.plan.next), view.open_epoch, view.go_epoch,
            view.free_epoch, 0,
        )
