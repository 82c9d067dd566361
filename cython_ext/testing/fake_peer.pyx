"""Emulated hooks and an emulated relay, for tests and benchmarks without CUDA.

``Process`` is an emulated hook: it reads and writes one slot of the pages as a hook does. ``Voice`` is an emulated
relay without processes. Both wait in native code without the GIL, so that a test measures the native path.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.pages.layout cimport (
    GRANTS_TRACED, MAX_PROCESSES, MAX_VGPUS, SLOT_ACTIVE, ActivityPage as Activity, GrantsPage as Grants, Plan,
    RelayEntry, RelayPage as Relays, Slot, TraceRecord, TracedActivity,
)
from cython_ext.logic.gate.baton cimport baton_ours
from cython_ext.logic.gate.gate cimport GateState, lease_usable
from cython_ext.logic.gate.plan cimport read_plan
from cython_ext.logic.sync.robust cimport ROBUST_LOCKED, robust_drop, robust_forget, robust_hold
from cython_ext.logic.gate.trace cimport trace_put
from cython_ext.native cimport (
    add32, compiler_fence, exchange32, fence, fence_all, futex_wait, futex_wake, load32, load64, loadi64, now_ns, or64,
    pause, store32, store64, storei64,
)
from cython_ext.pages.activitypage cimport ActivityPage
from cython_ext.pages.grantspage cimport GrantsPage
from cython_ext.pages.relaypage cimport RelayPage

cdef extern from "limits.h":
    const int INT_MAX

cdef extern from "sched.h" nogil:
    int sched_yield()

cdef enum:
    LOOK_NS = 1_000_000      # a waiting hook reads the page again at the latest after this: a return may be undone
    SPINS = 1 << 14          # some 10 us; after that, the other thread may need this very core


cdef inline void meet(const uint32_t* word, uint32_t value) noexcept nogil:
    """Wait until the other thread has written ``value``."""
    cdef uint32_t spins = 0
    while load32(word) != value:
        spins += 1
        if spins > SPINS:
            sched_yield()


cdef uint32_t usable_epoch(Grants* grants, Activity* activity, Slot* slot, int64_t at_ns) noexcept nogil:
    """The epoch under which the process may submit now; 0: none."""
    cdef GateState state
    cdef Plan plan
    memset(&plan, 0, sizeof(plan))
    fence()
    if not read_plan(grants, &plan):
        return 0
    state.now_ns = at_ns
    state.go_epoch = load32(&grants.go_epoch)
    state.returned_epoch = load32(&activity.returned_epoch)
    state.drained_epoch = load32(&slot.drained_epoch)
    if lease_usable(&plan.current, &state):
        return plan.current.epoch
    return plan.next.epoch if lease_usable(&plan.next, &state) else 0


cdef class Process:
    """An emulated hook in one slot. The slot must not belong to a real hook."""

    cdef ActivityPage activity_page
    cdef GrantsPage grants_page
    cdef Activity* activity
    cdef Grants* grants
    cdef Slot* slot

    def __cinit__(self, ActivityPage activity_page not None, GrantsPage grants_page not None, int slot):
        self.slot = activity_page.slot(slot)
        activity_page.pin()
        self.activity_page = activity_page
        self.activity = activity_page.get()
        grants_page.pin()
        self.grants_page = grants_page
        self.grants = grants_page.get()

    def __dealloc__(self):
        if self.activity_page is not None:
            self.activity_page.unpin()
        if self.grants_page is not None:
            self.grants_page.unpin()

    def activate(self):
        """Hold the slot's mutex until this thread ends, and mark the slot as active."""
        robust_forget()          # this process may be the child of a fork
        if robust_hold(<uint32_t*>&self.slot.alive) != ROBUST_LOCKED:
            raise RuntimeError("another process holds this slot")
        store32(&self.slot.state, SLOT_ACTIVE)

    def release(self):
        """Release the slot's mutex, as a hook does at a clean exit."""
        robust_drop(<uint32_t*>&self.slot.alive)

    def pretend_active(self):
        """Mark the slot as active without holding its mutex: for races inside one process."""
        store32(&self.slot.state, SLOT_ACTIVE)

    def want(self):
        storei64(&self.slot.want_since_ns, now_ns())
        exchange32(&self.slot.want, 1)
        self.ring()

    def make_context(self, int64_t at_ns):
        """Report a new CUDA context at ``at_ns``. A hook waits until the broker has charged it."""
        storei64(&self.activity.context_ns, at_ns)
        self.ring()

    def submit(self, uint32_t epoch):
        """Record that the process submits work under the lease ``epoch``."""
        if load32(&self.slot.last_epoch) != epoch:
            storei64(&self.slot.first_submit_ns, now_ns())
        store32(&self.slot.last_epoch, epoch)
        exchange32(&self.slot.undrained, 1)

    def note(self, uint32_t kind, int64_t begin_ns, int64_t end_ns, uint64_t value=0, *, bint torn=0):
        """Write a trace record. ``torn``: the process dies while it writes."""
        cdef TraceRecord* ring = &(<TracedActivity*>self.activity).rings[self.slot - self.activity.slots][0]
        trace_put(ring, &self.slot.traced, kind, begin_ns, end_ns, value)
        if torn:
            store32(&ring[(self.slot.traced - 1) % 512].sequence, 0)

    @property
    def traced(self):
        """Whether the GPU Server records a trace of this vGPU."""
        return load32(&self.grants.flags) & GRANTS_TRACED != 0

    def know_baton(self):
        """Mark the process as one that obeys the baton."""
        store32(&self.slot.baton, 1)

    def has_baton(self):
        return bool(baton_ours(
            load32(&self.activity.baton), loadi64(&self.activity.baton_end_ns),
            <uint32_t>(self.slot - self.activity.slots), now_ns()
        ))

    def submit_with_baton(self, uint32_t epoch):
        """Announce work, then read the baton again, as a gate does. Whether the work went to the GPU."""
        cdef uint32_t word = load32(&self.activity.baton)
        if not self.has_baton():
            return False
        exchange32(&self.slot.undrained, 1)
        fence()
        if load32(&self.activity.baton) != word:
            store32(&self.slot.undrained, 0)
            return False
        store32(&self.slot.last_epoch, epoch)
        self.ring()
        return True

    def tell_sm_count(self, uint32_t count):
        """Report the number of SMs that the process's driver returned."""
        store32(&self.slot.sm_count, count)

    def finish(self):
        """All submitted work has run. The lease goes on, and the process still wants it."""
        exchange32(&self.slot.undrained, 0)
        self.ring()

    def queue_ahead(self, uint32_t turn):
        """Queue work on the GPU ahead of the lease after ``turn``."""
        store32(&self.slot.turn, turn)

    def see_busy(self, int64_t for_ns=0):
        """Report, as the monitor thread does, that the GPU is busy and by prediction stays so for ``for_ns``."""
        storei64(&self.slot.counted_ns, now_ns())
        storei64(&self.slot.predicted_end_ns, now_ns() + for_ns)
        self.ring()

    def be_locked_out(self):
        """Report that the monitor thread lives, but a thread of the program holds the gate."""
        storei64(&self.slot.locked_out_ns, now_ns())

    def leave_unpredicted(self):
        """Report that the hook has no prediction for the submitted work."""
        store32(&self.slot.unpredicted, 1)

    def look(self):
        """Count one check of a waiting gate."""
        store64(&self.slot.gate_waits, self.slot.gate_waits + 1)

    def drain(self, uint32_t epoch, busy_ns=0, int64_t at_ns=-1):
        """Report that all work under the lease has finished. The process still wants a lease."""
        store64(&self.slot.busy_ns, self.slot.busy_ns + <unsigned long>busy_ns)
        storei64(&self.slot.drained_ns, now_ns() if at_ns < 0 else at_ns)
        store32(&self.slot.drained_epoch, epoch)
        exchange32(&self.slot.undrained, 0)
        self.ring()

    def count(self, busy_ns):
        """Add GPU time used, as the hook's meter does."""
        store64(&self.slot.busy_ns, self.slot.busy_ns + <unsigned long>busy_ns)
        storei64(&self.slot.counted_ns, now_ns())

    def affords(self):
        """Whether the vGPU's limit allows more work under a lease without an end."""
        cdef uint64_t used_ns = <uint64_t>loadi64(&self.activity.busy_base_ns)
        cdef int64_t allowed_ns = loadi64(&self.grants.allowed_ns)
        cdef int i
        if allowed_ns == 0 or load32(&self.grants.open_epoch) == 0:
            return True
        for i in range(MAX_PROCESSES):
            if load32(&self.activity.slots[i].state) == SLOT_ACTIVE:
                used_ns += load64(&self.activity.slots[i].busy_ns)
        return <int64_t>used_ns < allowed_ns

    def close(self, uint32_t epoch):
        """Report that the process submits nothing more under the lease and its work ends soon."""
        store32(&self.slot.tail_epoch, epoch)
        self.ring()

    def idle(self):
        """Report that all work has finished and the process wants no lease."""
        exchange32(&self.slot.undrained, 0)
        exchange32(&self.slot.want, 0)
        self.ring()

    def ring(self):
        add32(&self.activity.doorbell, 1)
        futex_wake(&self.activity.doorbell, INT_MAX)

    def usable(self):
        """The epoch under which the process may submit now; 0: none."""
        return usable_epoch(self.grants, self.activity, self.slot, now_ns())

    def wait_lease(self, int64_t timeout_ns=30_000_000_000):
        """Sleep until a lease is usable: (its epoch, the time of that reading). (0, now) after the time-out."""
        cdef int64_t at_ns = now_ns()
        cdef int64_t until_ns = at_ns + timeout_ns
        cdef uint32_t change, epoch
        with nogil:
            while True:
                change = load32(&self.grants.change)
                at_ns = now_ns()
                epoch = usable_epoch(self.grants, self.activity, self.slot, at_ns)
                if epoch or at_ns >= until_ns:
                    break
                futex_wait(&self.grants.change, change, min(until_ns, at_ns + LOOK_NS))
        return epoch, at_ns

    def work(self, int64_t for_ns):
        """Keep a core busy for ``for_ns``, without the GIL."""
        cdef int64_t until_ns = now_ns() + for_ns
        with nogil:
            while now_ns() < until_ns:
                pause()


