"""The relay: the native thread of a broker that merges the wants of a vGPU's processes into the vGPU's want.

Theory of operation
-------------------
A hook changes its slot and rings the activity page's doorbell. The relay's thread wakes. It merges the slots of
admitted processes into the vGPU's ``RelayEntry`` and sets the entry's dirty bit. It rings the dispatcher if that must
act: the want changed, or a lease is over. Figures alone (busy time, launches) wait until the dispatcher reads the entry
next. Python takes no part in this.

*Drained.* An epoch is over when its end has passed, a newer one is in force, or the plan does not show it any more.
The vGPU has drained as far as the slowest process with work on the GPU has, and not beyond the newest epoch that is
over. Reason: a process may claim any epoch, and the relay passes on only what the plan allows.

*Early return.* When no process wants, the relay returns the lease in force. A process may wake at that very moment. So
both sides write first and read second (Dekker). The relay stores ``returned_epoch`` and then scans the slots again. A
process stores ``want`` and then reads ``returned_epoch``. At least one reads the other's store. If the relay finds a
want, it undoes the return before it reports one. It wakes the page's sleepers, since a process may just have taken the
lease for lost. If the relay is killed in between, its successor undoes the return (``take_back``).

*Sleepers.* A stopped process reports nothing, not even that its lease has begun. So while the vGPU wants, the relay
reads the plan itself every LOOK_WANTED_NS, and again when the lease ends. A lease that no process used has drained
then. The process that slept through it counts as not wanting until it reports again (``clear_stale_wants``).

*Deaths.* Each admitted process has a watcher: a thread with a small stack, asleep on the lock word of ``Slot.alive``.
The process's hook thread holds that lock for life. When that thread exits, the kernel marks the word
(FUTEX_OWNER_DIED) and wakes the watcher. The watcher never locks the mutex; it only requests the wake (FUTEX_WAITERS).
Reason: locking would put the watcher into a list whose links lie in the tenant's memory. On death the slot wants
nothing any more, and the lease is back within a wake. Python reclaims the process's memory.

The tenant's page
-----------------
A tenant can write anything anywhere in its page, at any time, and use its futexes. It can move the relay's sleeping
thread to another word (FUTEX_REQUEUE), wake it for ever, or pretend to be dead or immortal. So the relay copies each
word once and then judges the copy. Every wait ends after a second or two. More than RING_BURST wakes in a row cost a
sleep each. The relay reads only slots that the broker admitted. What remains is a vGPU that harms itself. The broker's
pidfd detects an immortal mutex (``mark_dead``).

Locks and order
---------------
``lock`` protects the relay's state between the thread and Python; the watchers take no lock. Under it no other lock is
taken and nothing waits. The entry is written in the order on which the dispatcher relies (queue_pages.pxd).
"""

from libc.errno cimport errno
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strerror

from cython_ext.pages.layout cimport (
    FOREVER_NS, GRANTS_COMPANY, MAX_PROCESSES, MAX_VGPUS, SLOT_ACTIVE, SLOT_DEAD, SLOT_FREE, GrantsPage as Grants,
    Lease, RelayEntry, RelayPage as Relays, Slot,
)
from cython_ext.logic.gate.baton cimport baton_forget
from cython_ext.logic.gate.handover cimport AWAKE_BEFORE_NS, awake_after_ns, awake_before_ns, awake_for
from cython_ext.relay.merge cimport LOOK_NS, Watch, Wire, index_of, lowest, merge, news, pass_baton, tell_processes
from cython_ext.native cimport (
    add32, and64, cas32, exchange32, exchange64, fence, futex_wait, futex_wake, load32, load64, loadi64, now_ns, or64,
    pause, store32,
)
from cython_ext.pages.activitypage cimport ActivityPage
from cython_ext.pages.grantspage cimport GrantsPage
from cython_ext.pages.relaypage cimport RelayPage
from cython_ext.threads cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, close_descriptor, eventfd, eventfd_read, eventfd_write, may_spin, pthread_join,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, pthread_self,
    pthread_setname_np, sleep_until, start_thread,
)

from cython_ext.readings import Death, RelayStats

cdef extern from "limits.h":
    const int INT_MAX

