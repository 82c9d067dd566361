"""The three shared pages: what stands in them, written and read from Python (layout: ``layout.pxd``).

The mutexes in an activity page are never locked through libc here. Unlocking a robust mutex makes glibc follow list
pointers that lie *in the page*, where a tenant can put any address; a broker that did so could be made to write
anywhere in itself. Servers look at the lock word alone (relay.pyx), or use the ledger's operations, which know this.
"""

import os

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cython_ext cimport layout, native
from cython_ext.logic.ledger cimport LEDGER_BROKEN, LEDGER_OK, ledger_reap
from cython_ext.logic.trace cimport trace_get
from cython_ext.page cimport F_SEAL_FUTURE_WRITE, Page

from cython_ext.readings import (
    GrantsFlag,
    LeaseReading,
    PageMode,
    PlanReading,
    RelayReading,
    SlotReading,
    SlotState,
    TraceReading,
)

cdef size_t APPENDED = sizeof(layout.TracedActivity) - sizeof(layout.ActivityPage)


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutexattr_t:
        pass
    int pthread_mutexattr_init(pthread_mutexattr_t* attributes)
    int pthread_mutexattr_setpshared(pthread_mutexattr_t* attributes, int shared)
    int pthread_mutexattr_setrobust(pthread_mutexattr_t* attributes, int robust)
    int pthread_mutexattr_destroy(pthread_mutexattr_t* attributes)
    int pthread_mutex_init(layout.pthread_mutex_t* mutex, pthread_mutexattr_t* attributes)
    const int PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST

cdef extern from "limits.h":
    const int INT_MAX

cdef extern from "string.h" nogil:
    size_t strnlen(const char* text, size_t size)


class SlotsFull(RuntimeError):
    """Every process slot of the vGPU is taken."""


cdef int64_t bounded(uint64_t value) noexcept nogil:
    """A tenant's unsigned word as one that fits everywhere (SQLite, msgpack): at most 2⁶³ − 1."""
    return <int64_t>value if value <= <uint64_t>INT64_MAX else INT64_MAX


cdef int64_t at_least_zero(int64_t value) noexcept nogil:
    return value if value > 0 else 0


cdef str text_of(const char* source, size_t size):
    """At most ``size`` bytes up to NUL, as printable text: it ends up on an operator's terminal."""
    raw = PyBytes_FromStringAndSize(source, strnlen(source, size))
    return "".join(c if c.isprintable() else "?" for c in raw.decode("utf-8", "replace"))


cdef int put_text(char* target, size_t size, str value, str what) except -1:
    raw = value.encode()
    if len(raw) >= size:
        raise ValueError(f"{what} is {len(raw)} bytes of UTF-8, at most {size - 1} fit: {value!r}")
    memset(target, 0, size)
    memcpy(target, <const char*>raw, len(raw))
    return 0


cdef uint64_t as_bytes(object value, str what) except? 1:
    if not 0 <= value <= INT64_MAX:
        raise ValueError(f"{what} must lie within 0 … 2⁶³ − 1, not {value}")
    return value


cdef int64_t as_ns(object value, str what) except? 1:
    if not 0 <= value <= INT64_MAX:
        raise ValueError(f"{what} must lie within 0 … 2⁶³ − 1 ns, not {value}")
    return value


cdef object lease_reading(layout.Lease* lease):
    if lease.epoch == 0:
        return None
    endless = bool(lease.flags & layout.LEASE_OPEN)
    return LeaseReading(
        lease.epoch, lease.start_ns, None if endless else lease.end_ns,
        None if lease.go_by_ns == INT64_MAX else lease.go_by_ns, bool(lease.flags & layout.LEASE_ON_GO),
    )


