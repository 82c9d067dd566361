"""The relay: the native thread of a broker that makes one vGPU's wish of the wishes of its processes.

Theory of operation
-------------------
A hook changes its slot and rings the activity page's doorbell. The relay's thread wakes, merges the slots of admitted
processes into the vGPU's ``RelayEntry``, sets its dirty bit, and rings the dispatcher if that must act: the want
changed, or a lease is over. Figures alone (busy time, launches) wait for the dispatcher's next look. Python is on none
of this.

*Drained.* An epoch is over when its end has passed, a newer one is in force, or the plan does not show it any more.
The vGPU has drained as far as the slowest process with work on the GPU has, and not beyond the newest epoch that is
over: a process may claim any epoch, the relay passes on only what the plan allows.

*Early return.* When nobody wants, the lease in force goes back. Processes may wake at that very moment, so both sides
write first and look second (Dekker): the relay stores ``returned_epoch`` and then scans the slots again; a process
stores ``want`` and then reads ``returned_epoch``. At least one sees the other. If the relay finds a want it undoes the
return before telling anybody, and wakes the page's sleepers, since one may just have taken the lease for lost.

*Deaths.* Each admitted process has a watcher: a thread with a small stack, asleep on the lock word of ``Slot.alive``,
which the process's hook thread holds for life. The kernel marks the word (FUTEX_OWNER_DIED) and wakes us in the very
exit of that thread. The watcher never locks the mutex, it only asks to be woken (FUTEX_WAITERS): locking would put our
thread into a list whose links lie in the tenant's memory. On death the slot wants nothing any more and the lease is
back within a wake; its memory is Python's business.

The tenant's page
-----------------
A tenant can write anything anywhere in it, at any time, and use its futexes: move our sleeping thread to another word
(FUTEX_REQUEUE), wake us for ever, pretend to be dead or immortal. So: words are copied once and then judged; every
wait ends after a second or two; more than RING_BURST wakes in a row cost a sleep each; only slots that the broker
admitted are read. What remains is a vGPU that harms itself. An immortal mutex is found out by the broker's pidfd
(``mark_dead``).

Locks and order
---------------
``lock`` protects everything of ours between the thread and Python; the watchers take none. Under it no other lock is
taken and nothing waits. The entry is written in the order in which the dispatcher relies on it (dispatcher.pyx).
"""

from libc.errno cimport errno
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strerror

from cython_ext.layout cimport (
    FOREVER_NS, LEASE_ON_GO, MAX_PROCESSES, MAX_VGPUS, SLOT_ACTIVE, SLOT_DEAD, SLOT_FREE,
    ActivityPage as Activity, GrantsPage as Grants, Lease, Plan, RelayEntry, RelayPage as Relays, Slot,
    epoch_reached, pthread_mutex_t,
)
from cython_ext.logic.plan cimport read_plan
from cython_ext.native cimport (
    add32, and64, cas32, exchange32, exchange64, fence, futex_wait, futex_wake, load32, load64, loadi64, now_ns, or64,
    pause, store32, store64, storei64,
)
from cython_ext.pages cimport ActivityPage, GrantsPage, RelayPage
from cython_ext.threads cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, close_descriptor, eventfd, eventfd_read, eventfd_write, pthread_join,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, pthread_self,
    may_spin, pthread_setname_np, pthread_t, sleep_until, start_thread,
)

from cython_ext.readings import Death, RelayStats

cdef extern from "limits.h":
    const int INT_MAX

cdef extern from "vgpu_native.h" nogil:
    const uint32_t FUTEX_WAITERS, FUTEX_OWNER_DIED, FUTEX_TID_MASK
    const int ETIMEDOUT

