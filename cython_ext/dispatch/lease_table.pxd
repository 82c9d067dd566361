"""The dispatcher's decisions, without its thread, pages and clock: which lease gets GO now, and when to step again.

Theory of operation
-------------------
A ``LeaseTable`` has a ``VgpuQueue`` for each vGPU (vgpu_queue.pxd). A queue has up to MOST_LEASES published leases
that are not over yet, oldest first. A published lease waits, then it *went* (GO was given), then it is done and leaves
the queue. Four things move it:

* ``table_publish`` / ``table_withdraw``: the scheduler's commands;
* ``table_report``: what the vGPU's relay reports (wants, returned, drained);
* ``table_step``: time has passed. Each lease that is due gets GO; leases that their vGPU no longer wants end;
* ``table_remove``: the vGPU is gone, which counts as drained.

Every function takes ``now_ns``; none reads a clock or touches a page. The outcome is in three places: ``touched``
(queues whose page must be written anew from ``queue_view``), ``free``, and ``ring`` (events for the scheduler:
lease_events.pxd). A caller that steps at ``table_deadline`` gives every GO on time.

**Due.** A lease is due once its ``start_ns`` has come (any time, with ``early``; a little before, behind predecessors),
its predecessors are done, and its vGPU's own older lease is over. At ``go_by_ns`` it is due in any case. GO at g moves
the end by g − start: a lease keeps its length. A predecessor that is done is removed from the lease. So a step compares
numbers only, and costs the number of waiting leases.

**Standby leases.** A standby lease gets GO when its vGPU wants the GPU. With ``alone``, the GPU must be free, too: no
other vGPU wants or holds it, and no lease waits that the scheduler has granted. The scheduler learns of that GO
afterwards, and may have granted another lease meanwhile. So a standby lease that went is *unacknowledged*, and leases
of other vGPUs wait for it, until the scheduler publishes it again. At their ``go_by_ns`` they go nevertheless.

**Taken leases.** While the GPU is ``free``, a hook does not wait for GO (logic/gate/gate.pxd). Its vGPU is charged from
its first work on, except for what another lease pays for. If no other vGPU wanted the GPU, the lease begins at that
work. If the scheduler had to choose, the lease begins with GO, because it may have got an end meanwhile.

**Split drain.** The scheduler may move a lease's end away when some of its vGPU's processes have drained it already and
others have not. The first ones wait for another lease. The relay reports that, and the lease ends at once, for good.

**Reports.** A report counts when it *changes*: epochs live on a 32-bit circle, and a word from 2³¹ leases ago would
otherwise seem to reach a new lease. Reports are clamped: no drain lies before GO or after now.

**Unwanted leases.** A lease that went, of a vGPU that has wanted nothing for QUIET_NS, is done. So a process that dies
while it waits does not keep the GPU idle for a whole lease, and the end of a lease needs no live process. The pause
leaves time for wants on their way through the relay.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memmove, memset

from cython_ext.dispatch.lease_events cimport (
    EVENT_DRAINED, EVENT_IDLE, EVENT_WANTS, EVENT_WENT, LeaseEvent, EventRing, ring_due_ns, ring_emit, ring_forget,
    ring_observe, ring_step, ring_went,
)
from cython_ext.dispatch.vgpu_queue cimport (
    MOST_LEASES, PublishedLease, Report, VgpuQueue, any_at_tail, any_but, first_waiting, has, next_key, put,
    queue_quiet_ns, published_at_tail, published_begins, published_due_ns, published_idle_ns, published_opens_ns,
    published_used_ns,
)
from cython_ext.pages.layout cimport FOREVER_NS, LEASE_ON_GO, LEASE_OPEN, epoch_reached
from cython_ext.logic.gate.gate cimport TAKE_MOST_NS
from cython_ext.logic.gate.handover cimport awake_after_ns

cdef enum:
    LATENESS_BINS = 40
    OBSERVE_NS = 10_000_000  # between two readings of a holder without a request
    RECENT = 1 << 30         # epochs closer than this compare safely

    TABLE_OK = 0
    TABLE_OVER = 1           # the epoch is not live any more
    TABLE_FULL = 2           # MOST_LEASES leases of the vGPU are live
    TABLE_EMPTY = 3          # ends before it starts


cdef struct LeaseTable:
    uint64_t[4] waiting      # queues with a lease that has not gone
    uint64_t[4] holding      # queues with a lease that has
    uint64_t[4] wanting
    uint64_t[4] unacknowledged      # queues with a lease that is
    uint64_t[4] touched
    bint free                # no vGPU wants a lease, none is in force, and only standby leases wait
    int64_t over_ns          # when a lease was last over
    uint32_t newest          # epoch last published on the GPU
    EventRing ring           # for the scheduler
    uint64_t gos
    uint64_t forced
    uint64_t[40] lateness
    VgpuQueue[256] queues


cdef inline int64_t clamp_ns(int64_t value, int64_t low, int64_t high) noexcept nogil:
    return low if value < low else high if value > high else value


cdef inline void table_refile(LeaseTable* table, uint32_t key) noexcept nogil:
    """The queue's leases changed: file it anew, and have its page written."""
    cdef VgpuQueue* queue = &table.queues[key]
    put(table.waiting, key, queue.live > 0 and not queue.leases[queue.live - 1].went)
    put(table.holding, key, queue.live > 0 and queue.leases[0].went)
    put(table.touched, key, 1)