cdef extern from "vgpu_native.h" nogil:
    const uint32_t FUTEX_WAITERS, FUTEX_OWNER_DIED, FUTEX_TID_MASK
    const int ETIMEDOUT

cdef enum:
    LOOK_ENDED_NS = 300_000          # so soon after its end the relay checks whether a lease was slept through
    LOOK_METERED_NS = 10_000_000     # ... and merges so often under an open-ended lease that is limited, or shared
    LOOK_WANTED_NS = 100_000_000     # the relay reads plan and figures so often while the vGPU wants
    READING_APART_NS = 20_000_000    # requests to the server for an NVML reading are so far apart
    RING_BURST = 256
    RING_REFILL_NS = 500_000     # a vGPU's sustained doorbells: 2,000 a second
    STORM = 64                   # wakes of a watcher for nothing before it slows down
    STORM_NS = 1_000_000

    WATCH_NONE = 0
    WATCH_ASKED = 1              # until the process has locked its mutex
    WATCH_RUNNING = 2


cdef inline void ring_dispatcher(Wire* wire) noexcept nogil:
    wire.rings += 1
    add32(&wire.relays.doorbell, 1)
    futex_wake(&wire.relays.doorbell, INT_MAX)


cdef inline void ring_relay(Wire* wire) noexcept nogil:
    add32(&wire.activity.doorbell, 1)
    futex_wake(&wire.activity.doorbell, INT_MAX)


cdef inline bint report_contexts(Wire* wire) noexcept nogil:
    """Report a context to Python, once, that is newer than the server's reading of the vGPU's memory. Python then
    requests an NVML reading from the server. Readings cost other vGPUs CPU time, so a tenant cannot cause them at will.
    1: the report is due in LOOK_TOLD_NS."""
    cdef int64_t newest = loadi64(&wire.activity.context_ns)
    cdef int64_t at_ns = now_ns()
    if not loadi64(&wire.grants.implicit_ns) < newest <= at_ns or newest == wire.reported_context_ns:
        return 0
    if at_ns - wire.reading_asked_ns < READING_APART_NS:
        return 1
    wire.reported_context_ns = newest
    wire.reading_asked_ns = at_ns
    store32(&wire.look, 1)
    eventfd_write(wire.events_descriptor, 1)
    return 0


cdef inline void start_watches(Wire* wire) noexcept nogil:
    """For processes that have locked their mutex since they were admitted."""
    cdef uint64_t left = wire.admitted
    cdef Watch* watch
    while left:
        watch = &wire.watches[index_of(lowest(left))]
        left &= left - 1
        if watch.state != WATCH_ASKED or load32(&watch.slot.state) != SLOT_ACTIVE:
            continue
        if load32(<uint32_t*>&watch.slot.alive) != 0:
            if start_thread(&watch.thread, watch_main, watch) == 0:
                watch.state = WATCH_RUNNING


cdef inline void throttle(Wire* wire) noexcept nogil:
    """A bucket of RING_BURST wakes, refilled by one every RING_REFILL_NS."""
    cdef int64_t at_ns = now_ns()
    cdef int64_t earned = (at_ns - wire.budget_ns) / RING_REFILL_NS
    wire.budget = min(<int64_t>RING_BURST, wire.budget + earned)
    wire.budget_ns += earned * RING_REFILL_NS
    wire.budget -= 1
    if wire.budget < 0:
        wire.throttled += 1
        sleep_until(at_ns + RING_REFILL_NS)


cdef void rest(
    uint32_t* doorbell, uint32_t rung, int64_t end_ns, int64_t lasted_ns, int64_t turn_ns, int64_t look_ns, bint spins
) noexcept nogil:
    """Sleep until the doorbell rings, for ``look_ns`` at most. ``end_ns`` is the end of a lease that has not drained,
    and ``lasted_ns`` its length: the ring is expected soon after the end. ``turn_ns``: the baton's next step is due
    then, with or without a ring."""
    cdef int64_t at_ns = now_ns(), before_ns = awake_before_ns(lasted_ns), after_ns = awake_after_ns(lasted_ns)
    cdef int64_t until_ns = min(at_ns + look_ns, turn_ns)
    if at_ns - end_ns < LOOK_ENDED_NS:
        until_ns = min(until_ns - LOOK_ENDED_NS, end_ns) + LOOK_ENDED_NS
    if spins and awake_for(end_ns, before_ns, after_ns, at_ns):
        until_ns = min(until_ns, end_ns + after_ns)
    elif not spins or turn_ns - at_ns > AWAKE_BEFORE_NS:
        if spins:
            until_ns = min(until_ns, turn_ns - AWAKE_BEFORE_NS)
            if at_ns < end_ns:
                until_ns = min(until_ns, end_ns - before_ns)
        futex_wait(doorbell, rung, until_ns)
        return
    while load32(doorbell) == rung and now_ns() < until_ns:
        pause()