cdef class GrantsPage(Page):
    """What a vGPU may do; written by its GPU Server alone. Amounts in bytes, times in CLOCK_MONOTONIC ns."""

    cdef layout.GrantsPage* get(self) except NULL:
        self.check_open()
        return <layout.GrantsPage*>self.base

    @staticmethod
    def create(*, vgpu_id, gpu_uuid, mode, generation, memory_limit_bytes, total_memory_bytes,
               process_limit_bytes=0, implicit_bytes=0, window_ns=1_000_000, grace_ns=10_000_000_000, flags=0):
        """Make and seal the page of one vGPU. ``fileno`` is a read-only descriptor, for broker and hooks."""
        cdef GrantsPage self = GrantsPage.__new__(GrantsPage)
        self.make("vgpu-grants", sizeof(layout.GrantsPage), layout.GRANTS_MAGIC, F_SEAL_FUTURE_WRITE)
        cdef layout.GrantsPage* page = self.get()
        page.generation = generation
        page.mode = PageMode(mode)
        page.total_memory_bytes = as_bytes(total_memory_bytes, "total_memory_bytes")
        put_text(page.vgpu_id, sizeof(page.vgpu_id), vgpu_id, "the vGPU's id")
        put_text(page.gpu_uuid, sizeof(page.gpu_uuid), gpu_uuid, "the GPU's UUID")
        self.grace_ns = grace_ns
        self.window_ns = window_ns
        self.memory_limit_bytes = memory_limit_bytes
        self.process_limit_bytes = process_limit_bytes
        self.implicit_bytes = implicit_bytes
        self.flags = flags
        page.alive_ns = native.now_ns()
        # The seal holds even for a writable descriptor; a read-only one says so in /proc/PID/fdinfo as well.
        read_only = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(self.descriptor)
        self.descriptor = read_only
        return self

    @staticmethod
    def map_readonly(int descriptor):
        """Map a page made elsewhere; the descriptor stays the caller's. Raises ``PageError``."""
        cdef GrantsPage self = GrantsPage.__new__(GrantsPage)
        self.adopt(descriptor, sizeof(layout.GrantsPage), layout.GRANTS_MAGIC, False)
        return self

    @property
    def generation(self):
        return self.get().generation

    @property
    def vgpu_id(self):
        return text_of(self.get().vgpu_id, sizeof(self.get().vgpu_id))

    @property
    def gpu_uuid(self):
        return text_of(self.get().gpu_uuid, sizeof(self.get().gpu_uuid))

    @property
    def total_memory_bytes(self):
        return self.get().total_memory_bytes

    @property
    def mode(self):
        return PageMode(self.get().mode)

    @mode.setter
    def mode(self, value):
        self.check_writable()
        native.store32(&self.get().mode, PageMode(value))

    @property
    def flags(self):
        return GrantsFlag(native.load32(&self.get().flags))

    @flags.setter
    def flags(self, value):
        """Sleepers are woken: a removed vGPU's gates must fail, not wait."""
        self.check_writable()
        native.store32(&self.get().flags, GrantsFlag(value))
        native.add32(&self.get().change, 1)
        self.wake()

    @property
    def memory_limit_bytes(self):
        return native.load64(&self.get().memory_limit_bytes)

    @memory_limit_bytes.setter
    def memory_limit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().memory_limit_bytes, as_bytes(value, "memory_limit_bytes"))

    @property
    def process_limit_bytes(self):
        """The most that one process may own; 0: as much as the vGPU."""
        return native.load64(&self.get().process_limit_bytes)

    @process_limit_bytes.setter
    def process_limit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().process_limit_bytes, as_bytes(value, "process_limit_bytes"))

    @property
    def card_limit_bytes(self):
        """Of its limit what it may own just now, if that depends on others, but for managed memory of an oversubscribed
        one; 0: all of it."""
        return native.load64(&self.get().card_limit_bytes)

    @card_limit_bytes.setter
    def card_limit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().card_limit_bytes, as_bytes(value, "card_limit_bytes"))

    @property
    def present_bytes(self):
        """Of what can be moved, so much may be on the card while it comes there; 0: all of it."""
        return native.load64(&self.get().present_bytes)

    @present_bytes.setter
    def present_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().present_bytes, as_bytes(value, "present_bytes"))

    @property
    def spare_bytes(self):
        """An allocation that waits for more room than this waits in vain; 0: not known."""
        return native.load64(&self.get().spare_bytes)

    @spare_bytes.setter
    def spare_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().spare_bytes, as_bytes(value, "spare_bytes"))

    @property
    def implicit_bytes(self):
        return native.load64(&self.get().implicit_bytes)

    @implicit_bytes.setter
    def implicit_bytes(self, value):
        self.check_writable()
        native.store64(&self.get().implicit_bytes, as_bytes(value, "implicit_bytes"))

    @property
    def window_ns(self):
        return native.loadi64(&self.get().window_ns)

    @window_ns.setter
    def window_ns(self, value):
        self.check_writable()
        native.storei64(&self.get().window_ns, as_ns(value, "window_ns"))

    @property
    def grace_ns(self):
        return native.loadi64(&self.get().grace_ns)

    @grace_ns.setter
    def grace_ns(self, value):
        self.check_writable()
        native.storei64(&self.get().grace_ns, as_ns(value, "grace_ns"))

    @property
    def alive_ns(self):
        """When the server last showed life. Written by the dispatcher."""
        return native.loadi64(&self.get().alive_ns)

    def wake(self):
        """Wake everybody who waits on the page; works on read-only mappings. Used when a page's server is no more."""
        native.futex_wake(&self.get().change, INT_MAX)

    def plan(self):
        """The published plan. May be from a moment ago; never a mixture of two."""
        cdef layout.GrantsPage* page = self.get()
        cdef layout.Plan plan
        cdef uint32_t published
        while True:
            published = native.load32(&page.published)
            memcpy(&plan, &page.plans[published & 1], sizeof(plan))
            native.fence()
            if native.load32(&page.published) == published:
                break
        return PlanReading(
            lease_reading(&plan.current), lease_reading(&plan.next), native.load32(&page.open_epoch),
            native.load32(&page.go_epoch), native.load32(&page.free_epoch), native.load32(&page.change),
        )


