"""The dispatcher: one native thread of the GPU Server that gives GO within microseconds, whatever Python is doing.

Theory of operation
-------------------
The lease table (``lease_table.pxd``) decides; it knows no clock and no page. This module is the shell around it: the
thread, the clock, the relay page that it reads and the grants pages that it writes.

The thread sleeps on the relay page's doorbell until the next deadline. Awake, it takes the dirty bits, reports those
entries to the table, steps the table, and writes the pages of the queues that were touched. Python's commands do the
same from Python's thread. So a lease that is due goes within the call. Such a command wakes the thread only if that
would sleep too long.

The thread is awake for two kinds of moments (``next_look_ns``). The first is a start that a vGPU waits for to the
microsecond (``sharp``): absolute futex time-outs overshoot by tens of µs. The second, where there are cores to spare,
is the end of a lease whose drain another lease waits for: waking an idle core takes longer than the hand-over itself.

Locks and order
---------------
``lock`` protects the table and every page's plan. The thread, or one Python caller without the GIL, holds it for
microseconds. No other lock is taken under it. Futex wakes and the eventfd's write come after its release.

Doorbell: its value is read before the dirty bits are taken; relays set their bit before they ring. So a bit set too
late for this pass finds the doorbell moved, and the wait returns at once.

The words of a relay's entry and of a grants page have their order, too (queue_pages.pxd).
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strerror

from cython_ext.dispatch.lease_table cimport (
    TABLE_EMPTY, TABLE_FULL, TABLE_OK, LATENESS_BINS, LeaseTable, table_add, table_allowed_ns, table_deadline,
    table_free, table_handover_ns, table_new, table_publish, table_remove, table_report, table_step, table_withdraw,
    event_reading, read_turn,
)
from cython_ext.dispatch.lease_events cimport EVENT_OBSERVED, RING, LeaseEvent, queue_reading, ring_visited
from cython_ext.dispatch.queue_pages cimport read_report, write_page
from cython_ext.dispatch.vgpu_queue cimport (
    MOST_LEASES, GrantView, PublishedLease, Report, VgpuQueue, first_waiting, next_key, put, queue_free_epoch,
    queue_view,
)
from cython_ext.pages.layout cimport (
    FOREVER_NS, MAX_VGPUS, GrantsPage as Grants, RelayEntry, RelayPage as Relays, pthread_mutex_t,
)
from cython_ext.logic.gate.handover cimport awake_after_ns, awake_before_ns, awake_for
from cython_ext.native cimport (
    add32, exchange64, futex_wait, futex_wake, load32, load64, now_ns, pause, store32, storei64,
)
from cython_ext.pages.grantspage cimport GrantsPage
from cython_ext.pages.relaypage cimport RelayPage
from cython_ext.pages.tenant cimport bounded, part_of
from cython_ext.threads cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, PR_SET_TIMERSLACK, close_descriptor, eventfd, eventfd_read, eventfd_write, may_spin,
    prctl, pthread_join, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    pthread_self, pthread_setname_np, pthread_t, start_thread,
)

from cython_ext.readings import DemandReading, DispatcherStats, Event, EventKind

cdef extern from "limits.h":
    const int INT_MAX

cdef enum:
    SPIN_NS = 100_000
    BEAT_NS = 50_000_000     # twice as often as the pages promise


ctypedef Grants* GrantsAt


cdef struct Engine:
    pthread_mutex_t lock
    LeaseTable* table
    LeaseEvent* spare        # the other event buffer: Python reads one while the thread fills the other
    Relays* relays
    GrantsAt[256] pages       # NULL: no such vGPU
    uint64_t[4] wake         # pages whose sleepers must be woken once the lock is free
    bint signalled           # the eventfd shows that there are events
    bint free                # the pages show that the GPU is free
    bint stopping
    bint spins
    int events_descriptor
    int64_t sleeps_until_ns  # 0: the thread is awake
    int64_t beat_ns
    uint64_t wakes
    uint64_t reports
    pthread_t thread


cdef inline void publish_free(Engine* engine, bint is_free) noexcept nogil:
    """Publish in every page which lease may start without GO, or that none may. No sleeping thread waits for this word.
    """
    cdef int key
    if is_free == engine.free:
        return
    engine.free = is_free
    for key in range(MAX_VGPUS):
        if engine.pages[key] != NULL:
            store32(&engine.pages[key].free_epoch, queue_free_epoch(&engine.table.queues[key]) if is_free else 0)


cdef inline void settle(Engine* engine, int64_t at_ns) noexcept nogil:
    """Step the table and let the pages follow. Under the lock."""
    cdef GrantView view
    cdef int key
    table_step(engine.table, at_ns)
    if not engine.table.free:
        publish_free(engine, 0)     # before the pages: a lease that is granted now may begin at once
    key = next_key(engine.table.touched, 0)
    while key >= 0:
        if engine.pages[key] != NULL:
            queue_view(&engine.table.queues[key], engine.table.free, &view)
            write_page(engine.pages[key], &view)
            put(engine.wake, key, 1)
        put(engine.table.touched, key, 0)
        key = next_key(engine.table.touched, key + 1)
    publish_free(engine, engine.table.free)


cdef inline void take_reports(Engine* engine) noexcept nogil:
    """Report the dirty entries to the table. Under the lock."""
    cdef uint64_t[4] dirty
    cdef Report report
    cdef int64_t at_ns
    cdef int key, i
    for i in range(4):
        dirty[i] = exchange64(&engine.relays.dirty[i], 0)
    at_ns = now_ns()                     # after the bits: no report can be from later
    table_step(engine.table, at_ns)
    key = next_key(dirty, 0)
    while key >= 0:
        engine.reports += 1
        read_report(&engine.relays.entries[key], &report)
        table_report(engine.table, key, &report, at_ns)
        key = next_key(dirty, key + 1)


cdef inline void beat(Engine* engine, int64_t at_ns) noexcept nogil:
    cdef int key
    for key in range(MAX_VGPUS):
        if engine.pages[key] != NULL:
            storei64(&engine.pages[key].alive_ns, at_ns)
    engine.beat_ns = at_ns + BEAT_NS


cdef inline int64_t next_look_ns(Engine* engine, int64_t at_ns, bint* spin) noexcept nogil:
    """Until when the thread may rest in the present state; ``spin``: awake. Under the lock."""
    cdef bint sharp
    cdef int64_t deadline_ns = table_deadline(engine.table, &sharp)
    cdef int64_t handover_ns = FOREVER_NS, lasted_ns = 0, before_ns, after_ns
    cdef int64_t until_ns = min(deadline_ns, engine.beat_ns)
    if engine.spins:
        handover_ns = table_handover_ns(engine.table, at_ns, &lasted_ns)
    before_ns = awake_before_ns(lasted_ns)
    after_ns = awake_after_ns(lasted_ns)
    spin[0] = 1
    if sharp and deadline_ns - SPIN_NS <= at_ns:
        return deadline_ns
    if awake_for(handover_ns, before_ns, after_ns, at_ns):
        return min(deadline_ns, handover_ns + after_ns)
    spin[0] = 0
    if sharp:
        until_ns = min(until_ns, deadline_ns - SPIN_NS)
    if at_ns < handover_ns:
        until_ns = min(until_ns, handover_ns - before_ns)
    return until_ns


cdef inline void unlock(Engine* engine) noexcept nogil:
    """Release the lock, then wake the sleepers of changed pages, and signal the scheduler. A page may vanish meanwhile:
    a wake on no memory does nothing."""
    cdef uint64_t[4] wake
    cdef GrantsAt[256] pages
    cdef bint signal = engine.table.ring.pressing and not engine.signalled
    cdef bint thread_oversleeps, spin
    cdef int key, i
    for i in range(4):
        wake[i] = engine.wake[i]
        engine.wake[i] = 0
    key = next_key(wake, 0)
    while key >= 0:
        pages[key] = engine.pages[key]
        key = next_key(wake, key + 1)
    engine.signalled = engine.signalled or signal
    thread_oversleeps = next_look_ns(engine, now_ns(), &spin) < engine.sleeps_until_ns
    if thread_oversleeps:
        engine.sleeps_until_ns = 0
    pthread_mutex_unlock(&engine.lock)
    key = next_key(wake, 0)
    while key >= 0:
        futex_wake(&pages[key].change, INT_MAX)
        key = next_key(wake, key + 1)
    if signal:
        eventfd_write(engine.events_descriptor, 1)
    if thread_oversleeps:
        ring(engine)


cdef inline void ring(Engine* engine) noexcept nogil:
    add32(&engine.relays.doorbell, 1)
    futex_wake(&engine.relays.doorbell, 1)


cdef void* engine_main(void* argument) noexcept nogil:
    cdef Engine* engine = <Engine*>argument
    cdef uint32_t rung
    cdef int64_t at_ns, until_ns
    cdef bint spin
    pthread_setname_np(pthread_self(), "vgpu-dispatch")
    prctl(PR_SET_TIMERSLACK, 1)
    while True:
        rung = load32(&engine.relays.doorbell)
        pthread_mutex_lock(&engine.lock)
        if engine.stopping:
            pthread_mutex_unlock(&engine.lock)
            return NULL
        engine.wakes += 1
        engine.sleeps_until_ns = 0
        take_reports(engine)
        at_ns = now_ns()
        settle(engine, at_ns)
        if at_ns >= engine.beat_ns:
            beat(engine, at_ns)
        until_ns = engine.sleeps_until_ns = next_look_ns(engine, at_ns, &spin)
        unlock(engine)
        if spin:
            while load32(&engine.relays.doorbell) == rung and now_ns() < until_ns:
                pause()
        else:
            futex_wait(&engine.relays.doorbell, rung, until_ns)


cdef int engine_publish(Engine* engine, uint32_t key, const PublishedLease* published) noexcept nogil:
    cdef int64_t at_ns
    cdef int result
    pthread_mutex_lock(&engine.lock)
    at_ns = now_ns()
    table_step(engine.table, at_ns)
    result = table_publish(engine.table, key, published, at_ns)
    settle(engine, at_ns)
    unlock(engine)
    return result


cdef bint engine_withdraw(Engine* engine, uint32_t key, uint32_t epoch) noexcept nogil:
    cdef int64_t at_ns
    cdef bint result
    pthread_mutex_lock(&engine.lock)
    at_ns = now_ns()
    table_step(engine.table, at_ns)
    result = table_withdraw(engine.table, key, epoch, at_ns)
    settle(engine, at_ns)
    unlock(engine)
    return result


cdef void engine_allow(Engine* engine, uint32_t key, uint32_t epoch, int64_t allowance_ns) noexcept nogil:
    """Write the allowed sum into the page. Hooks are woken where the limit comes or goes. A gate that waits for more
    reads it every millisecond by itself."""
    cdef Grants* page
    cdef int64_t allowed_ns
    pthread_mutex_lock(&engine.lock)
    page = engine.pages[key]
    allowed_ns = table_allowed_ns(engine.table, key, epoch, allowance_ns)
    if page != NULL:
        if (page.allowed_ns == 0) != (allowed_ns == 0):
            add32(&page.change, 1)
            put(engine.wake, key, 1)
        storei64(&page.allowed_ns, allowed_ns)
    unlock(engine)


cdef void engine_add(Engine* engine, uint32_t key, Grants* page) noexcept nogil:
    cdef Report report
    cdef int64_t at_ns
    pthread_mutex_lock(&engine.lock)
    at_ns = now_ns()
    engine.pages[key] = page
    storei64(&page.alive_ns, at_ns)
    storei64(&page.allowed_ns, 0)
    read_report(&engine.relays.entries[key], &report)
    table_add(engine.table, key, &report, at_ns)
    settle(engine, at_ns)
    unlock(engine)


cdef void engine_remove(Engine* engine, uint32_t key) noexcept nogil:
    cdef int64_t at_ns
    pthread_mutex_lock(&engine.lock)
    at_ns = now_ns()
    table_remove(engine.table, key, at_ns)
    settle(engine, at_ns)
    futex_wake(&engine.pages[key].change, INT_MAX)       # now: its maker unmaps it next
    put(engine.wake, key, 0)
    engine.pages[key] = NULL
    memset(&engine.relays.entries[key], 0, sizeof(RelayEntry))
    unlock(engine)


cdef class Dispatcher:
    """Executes the scheduler's leases. Times are CLOCK_MONOTONIC ns, keys 0 … 255; any thread may call.

    Pages stay mapped (their ``close`` is refused) until ``remove`` or ``close``.
    """

    cdef Engine* engine
    cdef RelayPage relay_page
    cdef list grants_pages

    def __cinit__(self, RelayPage relay_page not None):
        cdef Engine* engine
        relay_page.pin()
        self.relay_page = relay_page
        self.grants_pages = [None] * MAX_VGPUS
        engine = <Engine*>calloc(1, sizeof(Engine))
        if engine == NULL:
            raise MemoryError
        self.engine = engine
        pthread_mutex_init(&engine.lock, NULL)
        engine.relays = relay_page.get()
        engine.events_descriptor = -1
        engine.spins = may_spin()
        engine.table = table_new()
        engine.spare = <LeaseEvent*>calloc(RING, sizeof(LeaseEvent))
        if engine.spare == NULL:
            raise MemoryError
        engine.events_descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if engine.events_descriptor < 0:
            raise OSError(errno, f"cannot make the dispatcher's eventfd: {strerror(errno).decode()}")
        error = start_thread(&engine.thread, engine_main, engine)
        if error:
            engine.thread = 0
            raise OSError(error, f"cannot start the dispatcher's thread: {strerror(error).decode()}")

    def __dealloc__(self):
        self.close()

    cdef Engine* running(self) except NULL:
        if self.engine == NULL:
            raise RuntimeError("this dispatcher is closed")
        return self.engine

    cdef uint32_t known(self, object key) except? 0xFFFFFFFF:
        if not 0 <= key < MAX_VGPUS:
            raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {MAX_VGPUS - 1}")
        self.running()
        if self.grants_pages[key] is None:
            raise KeyError(f"the dispatcher has no vGPU {key}: add it first")
        return key

    def fileno(self):
        """Readable when ``events`` has an urgent event: any but OBSERVED, and WENT at the tail of another lease, which
        is signalled a little later. The descriptor is the dispatcher's: do not close it."""
        return self.running().events_descriptor

    def add(self, key, GrantsPage grants_page not None):
        """Take charge of a vGPU's grants page. If its relay has reported a want already, that becomes an event."""
        engine = self.running()
        if not 0 <= key < MAX_VGPUS:
            raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {MAX_VGPUS - 1}")
        if self.grants_pages[key] is not None:
            raise ValueError(f"vGPU key {key} is taken: remove it first")
        grants_page.check_writable()
        grants_page.pin()
        self.grants_pages[key] = grants_page
        cdef uint32_t index = key
        cdef Grants* page = grants_page.get()
        with nogil:
            engine_add(engine, index, page)

    def remove(self, key):
        """The vGPU was removed: its leases count as drained, without events. The key is free once its broker has ended.
        """
        cdef uint32_t index = self.known(key)
        cdef GrantsPage page = self.grants_pages[key]
        with nogil:
            engine_remove(self.engine, index)
        self.grants_pages[key] = None
        page.unpin()

    def publish(self, key, epoch, start_ns, end_ns, after=(), go_by_ns=0, early=True, on_want=False,
                alone=False, window_ns=1_000_000):
        """Execute ``Publish`` (meaning of the arguments: ``gpuserver.core.scheduler.leases.Lease``).

        True: accepted. False: the epoch has drained or was withdrawn, nothing changed. Raises ``ValueError`` for what
        no lease can be, ``OverflowError`` with eight leases of the vGPU undrained.
        """
        cdef uint32_t index = self.known(key)
        cdef PublishedLease published
        cdef int result
        read_turn(&published, epoch, start_ns, end_ns, after, go_by_ns, early, on_want, alone, window_ns)
        with nogil:
            result = engine_publish(self.engine, index, &published)
        if result == TABLE_EMPTY:
            raise ValueError(f"lease {epoch} ends at {end_ns}, which is not after its start at {start_ns}")
        if result == TABLE_FULL:
            raise OverflowError(f"lease {epoch}: vGPU {key} has {MOST_LEASES} leases that have not drained already")
        return result == TABLE_OK

    def withdraw(self, key, epoch):
        """Execute ``Withdraw``. True: taken back. False: it is over, or it went and ends now (events follow)."""
        cdef uint32_t index = self.known(key)
        cdef uint32_t asked = epoch
        cdef bint result
        with nogil:
            result = engine_withdraw(self.engine, index, asked)
        return bool(result)

    def allow(self, key, epoch, allowance_ns):
        """Under the lease ``epoch``, where it has no end, the vGPU may use ``allowance_ns`` of GPU time in all; None:
        as much as it can. Programs that have used that up wait for more."""
        cdef uint32_t index = self.known(key)
        cdef uint32_t asked = epoch
        cdef int64_t allowance = -1 if allowance_ns is None else max(0, allowance_ns)
        with nogil:
            engine_allow(self.engine, index, asked, allowance)

    def events(self):
        """The events since the last call, oldest first. The last one is LOST if the ring was too small."""
        cdef Engine* engine = self.running()
        cdef LeaseEvent* filled
        cdef uint32_t count
        cdef uint64_t lost
        cdef unsigned long ignored
        with nogil:
            eventfd_read(engine.events_descriptor, &ignored)
            pthread_mutex_lock(&engine.lock)
            filled = engine.table.ring.events
            count = engine.table.ring.count
            lost = engine.table.ring.lost
            engine.table.ring.events = engine.spare
            engine.spare = filled
            ring_visited(&engine.table.ring)
            engine.signalled = 0
            pthread_mutex_unlock(&engine.lock)
        found = [event_reading(&filled[i]) for i in range(count)]
        if lost:
            found.append(Event(EventKind.LOST, 0, lost, now_ns(), 0, 0, False, 0, 0, 0, 0, 0))
        return found

    def observe(self, key):
        """The vGPU's newest lease in force, read now, as an OBSERVED event; None if it holds none."""
        cdef uint32_t index = self.known(key)
        cdef Engine* engine = self.engine
        cdef LeaseEvent event
        cdef VgpuQueue queue
        cdef PublishedLease* published
        memset(&event, 0, sizeof(event))
        with nogil:
            pthread_mutex_lock(&engine.lock)
            queue = engine.table.queues[index]
            pthread_mutex_unlock(&engine.lock)
        if first_waiting(&queue) == 0:
            return None
        read_report(&engine.relays.entries[index], &queue.report)
        published = &queue.leases[first_waiting(&queue) - 1]
        event.kind = EVENT_OBSERVED
        event.key = index
        event.epoch = published.lease.epoch
        event.at_ns = now_ns()
        queue_reading(&queue, published, &event)
        return event_reading(&event)

    def outstanding(self, key):
        """The vGPU's live leases, oldest first: (epoch, whether GO was given)."""
        cdef uint32_t index = self.known(key)
        cdef VgpuQueue queue
        with nogil:
            pthread_mutex_lock(&self.engine.lock)
            queue = self.engine.table.queues[index]
            pthread_mutex_unlock(&self.engine.lock)
        return [(queue.leases[i].lease.epoch, bool(queue.leases[i].went)) for i in range(queue.live)]

    def wants(self, key):
        """Whether the vGPU wants a token, as last reported."""
        cdef uint32_t index = self.known(key)
        return bool(self.engine.table.queues[index].want)

    def demand(self, key):
        """What the hooks measured of the vGPU's processes, as ``DemandReading``. A tenant's word."""
        cdef const RelayEntry* entry = &self.running().relays.entries[self.known(key)]
        return DemandReading(
            demand_ppm=part_of(load32(&entry.demand_ppm)),
            burst_ns=1000 * load32(&entry.burst_us),
            waits_ppm=part_of(load32(&entry.waits_ppm)),
            work_ns=bounded(load64(&entry.work_ns)),
        )

    def stats(self):
        """Counters since the start, as ``DispatcherStats``."""
        cdef Engine* engine = self.running()
        cdef LeaseTable* table = engine.table
        return DispatcherStats(
            engine.wakes, engine.reports, table.gos, table.forced, table.ring.total, table.ring.lost_total,
            tuple([table.lateness[i] for i in range(LATENESS_BINS)]),
        )

    def close(self):
        """Stop the thread and release all pages. They keep their last plans; no thread gives GO any more. Idempotent.
        """
        cdef Engine* engine = self.engine
        cdef GrantsPage page
        if engine == NULL:
            return
        self.engine = NULL
        if engine.thread:
            with nogil:
                pthread_mutex_lock(&engine.lock)
                engine.stopping = 1
                pthread_mutex_unlock(&engine.lock)
                ring(engine)
                pthread_join(engine.thread, NULL)
        if engine.events_descriptor >= 0:
            close_descriptor(engine.events_descriptor)
        pthread_mutex_destroy(&engine.lock)
        table_free(engine.table)
        free(engine.spare)
        free(engine)
        for page in self.grants_pages:
            if page is not None:
                page.unpin()
        self.grants_pages = [None] * MAX_VGPUS
        self.relay_page.unpin()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def closed(self):
        return self.engine == NULL