cdef enum:
    LOOK_NS = 1_000_000_000      # no wait on a tenant's word is longer
    RING_BURST = 256
    HANDOVER_BEFORE_NS = 50_000  # the drain at a lease's end is spun for, from so long before ...
    HANDOVER_AFTER_NS = 300_000  # ... until so long after
    RING_REFILL_NS = 500_000     # a vGPU's sustained doorbells: 2,000 a second
    STORM = 64                   # wakes of a watcher for nothing before it slows down
    STORM_NS = 1_000_000
    RECENT = 1 << 30             # epochs closer than this compare safely

    WATCH_NONE = 0
    WATCH_ASKED = 1              # until the process has locked its mutex
    WATCH_RUNNING = 2


cdef struct Watch:
    Wire* wire
    Slot* slot
    pthread_t thread
    uint32_t state               # WATCH_*, under the lock
    uint32_t stop
    uint32_t ended
    int64_t died_ns
    bint clean
    uint64_t busy_ns             # as last merged
    uint64_t launches


cdef struct Wire:
    pthread_mutex_t lock
    Activity* activity
    Grants* grants
    Relays* relays
    uint32_t key
    bint stopping
    bint retell                  # a new page: tell everything
    int events_descriptor
    uint64_t admitted            # bit per slot
    uint64_t died                # bit per slot, until Python has heard
    # --- what was told, and what is known of the lease in force
    bint want
    uint32_t told_drained
    uint32_t told_returned
    Lease held                   # the newest lease that was usable; epoch 0: none yet
    Lease before                 # the one before it
    Lease over                   # the newest of the two that is over, as of this merge
    int64_t returned_ns
    uint64_t busy_ns
    uint64_t launches
    # --- doorbell storms
    int64_t budget
    int64_t budget_ns
    uint64_t wakes
    uint64_t rings
    uint64_t returns
    uint64_t undone
    uint64_t throttled
    pthread_t thread
    Watch[64] watches


cdef struct Merged:
    bint want
    uint32_t processes
    bint limited                 # by ``drained_epoch``: somebody has work on the GPU
    uint32_t drained_epoch
    int64_t drained_ns
    int64_t want_since_ns
    int64_t longest_kernel_ns
    int64_t refill_ns
    int64_t predicted_end_ns


cdef inline uint64_t lowest(uint64_t bits) noexcept nogil:
    return bits & (~bits + 1)


cdef inline int index_of(uint64_t bit) noexcept nogil:
    cdef int index = 0
    while not bit & 1:
        bit >>= 1
        index += 1
    return index


cdef inline uint64_t grown(uint64_t total, uint64_t* last, uint64_t now) noexcept nogil:
    """``total`` plus what a counter has grown by; one that fell began anew."""
    cdef uint64_t growth = now - last[0] if now > last[0] else 0
    last[0] = now
    return total + growth if growth <= UINT64_MAX - total else UINT64_MAX


cdef inline bint any_want(Wire* wire) noexcept nogil:
    cdef uint64_t left = wire.admitted
    cdef Slot* slot
    while left:
        slot = &wire.activity.slots[index_of(lowest(left))]
        if load32(&slot.state) == SLOT_ACTIVE and (load32(&slot.want) or load32(&slot.undrained)):
            return 1
        left &= left - 1
    return 0