cdef int init_robust_mutex(layout.pthread_mutex_t* mutex) except -1:
    cdef pthread_mutexattr_t attributes
    pthread_mutexattr_init(&attributes)
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)
    pthread_mutex_init(mutex, &attributes)
    pthread_mutexattr_destroy(&attributes)
    return 0


cdef object slot_reading(int index, layout.Slot* slot):
    state = native.load32(&slot.state)
    return SlotReading(
        index=index,
        # A word that means nothing does not make a process disappear from the books.
        state=SlotState(state) if state <= layout.SLOT_DEAD else SlotState.ACTIVE,
        pid=slot.pid,
        start_time=slot.start_time,
        want=native.load32(&slot.want) != 0,
        undrained=native.load32(&slot.undrained) != 0,
        drained_epoch=slot.drained_epoch,
        last_epoch=slot.last_epoch,
        want_since_ns=at_least_zero(slot.want_since_ns),
        drained_ns=at_least_zero(slot.drained_ns),
        last_submit_ns=at_least_zero(slot.last_submit_ns),
        busy_ns=bounded(slot.busy_ns),
        overrun_ns=bounded(slot.overrun_ns),
        launches=bounded(slot.launches),
        graph_launches=bounded(slot.graph_launches),
        copies=bounded(slot.copies),
        gate_waits=bounded(slot.gate_waits),
        gate_wait_ns=bounded(slot.gate_wait_ns),
        longest_kernel_ns=at_least_zero(slot.longest_kernel_ns),
        refill_ns=at_least_zero(slot.refill_ns),
        reserved_bytes=bounded(slot.reserved_bytes),
        committed_bytes=tuple([bounded(slot.committed_bytes[kind]) for kind in range(layout.MEMORY_KINDS)]),
        peak_bytes=bounded(slot.peak_bytes),
        refusals=bounded(slot.refusals),
        refused_bytes=bounded(slot.refused_bytes),
        command=text_of(slot.command, sizeof(slot.command)),
        turn=native.load32(&slot.turn),
        tail_epoch=native.load32(&slot.tail_epoch),
        copied_bytes=bounded(slot.copied_bytes),
        sm_planned=native.load32(&slot.sm_planned),
        sm_count=native.load32(&slot.sm_count),
        where=native.load32(&slot.where),
        away_bytes=bounded(slot.away_bytes),
        moved_ns=at_least_zero(slot.moved_ns),
        room_bytes=bounded(slot.room_bytes),
        pinned_ns=at_least_zero(slot.pinned_ns),
    )