cdef inline PublishedLease* table_find(LeaseTable* table, uint32_t key, uint32_t epoch) noexcept nogil:
    cdef VgpuQueue* queue = &table.queues[key]
    cdef uint32_t i
    for i in range(queue.live):
        if queue.leases[i].lease.epoch == epoch:
            return &queue.leases[i]
    return NULL


cdef inline void table_clear_dependency(LeaseTable* table, uint32_t key, uint32_t epoch, int64_t at_ns) noexcept nogil:
    """No other lease need wait for this one any more."""
    cdef PublishedLease* published
    cdef uint32_t i, j
    cdef int other = next_key(table.waiting, 0)
    while other >= 0:
        for i in range(table.queues[other].live):
            published = &table.queues[other].leases[i]
            j = 0
            while j < published.waits:
                if published.after[j].key == key and published.after[j].epoch == epoch:
                    published.waits -= 1
                    published.after[j] = published.after[published.waits]
                    published.ready_ns = max(published.ready_ns, at_ns)
                else:
                    j += 1
        other = next_key(table.waiting, other + 1)


cdef inline void table_drop(LeaseTable* table, uint32_t key, uint32_t index, int64_t at_ns) noexcept nogil:
    cdef VgpuQueue* queue = &table.queues[key]
    cdef uint32_t epoch = queue.leases[index].lease.epoch
    if queue.leases[index].unacknowledged:
        put(table.unacknowledged, key, 0)
    if queue.leases[index].went:
        table.over_ns = max(table.over_ns, at_ns)
    queue.live -= 1
    memmove(&queue.leases[index], &queue.leases[index + 1], (queue.live - index) * sizeof(PublishedLease))
    table_refile(table, key)
    table_clear_dependency(table, key, epoch, at_ns)


cdef inline void table_done(LeaseTable* table, uint32_t key, uint32_t index, int64_t at_ns, bint wants) noexcept nogil:
    cdef VgpuQueue* queue = &table.queues[key]
    cdef PublishedLease* published = &queue.leases[index]
    cdef LeaseEvent* event = ring_emit(&table.ring, EVENT_DRAINED, key, published.lease.epoch, at_ns)
    event.wants = wants
    event.idle_ns = published_idle_ns(queue, published, at_ns)
    event.used_ns = published_used_ns(queue, published, at_ns)
    event.longest_kernel_ns = queue.report.longest_kernel_ns
    event.refill_ns = queue.report.refill_ns
    table_drop(table, key, index, at_ns)