cdef void* wire_main(void* argument) noexcept nogil:
    cdef Wire* wire = <Wire*>argument
    cdef uint32_t rung
    cdef int64_t end_ns, lasted_ns, turn_ns, look_ns
    cdef bint must_ring, to_report, undrained, spins = may_spin()
    pthread_setname_np(pthread_self(), "vgpu-relay")
    while True:
        throttle(wire)
        rung = load32(&wire.activity.doorbell)
        pthread_mutex_lock(&wire.lock)
        if wire.stopping:
            pthread_mutex_unlock(&wire.lock)
            return NULL
        wire.wakes += 1
        must_ring = merge(wire)
        start_watches(wire)
        to_report = report_contexts(wire)
        if must_ring:
            ring_dispatcher(wire)
        undrained = news(wire.held.epoch, wire.reported_drained) and wire.held.epoch != wire.reported_returned
        end_ns = wire.held.end_ns if undrained else <int64_t>FOREVER_NS
        lasted_ns = wire.held.end_ns - wire.held.start_ns
        turn_ns = wire.baton.due_ns if wire.baton.word else <int64_t>FOREVER_NS
        look_ns = READING_APART_NS if to_report else (LOOK_WANTED_NS if wire.want else LOOK_NS)
        if wire.want and (loadi64(&wire.grants.allowed_ns) or load32(&wire.grants.flags) & GRANTS_COMPANY):
            look_ns = min(look_ns, <int64_t>LOOK_METERED_NS)
        pthread_mutex_unlock(&wire.lock)
        rest(&wire.activity.doorbell, rung, end_ns, lasted_ns, turn_ns, look_ns, spins)


cdef void* watch_main(void* argument) noexcept nogil:
    cdef Watch* watch = <Watch*>argument
    cdef uint32_t* word = <uint32_t*>&watch.slot.alive
    cdef uint32_t seen
    cdef int for_nothing = 0
    pthread_setname_np(pthread_self(), "vgpu-watch")
    while not load32(&watch.stop):
        seen = load32(word)
        if seen & FUTEX_OWNER_DIED or not seen & FUTEX_TID_MASK:
            watch.clean = not seen & FUTEX_OWNER_DIED
            watch.died_ns = now_ns()
            report_death(watch)
            break
        if seen & FUTEX_WAITERS or cas32(word, seen, seen | FUTEX_WAITERS):
            if futex_wait(word, seen | FUTEX_WAITERS, now_ns() + 2 * LOOK_NS) == ETIMEDOUT:
                for_nothing = 0
        for_nothing += 1
        if for_nothing > STORM:
            sleep_until(now_ns() + STORM_NS)
    store32(&watch.ended, 1)
    return NULL


cdef inline void silence(Slot* slot) noexcept nogil:
    """The process is dead: its slot wants nothing and has no work."""
    if load32(&slot.state) != SLOT_FREE:
        store32(&slot.state, SLOT_DEAD)
    store32(&slot.want, 0)
    store32(&slot.undrained, 0)


cdef inline void report_death(Watch* watch) noexcept nogil:
    cdef Wire* wire = watch.wire
    silence(watch.slot)
    or64(&wire.died, (<uint64_t>1) << (watch.slot - wire.activity.slots))
    eventfd_write(wire.events_descriptor, 1)
    ring_relay(wire)