cdef inline void merge_slots(Wire* wire, uint32_t held_epoch, Merged* merged) noexcept nogil:
    cdef uint64_t left = wire.admitted
    cdef uint32_t drained, undrained
    cdef int64_t since
    cdef int index
    cdef Slot* slot
    memset(merged, 0, sizeof(Merged))
    merged.want_since_ns = INT64_MAX
    merged.refill_ns = INT64_MAX
    while left:
        index = index_of(lowest(left))
        left &= left - 1
        slot = &wire.activity.slots[index]
        if load32(&slot.state) != SLOT_ACTIVE:
            continue
        merged.processes += 1
        undrained = load32(&slot.undrained)
        drained = load32(&slot.drained_epoch)
        if load32(&slot.want) or undrained:
            merged.want = 1
            since = loadi64(&slot.want_since_ns)
            if 0 < since < merged.want_since_ns:
                merged.want_since_ns = since
        if undrained and (not merged.limited or not epoch_reached(drained, merged.drained_epoch)):
            merged.limited = 1
            merged.drained_epoch = drained
        merged.drained_ns = max(merged.drained_ns, loadi64(&slot.drained_ns))
        merged.longest_kernel_ns = max(merged.longest_kernel_ns, loadi64(&slot.longest_kernel_ns))
        merged.predicted_end_ns = max(merged.predicted_end_ns, loadi64(&slot.predicted_end_ns))
        if held_epoch != 0 and load32(&slot.last_epoch) == held_epoch and loadi64(&slot.refill_ns) > 0:
            merged.refill_ns = min(merged.refill_ns, loadi64(&slot.refill_ns))
        wire.busy_ns = grown(wire.busy_ns, &wire.watches[index].busy_ns, load64(&slot.busy_ns))
        wire.launches = grown(wire.launches, &wire.watches[index].launches, load64(&slot.launches))
    if merged.want_since_ns == INT64_MAX:
        merged.want_since_ns = 0


cdef inline bint begun(const Lease* lease, uint32_t go_epoch, int64_t at_ns) noexcept nogil:
    if lease.epoch == 0:
        return 0
    if lease.flags & LEASE_ON_GO:
        return epoch_reached(go_epoch, lease.epoch) or at_ns >= lease.go_by_ns
    return at_ns >= lease.start_ns


cdef inline void follow_plan(Wire* wire, int64_t at_ns) noexcept nogil:
    """Bring ``held``, ``before`` and ``over`` up to date. What is over may be in force again: ends move."""
    cdef uint32_t go_epoch
    cdef Plan plan
    cdef Lease* newest
    cdef bint shown
    if not read_plan(wire.grants, &plan):
        return
    go_epoch = load32(&wire.grants.go_epoch)
    newest = &plan.next if begun(&plan.next, go_epoch, at_ns) else &plan.current
    shown = begun(newest, go_epoch, at_ns)
    if shown:
        if newest.epoch != wire.held.epoch:
            wire.before = wire.held
        wire.held = newest[0]
    if not shown or at_ns >= wire.held.end_ns or wire.held.epoch == wire.told_returned:
        wire.over = wire.held
    else:
        wire.over = wire.before


cdef inline bint news(uint32_t epoch, uint32_t told) noexcept nogil:
    return epoch != 0 and epoch != told and not (epoch_reached(told, epoch) and told - epoch < RECENT)


cdef inline bint give_back(Wire* wire, int64_t at_ns) noexcept nogil:
    """Return the lease in force, unless somebody wakes meanwhile. Whether it is returned."""
    cdef uint32_t before = exchange32(&wire.activity.returned_epoch, wire.held.epoch)
    fence()
    if any_want(wire):
        cas32(&wire.activity.returned_epoch, wire.held.epoch, before)
        futex_wake(&wire.grants.change, INT_MAX)
        wire.undone += 1
        return 0
    wire.returned_ns = at_ns
    wire.returns += 1
    return 1


cdef inline void forget_return(Wire* wire, int64_t at_ns) noexcept nogil:
    """A returned epoch that the plan has long stopped showing is of no use, and in 2³¹ leases it would do harm."""
    cdef uint32_t returned = load32(&wire.activity.returned_epoch)
    cdef Plan plan
    if returned == 0 or at_ns - wire.returned_ns < LOOK_NS or not read_plan(wire.grants, &plan):
        return
    if plan.current.epoch != returned and plan.next.epoch != returned:
        cas32(&wire.activity.returned_epoch, returned, 0)