cdef inline void table_go(LeaseTable* table, uint32_t key, uint32_t index, int64_t now_ns) noexcept nogil:
    cdef VgpuQueue* queue = &table.queues[key]
    cdef PublishedLease* published = &queue.leases[index]
    cdef LeaseEvent* event
    cdef int64_t due = max(published.ready_ns, published_opens_ns(published))
    cdef int64_t first_ns
    cdef uint64_t late
    cdef uint32_t i = 0
    if published.on_want:
        due = max(due, queue.want_changed_ns)
    if index > 0:
        due = max(due, min(queue.leases[index - 1].lease.end_ns, published.lease.go_by_ns))
    if published.waits > 0:
        table.forced += 1
        due = published.lease.go_by_ns
        published.waits = 0
    # Without ON_GO the hooks did not wait for the dispatcher: the lease began when it was due.
    published.go_ns = now_ns if published.lease.flags & LEASE_ON_GO else clamp_ns(due, 0, now_ns)
    first_ns = published.go_ns
    # taken before GO
    if (
        published.was_standby and queue.report.submitted_epoch == published.lease.epoch
        and next_key(table.holding, 0) < 0
    ):
        first_ns = clamp_ns(queue.report.submitted_ns, max(table.over_ns, now_ns - TAKE_MOST_NS), now_ns)
    if published.alone:
        published.go_ns = first_ns
    published_begins(published)
    published.went = 1
    if published.alone:
        published.unacknowledged = 1
        put(table.unacknowledged, key, 1)
    published.busy_at_go_ns = queue.report.busy_ns
    table.gos += 1
    late = <uint64_t>max(0, now_ns - due)
    while late and i < LATENESS_BINS - 1:
        late >>= 1
        i += 1
    table.lateness[i] += 1
    event = ring_emit(&table.ring, EVENT_WENT, key, published.lease.epoch, published.go_ns)
    event.end_ns = published.lease.end_ns
    event.taken_ns = max(0, published.go_ns - first_ns)
    ring_went(&table.ring, published, any_at_tail(table.holding, table.queues))
    table_refile(table, key)


cdef inline int64_t table_due_ns(const LeaseTable* table, uint32_t key, uint32_t index) noexcept nogil:
    """From when on the queue's first waiting lease, unless it is an alone one, may get GO, as things stand."""
    cdef const PublishedLease* published = &table.queues[key].leases[index]
    if published.alone:
        return FOREVER_NS
    if not published.on_want and any_but(table.unacknowledged, key):
        return published.lease.go_by_ns
    return published_due_ns(&table.queues[key], index)


cdef inline bint table_rests(const LeaseTable* table) noexcept nogil:
    """No lease is in force, and only standby leases wait."""
    cdef const VgpuQueue* queue
    cdef int key = next_key(table.waiting, 0)
    cdef uint32_t i
    while key >= 0:
        queue = &table.queues[key]
        for i in range(queue.live):
            if not queue.leases[i].on_want:
                return 0
        key = next_key(table.waiting, key + 1)
    return next_key(table.holding, 0) < 0


cdef inline int table_alone(const LeaseTable* table) noexcept nogil:
    """The only vGPU that wants a GPU that rests, if its lease waits; −1: there is none."""
    cdef int alone = next_key(table.wanting, 0)
    if alone < 0 or any_but(table.wanting, alone) or not has(table.waiting, alone) or not table_rests(table):
        return -1
    return alone