cdef class Voice:
    """An emulated relay of one vGPU. The key must not belong to a real relay."""

    cdef RelayPage relay_page
    cdef Relays* relays
    cdef uint32_t key

    def __cinit__(self, RelayPage relay_page not None, uint32_t key):
        relay_page.pin()
        self.relay_page = relay_page
        self.relays = relay_page.get()
        self.key = key % MAX_VGPUS

    def __dealloc__(self):
        if self.relay_page is not None:
            self.relay_page.unpin()

    def say(self, *, bint want, uint32_t returned_epoch=0, uint32_t drained_epoch=0, int64_t drained_ns=-1, busy_ns=0,
            int64_t longest_kernel_ns=0, uint32_t submitted_epoch=0, int64_t submitted_ns=0, bint ring=True):
        """Report to the dispatcher, as of now. An epoch of 0 leaves its word unchanged. ``drained_ns`` −1 is now."""
        cdef RelayEntry* entry = &self.relays.entries[self.key]
        store32(&entry.want, want)
        store64(&entry.busy_ns, busy_ns)
        storei64(&entry.counted_ns, now_ns())
        storei64(&entry.longest_kernel_ns, longest_kernel_ns)
        storei64(&entry.drained_ns, now_ns() if drained_ns == -1 else drained_ns)
        if submitted_epoch:
            storei64(&entry.submitted_ns, submitted_ns)
            store32(&entry.submitted_epoch, submitted_epoch)
        if drained_epoch:
            store32(&entry.drained_epoch, drained_epoch)
        if returned_epoch:
            store32(&entry.returned_epoch, returned_epoch)
        or64(&self.relays.dirty[self.key >> 6], (<uint64_t>1) << (self.key & 63))
        if ring:
            add32(&self.relays.doorbell, 1)
            futex_wake(&self.relays.doorbell, INT_MAX)