cdef void end_watch(Wire* wire, int index) noexcept nogil:
    """Stop and join a slot's watcher, if it has one, and forget the slot. Without the lock."""
    cdef Watch* watch = &wire.watches[index]
    cdef uint32_t state
    pthread_mutex_lock(&wire.lock)
    state = watch.state
    watch.state = WATCH_NONE
    wire.admitted &= ~((<uint64_t>1) << index)
    tell_processes(wire)
    pthread_mutex_unlock(&wire.lock)
    if state == WATCH_RUNNING:
        store32(&watch.stop, 1)
        while not load32(&watch.ended):
            # Repeatedly: the watcher may be about to sleep, and a tenant may have moved it to another word meanwhile.
            futex_wake(<uint32_t*>&watch.slot.alive, INT_MAX)
            sleep_until(now_ns() + 100_000)
        pthread_join(watch.thread, NULL)
    and64(&wire.died, ~((<uint64_t>1) << index))


cdef void begin_watch(Wire* wire, int index) noexcept nogil:
    cdef Watch* watch = &wire.watches[index]
    end_watch(wire, index)
    pthread_mutex_lock(&wire.lock)
    memset(watch, 0, sizeof(Watch))
    watch.wire = wire
    watch.slot = &wire.activity.slots[index]
    # The process's earlier counts were this relay's predecessor's to report.
    watch.begun_ns = now_ns()
    watch.busy_ns.last = load64(&watch.slot.busy_ns)
    watch.launches.last = load64(&watch.slot.launches)
    watch.state = WATCH_ASKED
    baton_forget(&wire.baton, index)
    wire.admitted |= (<uint64_t>1) << index
    tell_processes(wire)
    fence()                  # this broker's and every other broker's next admission counts after this
    pthread_mutex_unlock(&wire.lock)
    ring_relay(wire)


cdef void bind_entry(Wire* wire, Grants* grants, Relays* relays, uint32_t key) noexcept nogil:
    cdef RelayEntry* entry = &relays.entries[key]
    pthread_mutex_lock(&wire.lock)
    wire.grants = grants
    wire.relays = relays
    wire.key = key
    wire.reported_returned = load32(&entry.returned_epoch)
    wire.reported_drained = load32(&entry.drained_epoch)
    wire.reported_tail = load32(&entry.tail_epoch)
    wire.reported_split_drain = load32(&entry.split_drain_epoch)
    wire.reported_context_ns = 0
    wire.busy_ns = max(wire.busy_ns, load64(&entry.busy_ns))
    wire.launches = max(wire.launches, load64(&entry.launches))
    memset(&wire.held, 0, sizeof(Lease))
    memset(&wire.before, 0, sizeof(Lease))
    memset(&wire.over, 0, sizeof(Lease))
    wire.judged = 0
    wire.publish_all = 1
    pass_baton(wire, now_ns())
    pthread_mutex_unlock(&wire.lock)