cdef inline void table_step(LeaseTable* table, int64_t now_ns) noexcept nogil:
    """Whatever is due at ``now_ns``."""
    cdef bint again = 1
    cdef int key
    cdef uint32_t i
    cdef VgpuQueue* queue
    ring_step(&table.ring, now_ns)
    while again:
        again = 0
        key = next_key(table.waiting, 0)
        while key >= 0:
            queue = &table.queues[key]
            i = first_waiting(queue)
            while i < queue.live and table_due_ns(table, key, i) <= now_ns:
                table_go(table, key, i, now_ns)
                i += 1
            key = next_key(table.waiting, key + 1)
        key = table_alone(table)
        if key >= 0 and table.queues[key].leases[0].alone:
            table_go(table, key, 0, now_ns)
            again = 1
        key = next_key(table.holding, 0)
        while key >= 0:
            queue = &table.queues[key]
            while not queue.want and queue.live > 0 and queue.leases[0].went and queue_quiet_ns(queue) <= now_ns:
                table_done(table, key, 0, now_ns, 0)
                again = 1
            key = next_key(table.holding, key + 1)
    table.free = next_key(table.wanting, 0) < 0 and table_rests(table)


cdef inline int64_t table_deadline(const LeaseTable* table, bint* sharp) noexcept nogil:
    """When to step next, FOREVER_NS if only an event can matter. ``sharp``: a hook waits for that very moment."""
    cdef int64_t deadline = FOREVER_NS, due
    cdef int key = next_key(table.waiting, 0)
    cdef uint32_t i
    sharp[0] = 0
    while key >= 0:
        i = first_waiting(&table.queues[key])
        due = table_due_ns(table, key, i)
        if due < deadline:
            deadline = due
            sharp[0] = (
                table.queues[key].leases[i].waits == 0
                and table.queues[key].leases[i].lease.flags & LEASE_ON_GO != 0
            )
        key = next_key(table.waiting, key + 1)
    key = next_key(table.holding, 0)
    while key >= 0:
        if not table.queues[key].want and queue_quiet_ns(&table.queues[key]) < deadline:
            deadline = queue_quiet_ns(&table.queues[key])
            sharp[0] = 0
        key = next_key(table.holding, key + 1)
    if ring_due_ns(&table.ring) < deadline:
        deadline, sharp[0] = ring_due_ns(&table.ring), 0
    return deadline


cdef inline int64_t table_handover_ns(const LeaseTable* table, int64_t now_ns, int64_t* lasted_ns) noexcept nogil:
    """The nearest end of a lease whose drain another lease waits for, perhaps just past, and how long that lease has
    been in force by then; FOREVER_NS if there is none."""
    cdef int64_t nearest = FOREVER_NS
    cdef const VgpuQueue* queue
    cdef const PublishedLease* published
    cdef uint32_t i, j
    cdef int key = next_key(table.waiting, 0)
    while key >= 0:
        queue = &table.queues[key]
        i = first_waiting(queue)
        if i < queue.live:
            for j in range(queue.leases[i].waits):
                published = table_find(<LeaseTable*>table, queue.leases[i].after[j].key, queue.leases[i].after[j].epoch)
                if published == NULL or not published.went or published.lease.end_ns >= nearest:
                    continue
                if now_ns - published.lease.end_ns < awake_after_ns(published.lease.end_ns - published.go_ns):
                    nearest = published.lease.end_ns
                    lasted_ns[0] = published.lease.end_ns - published.go_ns
        key = next_key(table.waiting, key + 1)
    return nearest