cdef class Revocation:
    """A thread that launches against a thread that revokes the lease, for many rounds.

    The hook's fast path relies on their order (hook/gate/fastpath.pxd, announce; hook/gate/track.pyx, all_outside).
    Each method runs in a thread of its own.
    """

    cdef uint32_t[128] words     # each used one on a cache line of its own
    cdef uint32_t[1 << 20] far   # more than the caches near the core hold
    cdef uint32_t* inside
    cdef uint32_t* open_epoch
    cdef uint32_t* begun
    cdef uint32_t* ended
    cdef bint passed

    def __cinit__(self):
        self.inside, self.open_epoch, self.begun, self.ended = (
            &self.words[16], &self.words[48], &self.words[80], &self.words[112]
        )

    def launch(self, uint32_t rounds):
        """Announce a launch and read whether the lease is open, once a round.

        Slow stores precede each announcement, as in a driver, so that without a fence it arrives late.
        """
        cdef uint32_t index, store
        with nogil:
            for index in range(1, rounds + 1):
                meet(self.begun, index)
                for store in range(8):
                    store32(&self.far[(index * 8 + store) * 4097 % (1 << 20)], index)
                store32(self.inside, 1)
                compiler_fence()
                self.passed = load32(self.open_epoch) != 0
                store32(self.ended, index)

    def revoke(self, uint32_t rounds, bint fenced):
        """Close the lease and read the announcement, once a round. Returns how many launches passed unseen.

        ``fenced``: with the hook's fence on all threads, else with a fence of this thread alone. Raises
        ``RuntimeError`` if the kernel has no such fence.
        """
        cdef uint32_t index, unseen = 0
        cdef bint seen, done = 1
        with nogil:
            for index in range(1, rounds + 1):
                store32(self.inside, 0)
                store32(self.open_epoch, 1)
                store32(self.begun, index)
                for _ in range(index % 1024):
                    compiler_fence()
                store32(self.open_epoch, 0)
                if fenced:
                    done &= fence_all()
                else:
                    fence()
                seen = load32(self.inside) != 0
                meet(self.ended, index)
                unseen += self.passed and not seen
        if not done:
            raise RuntimeError("membarrier(2) is not to be had here")
        return unseen