cdef class ActivityPage(Page):
    """What a vGPU's processes do; written by hooks and broker. Every value read here is a tenant's word."""

    cdef layout.ActivityPage* get(self) except NULL:
        self.check_open()
        return <layout.ActivityPage*>self.base

    cdef layout.Slot* slot(self, int index) except NULL:
        if not 0 <= index < layout.MAX_PROCESSES:
            raise IndexError(f"slot {index}: a vGPU has slots 0 … {layout.MAX_PROCESSES - 1}")
        return &self.get().slots[index]

    @staticmethod
    def create(generation=0):
        """Make and seal a page with all slots free and an empty ledger."""
        cdef ActivityPage self = ActivityPage.__new__(ActivityPage)
        self.make("vgpu-activity", sizeof(layout.ActivityPage), layout.ACTIVITY_MAGIC, 0, APPENDED)
        cdef layout.ActivityPage* page = self.get()
        page.generation = generation
        init_robust_mutex(&page.ledger)
        for index in range(layout.MAX_PROCESSES):
            init_robust_mutex(&page.slots[index].alive)
        return self

    @staticmethod
    def map(int descriptor):
        """Map a page made elsewhere, writable; the descriptor stays the caller's. Raises ``PageError``."""
        cdef ActivityPage self = ActivityPage.__new__(ActivityPage)
        self.adopt(descriptor, sizeof(layout.ActivityPage), layout.ACTIVITY_MAGIC, True, APPENDED)
        return self

    @property
    def generation(self):
        return native.load32(&self.get().generation)

    @generation.setter
    def generation(self, value):
        """Of the server in charge. From here on no gate passes on a grants page of another generation."""
        native.exchange32(&self.get().generation, value)

    @property
    def broker_epoch(self):
        return native.load32(&self.get().broker_epoch)

    def bump_broker_epoch(self):
        """Say that a new broker has taken over, and count the slots anew: the one before may have been killed between a
        slot and its count. Returns the new epoch."""
        native.store32(&self.get().processes, self.processes)
        return (native.add32(&self.get().broker_epoch, 1) + 1) & 0xFFFFFFFF

    @property
    def baton(self):
        """The baton's word; 0: none goes round among the processes."""
        return native.load32(&self.get().baton)

    @property
    def returned_epoch(self):
        return native.load32(&self.get().returned_epoch)

    @property
    def ledger_epoch(self):
        """Advanced by every completed operation of the ledger."""
        return native.load64(&self.get().ledger_epoch)

    @property
    def ends(self):
        """Whether one of the processes has begun to end."""
        cdef layout.ActivityPage* page = self.get()
        cdef int i
        for i in range(layout.MAX_PROCESSES):
            if native.load32(&page.slots[i].state) == layout.SLOT_ACTIVE and native.load32(&page.slots[i].ends):
                return True
        return False

    @property
    def refusals(self):
        """Allocations refused at the limit, of all processes that are not known to be dead: a tenant's word."""
        cdef layout.ActivityPage* page = self.get()
        cdef uint32_t state
        cdef int i
        total = 0
        for i in range(layout.MAX_PROCESSES):
            state = native.load32(&page.slots[i].state)
            if state != layout.SLOT_FREE and state != layout.SLOT_DEAD:
                total += bounded(page.slots[i].refusals)
        return total

    @property
    def processes(self):
        """Slots that are not free, counted now."""
        cdef layout.ActivityPage* page = self.get()
        return sum(1 for i in range(layout.MAX_PROCESSES) if native.load32(&page.slots[i].state) != layout.SLOT_FREE)

    def reserve_slot(self, uint32_t pid, uint64_t start_time, command="", int index=-1, uint32_t sm_planned=0):
        """Take a slot for a process; the vGPU's broker alone does. Its index. Raises ``SlotsFull``.

        ``index``: this very slot, free by the broker's own books whatever the page says; −1: the first that looks free.
        ``sm_planned``: SMs of its partition, 0: none.
        """
        cdef layout.ActivityPage* page = self.get()
        cdef layout.Slot* slot
        if index < 0:
            free = (i for i in range(layout.MAX_PROCESSES) if native.load32(&page.slots[i].state) == layout.SLOT_FREE)
            index = next(free, -1)
        if index < 0:
            raise SlotsFull(f"all {layout.MAX_PROCESSES} process slots of this vGPU are taken")
        slot = self.slot(index)
        # A whole new slot: what a dead or hostile predecessor left in it must not be the newcomer's.
        memset(slot, 0, sizeof(layout.Slot))
        init_robust_mutex(&slot.alive)
        slot.pid = pid
        slot.start_time = start_time
        slot.sm_planned = sm_planned
        raw = command.encode("utf-8", "replace")[:sizeof(slot.command) - 1]
        memcpy(slot.command, <const char*>raw, len(raw))
        native.store32(&slot.state, layout.SLOT_RESERVED)
        native.add32(&page.processes, 1)
        return index

    def reap_slot(self, int index):
        """Free a dead slot: the driver shows its process no more. The bytes it was charged with; 0 if it was not dead.

        Waits some seconds at most for the ledger, whose lock a stopped process may hold. Raises ``TimeoutError``.
        """
        cdef layout.ActivityPage* page = self.get()
        cdef uint64_t freed = 0
        cdef int result
        self.slot(index)
        with nogil:
            result = ledger_reap(page, index, &freed)
        if result == LEDGER_BROKEN:
            raise TimeoutError("a process of the vGPU holds the lock of its memory ledger and does not run")
        if result == LEDGER_OK:
            native.add32(&page.processes, 0xFFFFFFFF)
        return freed

    def slots(self):
        """All slots that are not free, as ``SlotReading``."""
        cdef layout.ActivityPage* page = self.get()
        return [
            slot_reading(index, &page.slots[index])
            for index in range(layout.MAX_PROCESSES)
            if native.load32(&page.slots[index].state) != layout.SLOT_FREE
        ]

    def read_slot(self, int index):
        """One slot as ``SlotReading``, free ones too."""
        return slot_reading(index, self.slot(index))

    def traced(self, int index, uint64_t after=UINT64_MAX):
        """What the process in slot ``index`` noted beyond record ``after``, in order, as ``TraceReading``; the number
        of its newest record, to go on from; and how many were lost, overwritten or torn.

        By default only the number. A number that fell is another process's: all of its records count.
        """
        cdef layout.TracedActivity* page = <layout.TracedActivity*>self.get()
        cdef uint64_t newest = native.load64(&self.slot(index).traced)
        cdef uint64_t number, oldest
        cdef layout.TraceRecord record
        found = []
        if after == UINT64_MAX or after == newest or self.mapped_bytes < sizeof(layout.TracedActivity):
            return found, newest, 0
        if after > newest:
            after = 0
        oldest = after if newest - after <= layout.TRACE_RING else newest - layout.TRACE_RING
        for number in range(oldest + 1, newest + 1):
            if trace_get(page.rings[index], number, &record):
                found.append(TraceReading(
                    record.kind, at_least_zero(record.begin_ns), at_least_zero(record.end_ns), record.value
                ))
        return found, newest, bounded(newest - after - <uint64_t>len(found))

    @property
    def rung(self):
        """How often the doorbell was rung, modulo 2³²."""
        return native.load32(&self.get().doorbell)

    def ring(self):
        """Ring the doorbell, as a hook does."""
        native.add32(&self.get().doorbell, 1)
        native.futex_wake(&self.get().doorbell, INT_MAX)