cdef inline int table_publish(
    LeaseTable* table, uint32_t key, const PublishedLease* asked, int64_t now_ns
) noexcept nogil:
    """A new lease, or a new version of a live one. ``asked``: lease, window, early, on_want, alone, waits and
    after.

    Returns TABLE_*. Anything but TABLE_OK: nothing changed. Steps are the caller's.
    """
    cdef VgpuQueue* queue = &table.queues[key]
    cdef PublishedLease* published = table_find(table, key, asked.lease.epoch)
    cdef const PublishedLease* before
    cdef bint was_standby = asked.alone or (published != NULL and published.was_standby)
    cdef uint32_t i
    if published != NULL and published.went:
        if not published.split_drain:
            published.lease.end_ns = asked.lease.end_ns
            published.lease.flags = (published.lease.flags & ~<uint32_t>LEASE_OPEN) | (asked.lease.flags & LEASE_OPEN)
        published.window_ns = asked.window_ns
        if published.unacknowledged:
            published.unacknowledged = 0
            put(table.unacknowledged, key, 0)
        table_refile(table, key)
        return TABLE_OK
    if asked.lease.end_ns <= asked.lease.start_ns:
        return TABLE_EMPTY
    if published == NULL:
        if epoch_reached(queue.newest, asked.lease.epoch) and table.newest - queue.newest < RECENT:
            return TABLE_OVER
        if queue.live == MOST_LEASES:
            return TABLE_FULL
        published = &queue.leases[queue.live]
        queue.live += 1
        queue.newest = asked.lease.epoch
        if table.newest == 0 or epoch_reached(asked.lease.epoch, table.newest):
            table.newest = asked.lease.epoch
    published[0] = asked[0]
    published.was_standby = was_standby
    published.went = published.unacknowledged = published.split_drain = 0
    published.ready_ns = now_ns
    published.lease.go_by_ns = max(asked.lease.go_by_ns, asked.lease.start_ns)
    published.lease.flags &= LEASE_OPEN
    published.lease.flags |= LEASE_ON_GO if published.early or published.on_want else 0
    published.waits = 0
    for i in range(asked.waits):
        before = table_find(table, asked.after[i].key, asked.after[i].epoch)
        if before == NULL:
            continue
        published.lease.flags |= LEASE_ON_GO
        if not published_at_tail(&table.queues[asked.after[i].key], before, now_ns):   # reported only once
            published.after[published.waits] = asked.after[i]
            published.waits += 1
    table_refile(table, key)
    return TABLE_OK


cdef inline int64_t table_allowed_ns(
    LeaseTable* table, uint32_t key, uint32_t epoch, int64_t allowance_ns
) noexcept nogil:
    """``GrantsPage.allowed_ns`` where the vGPU may use ``allowance_ns`` under that lease in all: from its GO on, or
    from now where it has not gone. Below 0: without a limit."""
    cdef const PublishedLease* published = table_find(table, key, epoch)
    cdef uint64_t from_ns = table.queues[key].report.busy_ns
    if allowance_ns < 0:
        return 0
    if published != NULL and published.went:
        from_ns = published.busy_at_go_ns
    return <int64_t>min(max(from_ns, <uint64_t>1), <uint64_t>FOREVER_NS / 2) + min(allowance_ns, FOREVER_NS / 2)


cdef inline void table_end(LeaseTable* table, uint32_t key, PublishedLease* published, int64_t now_ns) noexcept nogil:
    """A lease that went ends now, unless it has."""
    published.lease.end_ns = min(published.lease.end_ns, now_ns)
    published.lease.flags &= ~<uint32_t>LEASE_OPEN
    table_refile(table, key)


cdef inline bint table_withdraw(LeaseTable* table, uint32_t key, uint32_t epoch, int64_t now_ns) noexcept nogil:
    """1: taken back, as if it had never been. 0: it is over, or it went and ends now. Step to ``now_ns`` first."""
    cdef PublishedLease* published = table_find(table, key, epoch)
    if published == NULL:
        return 0
    if published.went:
        table_end(table, key, published, now_ns)
        return 0
    table_drop(table, key, <uint32_t>(published - table.queues[key].leases), now_ns)
    return 1


cdef inline bint table_finish(
    LeaseTable* table, uint32_t key, uint32_t reached, int64_t at_ns, int64_t now_ns, bint wants
) noexcept nogil:
    """Every lease that went and lies at or before epoch ``reached`` is done. Whether there was one."""
    cdef VgpuQueue* queue = &table.queues[key]
    cdef bint any_done = 0
    while queue.live > 0 and queue.leases[0].went and epoch_reached(reached, queue.leases[0].lease.epoch):
        table_done(table, key, 0, clamp_ns(at_ns, queue.leases[0].go_ns, now_ns), wants)
        any_done = 1
    return any_done


