"""The page in which a vGPU's processes report their activity, made and read from Python (layout: ``layout.pxd``).

Its mutexes are never locked through libc here. Unlocking a robust mutex makes glibc follow list pointers that lie *in
the page*, where a tenant can put any address. A tenant could make such a broker write anywhere in its own memory.
Servers read the lock word alone (relay.pyx), or use the ledger's operations, which avoid libc.
"""

from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from cython_ext cimport native
from cython_ext.pages cimport layout
from cython_ext.logic.memory.ledger cimport LEDGER_BROKEN, LEDGER_OK, ledger_reap
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.logic.sync.section cimport section_broker
from cython_ext.logic.gate.trace cimport trace_get
from cython_ext.pages.page cimport Page, text_of
from cython_ext.pages.tenant cimport at_least_zero, bounded, part_of

from cython_ext.readings import SlotReading, SlotState, StepsReading, TraceReading

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

cdef extern from "vgpu_native.h" nogil:
    const uint32_t FUTEX_OWNER_DIED, FUTEX_TID_MASK


class SlotsFull(RuntimeError):
    """Every process slot of the vGPU is taken."""


cdef int init_robust_mutex(layout.pthread_mutex_t* mutex) except -1:
    cdef pthread_mutexattr_t attributes
    pthread_mutexattr_init(&attributes)
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED)
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)
    pthread_mutex_init(mutex, &attributes)
    pthread_mutexattr_destroy(&attributes)
    return 0


cdef object claimed_state(layout.Slot* slot):
    state = native.load32(&slot.state)
    # A word without meaning does not make a process disappear from the broker's list.
    return SlotState(state) if state <= layout.SLOT_DEAD else SlotState.ACTIVE