cdef class Relay:
    """Merges a vGPU's processes into its entry of the relay page, and watches for their deaths.

    ``slots``: of processes that an earlier relay watched; this one watches them from the first merge on. Without them,
    that merge would find no process that wants, and return a lease under which they have work.
    Pages stay mapped until ``close``. Before that, the pages refuse their own ``close``.
    """

    cdef Wire* wire
    cdef ActivityPage activity_page
    cdef GrantsPage grants_page
    cdef RelayPage relay_page

    def __cinit__(self, ActivityPage activity_page not None, GrantsPage grants_page not None,
                  RelayPage relay_page not None, key, slots=()):
        cdef Wire* wire
        cdef int index
        cdef uint64_t found = 0
        check_key(key)
        for slot in slots:
            found |= (<uint64_t>1) << check_slot(slot)
        activity_page.pin()
        self.activity_page = activity_page
        grants_page.pin()
        self.grants_page = grants_page
        relay_page.pin()
        self.relay_page = relay_page
        wire = <Wire*>calloc(1, sizeof(Wire))
        if wire == NULL:
            raise MemoryError
        self.wire = wire
        pthread_mutex_init(&wire.lock, NULL)
        wire.activity = activity_page.get()
        wire.budget = RING_BURST
        wire.budget_ns = wire.returned_ns = now_ns()
        bind_entry(wire, grants_page.get(), relay_page.get(), key)
        wire.events_descriptor = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if wire.events_descriptor < 0:
            raise OSError(errno, f"cannot make the relay's eventfd: {strerror(errno).decode()}")
        for index in range(MAX_PROCESSES):
            if found >> index & 1:
                begin_watch(wire, index)
        error = start_thread(&wire.thread, wire_main, wire)
        if error:
            wire.thread = 0
            raise OSError(error, f"cannot start the relay's thread: {strerror(error).decode()}")

    def __dealloc__(self):
        self.close()

    cdef Wire* running(self) except NULL:
        if self.wire == NULL:
            raise RuntimeError("this relay is closed")
        return self.wire

    cdef int known(self, int slot) except -1:
        self.running()
        return check_slot(slot)

    def fileno(self):
        """Readable when ``deaths`` or ``look_wanted`` has something. The descriptor is the relay's: do not close it."""
        return self.running().events_descriptor

    def watch(self, int slot):
        """Admit the process of a reserved or active slot: merge its words from now on, and report its death.

        A slot that was watched before is watched anew, for its new process.
        """
        self.known(slot)
        with nogil:
            begin_watch(self.wire, slot)

    def mark_dead(self, int slot):
        """The process is dead by its pidfd, which is surer than its mutex. Its death is then not reported again."""
        cdef Wire* wire
        self.known(slot)
        wire = self.wire
        with nogil:
            end_watch(wire, slot)
            silence(&wire.activity.slots[slot])
            ring_relay(wire)

    def deaths(self):
        """Processes that died since the last call, as ``Death``. Their slots are dead and not admitted any more."""
        cdef Wire* wire = self.running()
        cdef unsigned long ignored
        cdef uint64_t died
        cdef int index
        found = []
        with nogil:
            eventfd_read(wire.events_descriptor, &ignored)
            died = exchange64(&wire.died, 0)
        while died:
            index = index_of(lowest(died))
            died &= died - 1
            with nogil:
                end_watch(wire, index)
            found.append(Death(index, wire.watches[index].died_ns, bool(wire.watches[index].clean)))
        return found

    def look_wanted(self):
        """Whether there was a new context since the last call that the server does not know of. Call it after
        ``deaths``."""
        return bool(exchange32(&self.running().look, 0))

    def rebind(self, GrantsPage grants_page not None, RelayPage relay_page=None, key=None):
        """A new server: publish everything in its own pages. An argument that is None leaves its page as it is."""
        cdef Wire* wire = self.running()
        cdef RelayPage relays = self.relay_page if relay_page is None else relay_page
        cdef uint32_t index = wire.key if key is None else check_key(key)
        cdef Grants* grants = grants_page.get()
        cdef Relays* page = relays.get()
        grants_page.pin()
        relays.pin()
        with nogil:
            bind_entry(wire, grants, page, index)
            ring_relay(wire)
        self.grants_page.unpin()
        self.relay_page.unpin()
        self.grants_page = grants_page
        self.relay_page = relays

    def stats(self):
        """Counters since the start, as ``RelayStats``."""
        cdef Wire* wire = self.running()
        return RelayStats(wire.wakes, wire.rings, wire.returns, wire.undone, wire.hushed, wire.throttled)

    def close(self):
        """Stop all threads and release the pages. The entry keeps what was last published. Idempotent."""
        cdef Wire* wire = self.wire
        cdef int index
        if wire == NULL:
            return
        self.wire = NULL
        with nogil:
            pthread_mutex_lock(&wire.lock)
            wire.stopping = 1
            pthread_mutex_unlock(&wire.lock)
            if wire.thread:
                ring_relay(wire)
                pthread_join(wire.thread, NULL)
            for index in range(MAX_PROCESSES):
                end_watch(wire, index)
            pthread_mutex_destroy(&wire.lock)
            if wire.events_descriptor >= 0:
                close_descriptor(wire.events_descriptor)
        free(wire)
        self.activity_page.unpin()
        self.grants_page.unpin()
        self.relay_page.unpin()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def closed(self):
        return self.wire == NULL


cdef int check_slot(int slot) except -1:
    if not 0 <= slot < MAX_PROCESSES:
        raise IndexError(f"slot {slot}: a vGPU has slots 0 … {MAX_PROCESSES - 1}")
    return slot


cdef uint32_t check_key(object key) except? 0xFFFFFFFF:
    if not 0 <= key < MAX_VGPUS:
        raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {MAX_VGPUS - 1}")
    return key