cdef inline bint merge(Wire* wire) noexcept nogil:
    """Bring the entry up to date. Whether the dispatcher must be rung. Under the lock."""
    cdef RelayEntry* entry = &wire.relays.entries[wire.key]
    cdef int64_t at_ns = now_ns()
    cdef bint must_ring = wire.retell
    cdef bint returned = 0
    cdef uint32_t drained = 0
    cdef Merged merged
    follow_plan(wire, at_ns)
    merge_slots(wire, wire.held.epoch, &merged)
    if not merged.want and wire.held.epoch != 0 and wire.held.epoch != wire.over.epoch:
        returned = give_back(wire, at_ns)
        merged.want = not returned
    if not returned and wire.over.epoch != 0:
        drained = wire.over.epoch
        if merged.limited and not epoch_reached(merged.drained_epoch, drained):
            drained = merged.drained_epoch
    wire.retell = 0
    # Order matters: see dispatcher.pyx.
    if merged.want != wire.want or must_ring:
        wire.want = merged.want
        store32(&wire.activity.want, merged.want)
        store32(&entry.want, merged.want)
        must_ring = 1
    entry.processes = merged.processes
    store64(&entry.busy_ns, wire.busy_ns)
    store64(&entry.launches, wire.launches)
    storei64(&entry.longest_kernel_ns, merged.longest_kernel_ns)
    storei64(&entry.predicted_end_ns, merged.predicted_end_ns)
    storei64(&entry.want_since_ns, merged.want_since_ns)
    if merged.refill_ns != INT64_MAX:
        storei64(&entry.refill_ns, merged.refill_ns)
    if returned:
        wire.told_returned = wire.held.epoch
        storei64(&entry.drained_ns, at_ns)
        store32(&entry.returned_epoch, wire.held.epoch)
        must_ring = 1
    elif drained != wire.told_returned and news(drained, wire.told_drained):
        wire.told_drained = drained
        storei64(&entry.drained_ns, drained_at_ns(wire, &merged, at_ns))
        store32(&entry.drained_epoch, drained)
        must_ring = 1
    or64(&wire.relays.dirty[wire.key >> 6], (<uint64_t>1) << (wire.key & 63))
    forget_return(wire, at_ns)
    return must_ring


cdef inline int64_t drained_at_ns(Wire* wire, const Merged* merged, int64_t at_ns) noexcept nogil:
    """When the lease that is over had drained; one that nobody used was held to its end."""
    if merged.drained_ns <= wire.over.start_ns:
        return min(at_ns, wire.over.end_ns)
    return min(at_ns, merged.drained_ns)


cdef inline void ring_dispatcher(Wire* wire) noexcept nogil:
    wire.rings += 1
    add32(&wire.relays.doorbell, 1)
    futex_wake(&wire.relays.doorbell, INT_MAX)


cdef inline void ring_relay(Wire* wire) noexcept nogil:
    add32(&wire.activity.doorbell, 1)
    futex_wake(&wire.activity.doorbell, INT_MAX)


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


cdef void* wire_main(void* argument) noexcept nogil:
    cdef Wire* wire = <Wire*>argument
    cdef uint32_t heard
    cdef int64_t at_ns, end_ns
    cdef bint must_ring, spins = may_spin()
    pthread_setname_np(pthread_self(), "vgpu-relay")
    while True:
        throttle(wire)
        heard = load32(&wire.activity.doorbell)
        pthread_mutex_lock(&wire.lock)
        if wire.stopping:
            pthread_mutex_unlock(&wire.lock)
            return NULL
        wire.wakes += 1
        must_ring = merge(wire)
        start_watches(wire)
        if must_ring:
            ring_dispatcher(wire)
        end_ns = wire.held.end_ns if spins and news(wire.held.epoch, wire.told_drained) else <int64_t>FOREVER_NS
        pthread_mutex_unlock(&wire.lock)
        at_ns = now_ns()
        if end_ns == FOREVER_NS or at_ns >= end_ns + HANDOVER_AFTER_NS:
            futex_wait(&wire.activity.doorbell, heard, at_ns + LOOK_NS)
        elif at_ns < end_ns - HANDOVER_BEFORE_NS:
            futex_wait(&wire.activity.doorbell, heard, min(at_ns + LOOK_NS, end_ns - HANDOVER_BEFORE_NS))
        else:
            while load32(&wire.activity.doorbell) == heard and now_ns() < end_ns + HANDOVER_AFTER_NS:
                pause()


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
            bury(watch)
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
    """The process is no more: whatever it wanted, it does not."""
    if load32(&slot.state) != SLOT_FREE:
        store32(&slot.state, SLOT_DEAD)
    store32(&slot.want, 0)
    store32(&slot.undrained, 0)