cdef inline void table_tail(LeaseTable* table, uint32_t key, uint32_t epoch, int64_t now_ns) noexcept nogil:
    """The lease takes no more work and will soon have drained, so no lease waits for it. It stays, and is charged."""
    cdef const PublishedLease* published = table_find(table, key, epoch)
    if published != NULL and published_at_tail(&table.queues[key], published, now_ns):
        table_clear_dependency(table, key, epoch, now_ns)


cdef inline void table_wants(LeaseTable* table, uint32_t key, bint want, int64_t now_ns) noexcept nogil:
    table.queues[key].want = want
    table.queues[key].want_changed_ns = now_ns
    put(table.wanting, key, want)


cdef inline void table_report(LeaseTable* table, uint32_t key, const Report* report, int64_t now_ns) noexcept nogil:
    """Take the relay's present report. Step to ``now_ns`` before (a hook may have begun before the thread), and after.
    """
    cdef VgpuQueue* queue = &table.queues[key]
    cdef Report before = queue.report
    cdef PublishedLease* published
    if not queue.present:
        return
    queue.report = report[0]
    if report.returned_epoch != before.returned_epoch:
        # A vGPU that wants again after a return wants anew, even if one report has both.
        if table_finish(table, key, report.returned_epoch, report.drained_ns, now_ns, 0) and queue.want:
            table_wants(table, key, 0, now_ns)
    if report.drained_epoch != before.drained_epoch:
        if table_finish(table, key, report.drained_epoch, report.drained_ns, now_ns, report.want):
            if queue.want and not report.want:
                table_wants(table, key, 0, now_ns)
    if report.tail_epoch != before.tail_epoch:
        table_tail(table, key, report.tail_epoch, now_ns)
    if report.split_drain_epoch != before.split_drain_epoch:
        published = table_find(table, key, report.split_drain_epoch)
        if published != NULL and published.went:
            table_end(table, key, published, now_ns)
            published.split_drain = 1
    if report.want != queue.want:
        table_wants(table, key, report.want, now_ns)
        if report.want:
            ring_emit(&table.ring, EVENT_WANTS, key, 0, now_ns)
        elif not has(table.holding, key):
            ring_emit(&table.ring, EVENT_IDLE, key, 0, now_ns)
    if has(table.holding, key) and now_ns - queue.observed_ns >= OBSERVE_NS:
        published = &queue.leases[first_waiting(queue) - 1]
        queue.observed_ns = now_ns
        ring_observe(&table.ring, key, queue, published, now_ns)


cdef inline void table_add(LeaseTable* table, uint32_t key, const Report* report, int64_t now_ns) noexcept nogil:
    """A new vGPU. ``report``: its entry's present words. Epochs in it are of another time; a want is new."""
    cdef VgpuQueue* queue = &table.queues[key]
    memset(queue, 0, sizeof(VgpuQueue))
    queue.present = 1
    queue.report = report[0]
    queue.want_changed_ns = now_ns
    table_refile(table, key)
    table_report(table, key, report, now_ns)


cdef inline void table_remove(LeaseTable* table, uint32_t key, int64_t now_ns) noexcept nogil:
    """The vGPU is gone: its leases are over and its unread events are dropped. Its page shows an empty plan."""
    cdef VgpuQueue* queue = &table.queues[key]
    while queue.live > 0:
        table_drop(table, key, queue.live - 1, now_ns)
    ring_forget(&table.ring, key)
    memset(queue, 0, sizeof(VgpuQueue))
    put(table.wanting, key, 0)
    put(table.touched, key, 1)


cdef uint32_t lease_epoch(object value) except 0
cdef int read_turn(
    PublishedLease* published, object epoch, object start_ns, object end_ns, object after, object go_by_ns, bint early,
    bint on_want, bint alone, object window_ns,
) except -1
cdef object event_reading(const LeaseEvent* event)
cdef LeaseTable* table_new() except NULL
cdef void table_free(LeaseTable* table) noexcept