cdef class RelayPage(Page):
    """A GPU Server's vGPUs, each as its relay sees it."""

    cdef layout.RelayPage* get(self) except NULL:
        self.check_open()
        return <layout.RelayPage*>self.base

    @staticmethod
    def create():
        """Make and seal a page with all entries empty."""
        cdef RelayPage self = RelayPage.__new__(RelayPage)
        self.make("vgpu-relay", sizeof(layout.RelayPage), layout.RELAY_MAGIC, 0)
        return self

    @staticmethod
    def map(int descriptor):
        """Map a page made elsewhere, writable; the descriptor stays the caller's. Raises ``PageError``."""
        cdef RelayPage self = RelayPage.__new__(RelayPage)
        self.adopt(descriptor, sizeof(layout.RelayPage), layout.RELAY_MAGIC, True)
        return self

    @property
    def processes(self):
        """Of all vGPUs of the GPU: admitted, and not known to be dead."""
        cdef layout.RelayPage* page = self.get()
        native.fence()
        return sum(native.load32(&page.entries[key].processes) for key in range(layout.MAX_VGPUS))

    def entry(self, int key):
        """What the relay of vGPU ``key`` (0 … 255) last said."""
        if not 0 <= key < layout.MAX_VGPUS:
            raise IndexError(f"vGPU key {key}: a GPU has keys 0 … {layout.MAX_VGPUS - 1}")
        cdef layout.RelayEntry* entry = &self.get().entries[key]
        return RelayReading(
            want=native.load32(&entry.want) != 0,
            returned_epoch=native.load32(&entry.returned_epoch),
            drained_epoch=native.load32(&entry.drained_epoch),
            processes=entry.processes,
            drained_ns=at_least_zero(entry.drained_ns),
            busy_ns=bounded(entry.busy_ns),
            launches=bounded(entry.launches),
            longest_kernel_ns=at_least_zero(entry.longest_kernel_ns),
            refill_ns=at_least_zero(entry.refill_ns),
            want_since_ns=at_least_zero(entry.want_since_ns),
            tail_epoch=native.load32(&entry.tail_epoch),
            stranded_epoch=native.load32(&entry.stranded_epoch),
            submitted_epoch=native.load32(&entry.submitted_epoch),
            submitted_ns=at_least_zero(entry.submitted_ns),
        )