cdef inline void bury(Watch* watch) noexcept nogil:
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
    pthread_mutex_unlock(&wire.lock)
    if state == WATCH_RUNNING:
        store32(&watch.stop, 1)
        while not load32(&watch.ended):
            # Again and again: it may be about to sleep, and a tenant may have moved it to another word meanwhile.
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
    # What it did before we came was told by our predecessor, if by anybody.
    watch.busy_ns = load64(&watch.slot.busy_ns)
    watch.launches = load64(&watch.slot.launches)
    watch.state = WATCH_ASKED
    wire.admitted |= (<uint64_t>1) << index
    pthread_mutex_unlock(&wire.lock)
    ring_relay(wire)


cdef void bind_entry(Wire* wire, Grants* grants, Relays* relays, uint32_t key) noexcept nogil:
    cdef RelayEntry* entry = &relays.entries[key]
    pthread_mutex_lock(&wire.lock)
    wire.grants = grants
    wire.relays = relays
    wire.key = key
    wire.told_returned = load32(&entry.returned_epoch)
    wire.told_drained = load32(&entry.drained_epoch)
    wire.busy_ns = max(wire.busy_ns, load64(&entry.busy_ns))
    wire.launches = max(wire.launches, load64(&entry.launches))
    memset(&wire.held, 0, sizeof(Lease))
    memset(&wire.before, 0, sizeof(Lease))
    memset(&wire.over, 0, sizeof(Lease))
    wire.retell = 1
    pthread_mutex_unlock(&wire.lock)


cdef class Relay:
    """Merges a vGPU's processes into its entry of the relay page, and watches them die.

    Pages stay mapped until ``close``, which is refused by themselves before.
    """

    cdef Wire* wire
    cdef ActivityPage activity_page
    cdef GrantsPage grants_page
    cdef RelayPage relay_page

    def __cinit__(self, ActivityPage activity_page not None, GrantsPage grants_page not None,
                  RelayPage relay_page not None, key):
        cdef Wire* wire
        check_key(key)
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
        if not 0 <= slot < MAX_PROCESSES:
            raise IndexError(f"slot {slot}: a vGPU has slots 0 … {MAX_PROCESSES - 1}")
        return slot

    def fileno(self):
        """Readable when ``deaths`` has something. The descriptor is the relay's: do not close it."""
        return self.running().events_descriptor

    def watch(self, int slot):
        """Admit the process of a reserved or active slot: merge its words from now on, and tell when it dies.

        A slot that was watched before is watched anew, for its new process.
        """
        self.known(slot)
        with nogil:
            begin_watch(self.wire, slot)

    def mark_dead(self, int slot):
        """The process is gone by a better witness than its mutex: a pidfd. No death is reported then."""
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

    def rebind(self, GrantsPage grants_page not None, RelayPage relay_page=None, key=None):
        """A new server: tell it everything, in its own pages. What is None stays as it is."""
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
        return RelayStats(wire.wakes, wire.rings, wire.returns, wire.undone, wire.throttled)

    def close(self):
        """Stop all threads and let go of the pages. The entry stays as it was told last. Idempotent."""
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


cdef uint32_t check_key(object key) except? 0xFFFFFFFF:
    if not 0 <= key < MAX_VGPUS:
        raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {MAX_VGPUS - 1}")
    return key