cdef object slot_reading(int index, layout.Slot* slot, object state, object pid, object start_time):
    cdef uint32_t where = native.load32(&slot.where)
    return SlotReading(
        index=index,
        state=state,
        pid=pid,
        start_time=start_time,
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
        where=where & layout.SLOT_PLACE,
        move_result=where >> layout.SLOT_RESULT_SHIFT,
        away_bytes=bounded(slot.away_bytes),
        moved_ns=at_least_zero(slot.moved_ns),
        room_bytes=bounded(slot.room_bytes),
        pinned_ns=at_least_zero(slot.pinned_ns),
        demand_ppm=part_of(native.load32(&slot.demand_ppm)),
        waits_ppm=part_of(native.load32(&slot.waits_ppm)),
        burst_us=native.load32(&slot.burst_us),
        work_ns=bounded(native.load64(&slot.work_ns)),
        pinned_bytes=bounded(native.load64(&slot.pinned_bytes)),
        clean_blocks=native.load32(&slot.clean_blocks),
        imported_bytes=<uint64_t>native.load32(&slot.imported_pieces) * PIECE_BYTES,
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
    def map(int descriptor, repair=False):
        """Map a page made elsewhere, writable; the descriptor stays the caller's. Raises ``PageError``.

        ``repair``: the descriptor comes from a server or a broker, so it leads to an activity page. The header is a
        tenant's word like the rest: it is written anew instead of read.
        """
        cdef ActivityPage self = ActivityPage.__new__(ActivityPage)
        self.adopt(descriptor, sizeof(layout.ActivityPage), layout.ACTIVITY_MAGIC, True, APPENDED, repair)
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
        """Publish that a new broker has taken over, and count the slots anew. Its predecessor may have been killed
        between a slot and its count. If it died with the ledger's lock, the lock is not its own from here on. Returns
        the new epoch."""
        native.store32(&self.get().processes, self.processes)
        self.epoch = native.add32(&self.get().broker_epoch, 1) + 1
        native.store32(&self.get().naming_epoch, self.epoch)
        return self.epoch

    def assert_words(self, generation):
        """Write the words anew that are the broker's alone; only the broker may. Whether a process of the vGPU had
        written there. ``generation``: of the server in charge."""
        cdef layout.ActivityPage* page = self.get()
        cdef uint32_t known = generation
        cdef bint damaged = (
            page.header.magic != layout.ACTIVITY_MAGIC or native.load32(&page.generation) != known
            or native.load32(&page.broker_epoch) != self.epoch or native.load32(&page.naming_epoch) != self.epoch
        )
        if damaged:
            self.write_own_header(sizeof(layout.ActivityPage), layout.ACTIVITY_MAGIC)
            native.store32(&page.broker_epoch, self.epoch)
            native.store32(&page.naming_epoch, self.epoch)
            native.store32(&page.generation, known)
        return damaged

    def begin_anew(self, last_epoch, taken):
        """No process is in the vGPU: none has the baton, and each lease up to ``last_epoch`` has been returned. Slots
        that are not ``taken`` by the broker's own list are free and charge nothing. Raises ``TimeoutError`` as
        ``reap_slot``."""
        cdef layout.ActivityPage* page = self.get()
        native.store32(&page.baton, 0)
        native.store32(&page.returned_epoch, last_epoch)
        for index in set(range(layout.MAX_PROCESSES)) - set(taken):
            self.free_slot(index)
        native.store32(&page.processes, self.processes)

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
    def steps(self):
        """Its processes' decode steps and prefills since the page was made, as ``StepsReading``."""
        cdef layout.ActivityPage* page = self.get()
        return StepsReading(
            native.load32(&page.tpot_attained), native.load32(&page.tpot_missed), native.load32(&page.ttft_attained),
            native.load32(&page.ttft_missed), 1000 * <uint64_t>native.load32(&page.tpot_mean_us),
            1000 * <uint64_t>native.load32(&page.ttft_last_us),
        )

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

        ``index``: this very slot, free by the broker's own list, whatever the page has; −1: the first that seems free.
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

    def reap_slot(self, int index, bint keeps_shared=False):
        """Free a dead slot: the driver no longer lists its process. The bytes of its charge; 0 if it was not dead.
        ``keeps_shared``: other processes have its shared memory yet. That stays charged, and the slot stays dead.

        Waits some seconds at most for the ledger, whose lock a stopped process may hold. Raises ``TimeoutError``.
        """
        cdef layout.ActivityPage* page = self.get()
        cdef uint64_t freed = 0
        cdef int result
        self.slot(index)
        with nogil:
            result = ledger_reap(page, section_broker(self.epoch), index, keeps_shared, &freed)
        if result == LEDGER_BROKEN:
            raise TimeoutError("a process of the vGPU holds the lock of its memory ledger and does not run")
        if result == LEDGER_OK and not keeps_shared:
            native.add32(&page.processes, 0xFFFFFFFF)
        return freed

    def slots(self):
        """All slots that are not free, as ``SlotReading``."""
        cdef layout.ActivityPage* page = self.get()
        return [
            self.read_slot(index)
            for index in range(layout.MAX_PROCESSES)
            if native.load32(&page.slots[index].state) != layout.SLOT_FREE
        ]

    def read_slot(self, int index):
        """One slot as ``SlotReading``, free ones too. Its pid, start time and state are a tenant's words: only tests
        and the program in the slot itself may take them for true."""
        cdef layout.Slot* slot = self.slot(index)
        return slot_reading(index, slot, claimed_state(slot), slot.pid, slot.start_time)

    def read_member(self, int index, pid, start_time, alive):
        """The slot of a process that the caller knows from the kernel: the process's own figures of its work, with the
        caller's identity and state of the process."""
        cdef layout.Slot* slot = self.slot(index)
        state = SlotState.DEAD
        if alive:
            state = SlotState.RESERVED if native.load32(&slot.state) == layout.SLOT_RESERVED else SlotState.ACTIVE
        return slot_reading(index, slot, state, pid, start_time)

    def is_reserved(self, int index):
        """Whether no process has taken the slot since it was reserved."""
        return native.load32(&self.slot(index).state) == layout.SLOT_RESERVED

    def is_left(self, int index):
        """Whether no thread holds the slot any more: its process ended, or became another program."""
        cdef uint32_t word = native.load32(<uint32_t*>&self.slot(index).alive)
        return native.load32(&self.slot(index).state) != layout.SLOT_RESERVED and (
            word & FUTEX_OWNER_DIED != 0 or word & FUTEX_TID_MASK == 0
        )

    def names(self, int index, pid, start_time):
        """Whether a slot in use has this process's identity. The caller has the process from the kernel."""
        cdef layout.Slot* slot = self.slot(index)
        return (
            native.load32(&slot.state) != layout.SLOT_FREE and slot.pid == pid and slot.start_time == start_time
        )

    def clear_slot(self, int index):
        """Free a slot that no known process has, whatever stands in it. Raises ``TimeoutError`` as ``reap_slot``."""
        cdef layout.Slot* slot = self.slot(index)
        if native.load32(&slot.state) != layout.SLOT_FREE:
            self.free_slot(index)

    def free_slot(self, int index):
        """Likewise, also if the slot is marked as free."""
        cdef layout.Slot* slot = self.slot(index)
        native.store32(&slot.want, 0)
        native.store32(&slot.undrained, 0)
        native.store32(&slot.state, layout.SLOT_DEAD)
        self.reap_slot(index)

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
