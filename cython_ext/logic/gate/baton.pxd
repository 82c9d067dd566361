"""The baton: which of a vGPU's processes may submit under the vGPU's lease. Pure: the relay's side and the gate's.

Theory of operation
-------------------
MPS limits the SMs of each *process*, for its life: two processes of a vGPU of 40 SMs would fill 80. So in spatial mode
only one process of a vGPU at a time has work on the GPU: the one that the baton names. In temporal mode the hardware's
time slices would share a lease among the vGPU's processes. But each process predicts its own queue alone. So leases
drained late (5 % of the time, measured on the simulated GPU with three processes), and no length was ever learned. So
the baton goes round in temporal mode, too, while leases have an end. Where no other vGPU wants the GPU, the processes
run side by side.

The broker's relay passes the baton. It reads which processes want, have work or died, and it is no tenant. The word
lies in the activity page, and the gates obey it.

    word    serial in the upper bits, 1 + slot in the lowest eight; 0 there: no process. A word of 0: there is no baton
    end_ns  of the turn: FOREVER_NS while no other process wants, UNDATED until its first work was seen, else its end

* **Alone.** A process that alone wants has the word without an end, and keeps it when it goes idle. Its launches take
  the fast path, which compares one word more. Nothing else happens until a second process wants.
* **A turn ends** when its time is up, when its process wants nothing more or is dead, when the vGPU's lease is over, or
  when a second process wants and the turn had no end. The relay first takes the name out of the word, then fences, then
  reads again which processes have work. A gate publishes that it has work, fences, and reads the word again. At least
  one reads the other's store. So the next turn begins with no other process on the GPU, or after PATIENCE_NS.
* **Next** is the process with the least time used; of equals, the one that waited longest. A turn is charged from the
  moment its work was seen until it has drained. A process that comes back begins at the others' level: idleness earns
  no credit.
* **Drained** is `Slot.undrained` = 0. A gate starts nothing that does not fit before `end_ns` (but one kernel, however
  long). Its hook thread detects that the queue has run, and rings the relay.

What may go wrong
-----------------
* The holder dies: its slot wants nothing and has no work (relay.pyx, ``silence``). The turn ends at once.
* The holder is stopped or asleep without work. UNUSED_NS into a turn that it could use, the relay passes it over until
  its gate waits again (`Slot.gate_waits`), or its hook thread reports work queued ahead (hook/gate/baton.pyx,
  ``vgpu_wait_ahead``).
* The holder is stopped with work, or its kernel is longer than the patience. After PATIENCE_NS the next process runs
  beside it, as with leases (docs/explanation/scheduling.md). The holder gets no turn until it has drained, and is
  charged for all that time.
* A process lies, or writes the word itself. The relay decides by its own copy, and writes the word again at each step.
  MPS holds a process to the vGPU's SMs in any case. So a liar gains at most what a program without the hook gains.
* The hook of a process is older and knows no baton (`Slot.baton` = 0): the process runs beside the others.
* The relay is dead, or older. A broker is restarted within a second, and its relay goes on with the next serial. A gate
  that could use a lease and read the same foreign word for LOST_NS goes without (hook/gate/baton.pyx). An old relay
  never writes the word: then no baton goes round.
* No wait is longer than one of these times.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.pages.layout cimport FOREVER_NS, LEASE_OPEN, Plan

cdef enum:
    TURN_NS = 10_000_000     # as long as a round of leases: a hand-over costs 0.1 to 0.3 ms
    UNUSED_NS = 3_000_000    # an awake gate needs a tenth of that
    PATIENCE_NS = 100_000_000    # the grace of leases, too
    LOST_NS = 1_000_000_000  # every turn that another process waits for is over long before
    UNDATED = 0
    NO_SLOT = -1


cdef struct Baton:
    # --- published
    uint32_t word
    int64_t end_ns
    # --- known to the relay alone
    uint32_t serial
    int holder               # slot, or NO_SLOT
    int leaving              # the slot of the turn that has just ended and is to be charged
    int64_t since_ns         # its first work in this turn was seen; 0: none yet
    int64_t unused_ns        # since when it could have begun; 0: it could not, or has
    int64_t closed_ns        # when the word last stopped to name a process
    int64_t due_ns           # when the next step is due
    int64_t clock_ns         # time used of the last one chosen: where a newcomer begins
    uint64_t present         # a bit per slot: wants, and is to be given turns
    uint64_t asleep          # passed over until it shows that it is awake
    uint64_t late            # passed over until it has drained
    int64_t[64] used_ns
    int64_t[64] late_since_ns
    uint64_t[64] looks_asleep    # of a process that sleeps: its ``looks`` when it was found asleep
    uint64_t turns           # given so far
    uint64_t[64] served      # how many had been given when it had its last


cdef struct Processes:
    # what the relay reads of the processes that know the baton, a bit per slot
    uint64_t wants           # wants, or has work
    uint64_t busy            # has work that may still run
    bint leased              # the vGPU may use the GPU now
    uint64_t[64] looks       # Slot.gate_waits


# --- the word

cdef inline uint32_t baton_word(uint32_t serial, int slot) noexcept nogil:
    return serial << 8 | <uint32_t>(slot + 1)


cdef inline bint baton_names(uint32_t word, uint32_t slot) noexcept nogil:
    return (word & 0xFF) == slot + 1


# --- the gate's side

cdef inline bint baton_ours(uint32_t word, int64_t end_ns, uint32_t slot, int64_t now_ns) noexcept nogil:
    """Whether the baton lets the process in ``slot`` submit."""
    return word == 0 or (baton_names(word, slot) and (end_ns == UNDATED or now_ns < end_ns))


cdef inline int64_t baton_until_ns(uint32_t word, int64_t end_ns) noexcept nogil:
    """The end of the process's turn. FOREVER_NS only where no other process wants: then the fast path is open."""
    if word == 0:
        return FOREVER_NS
    return FOREVER_NS - 1 if end_ns == UNDATED else end_ns


cdef inline bint baton_undated(int64_t until_ns) noexcept nogil:
    """Whether the relay waits for the turn's first work: then the gate rings it."""
    return until_ns == FOREVER_NS - 1


cdef inline void baton_bound(Plan* plan, int64_t until_ns) noexcept nogil:
    """Bound the plan by the turn: no lease lasts longer for the process."""
    if until_ns == FOREVER_NS:
        return
    plan.current.flags &= ~<uint32_t>LEASE_OPEN
    plan.next.flags &= ~<uint32_t>LEASE_OPEN
    plan.current.end_ns = min(plan.current.end_ns, until_ns)
    plan.next.end_ns = min(plan.next.end_ns, until_ns)


# --- the relay's side

cdef inline uint64_t slot_bit(int slot) noexcept nogil:
    return <uint64_t>1 << slot


cdef inline void baton_take_over(Baton* baton, uint32_t found, int64_t now_ns) noexcept nogil:
    """Begin after the word that is in the page: no process has the baton, and the relay waits for those with work."""
    baton.serial = max(baton.serial, found >> 8)
    baton.holder = baton.leaving = NO_SLOT
    baton.due_ns = now_ns
    close_turn(baton, now_ns)


cdef inline void baton_stop(Baton* baton) noexcept nogil:
    """No baton goes round any more. Serials go on: a gate may remember the last."""
    cdef uint32_t serial = baton.serial
    memset(baton, 0, sizeof(Baton))
    baton.holder = baton.leaving = NO_SLOT
    baton.serial = serial


cdef inline void baton_forget(Baton* baton, int slot) noexcept nogil:
    """Another process will be in this slot, with no past."""
    baton.present &= ~slot_bit(slot)
    baton.asleep &= ~slot_bit(slot)
    baton.late &= ~slot_bit(slot)
    baton.used_ns[slot] = 0
    baton.served[slot] = 0


cdef inline void name_holder(Baton* baton, int slot) noexcept nogil:
    baton.serial = (baton.serial + 1) & 0xFFFFFF
    baton.serial += baton.serial == 0
    baton.holder = slot
    baton.word = baton_word(baton.serial, slot)


cdef inline void close_turn(Baton* baton, int64_t now_ns) noexcept nogil:
    baton.leaving = baton.holder
    baton.closed_ns = now_ns
    baton.unused_ns = 0
    name_holder(baton, NO_SLOT)


cdef inline void notice(Baton* baton, const Processes* seen, int64_t now_ns) noexcept nogil:
    """Note which processes are awake again, which late ones have drained, and which have come."""
    cdef uint64_t present
    cdef int slot
    for slot in range(64):
        if baton.asleep & slot_bit(slot) and (
            not seen.wants & slot_bit(slot) or seen.busy & slot_bit(slot)
            or seen.looks[slot] != baton.looks_asleep[slot]
        ):
            baton.asleep &= ~slot_bit(slot)
        if baton.late & ~seen.busy & slot_bit(slot):
            baton.late &= ~slot_bit(slot)
            baton.used_ns[slot] += now_ns - baton.late_since_ns[slot]
    present = seen.wants & ~baton.asleep & ~baton.late
    for slot in range(64):
        if present & ~baton.present & slot_bit(slot):
            baton.used_ns[slot] = max(baton.used_ns[slot], baton.clock_ns)
    baton.present = present


cdef inline bint turn_over(Baton* baton, const Processes* seen, int64_t now_ns) noexcept nogil:
    """Whether the holder's turn is over while others want; ``due_ns``: when it will be."""
    cdef uint64_t own = slot_bit(baton.holder)
    if baton.end_ns == FOREVER_NS or not baton.present & own:
        return 1
    if baton.since_ns:
        baton.due_ns = baton.end_ns
        return now_ns >= baton.end_ns or not seen.leased
    if not seen.leased:
        baton.unused_ns = 0
        return 0
    if baton.unused_ns == 0:
        baton.unused_ns = now_ns
    baton.due_ns = baton.unused_ns + UNUSED_NS
    if now_ns < baton.due_ns:
        return 0
    baton.asleep |= own
    baton.present &= ~own
    baton.looks_asleep[baton.holder] = seen.looks[baton.holder]
    return 1


cdef inline void settle_turn(Baton* baton, int64_t now_ns) noexcept nogil:
    """Charge the turn that has ended. A late process is charged only once it has drained."""
    if baton.leaving != NO_SLOT and baton.since_ns and not baton.late & slot_bit(baton.leaving):
        baton.used_ns[baton.leaving] += now_ns - baton.since_ns
    baton.leaving = NO_SLOT
    baton.since_ns = 0


cdef inline void wait_no_longer(Baton* baton, uint64_t busy) noexcept nogil:
    cdef int slot
    for slot in range(64):
        if busy & ~baton.late & slot_bit(slot):
            baton.late |= slot_bit(slot)
            baton.late_since_ns[slot] = baton.closed_ns
            if slot == baton.leaving and baton.since_ns:
                baton.late_since_ns[slot] = baton.since_ns
    baton.present &= ~baton.late


cdef inline int next_holder(const Baton* baton) noexcept nogil:
    cdef int slot, best = NO_SLOT
    for slot in range(64):
        if baton.present & slot_bit(slot) and (
            best == NO_SLOT or baton.used_ns[slot] < baton.used_ns[best]
            or (baton.used_ns[slot] == baton.used_ns[best] and baton.served[slot] < baton.served[best])
        ):
            best = slot
    return best


cdef inline bint baton_step(Baton* baton, const Processes* seen, int64_t now_ns) noexcept nogil:
    """One transition, if one is due; whether ``word`` or ``end_ns`` changed. Then the relay publishes, fences, reads
    the slots, and steps again."""
    cdef int chosen
    cdef uint64_t own, others
    notice(baton, seen, now_ns)
    baton.due_ns = FOREVER_NS
    if baton.holder != NO_SLOT:
        own = slot_bit(baton.holder)
        others = baton.present & ~own
        if others == 0 and baton.end_ns != FOREVER_NS:       # no other process wants any more
            baton.leaving = baton.holder
            settle_turn(baton, now_ns)
            baton.unused_ns = 0
            baton.end_ns = FOREVER_NS
            return 1
        if others == 0:
            return 0
        if seen.busy & own and baton.end_ns == UNDATED:
            baton.since_ns = now_ns
            baton.unused_ns = 0
            baton.due_ns = baton.end_ns = now_ns + TURN_NS
            return 1
        if not turn_over(baton, seen, now_ns):
            return 0
        close_turn(baton, now_ns)
        return 1
    if seen.busy & ~baton.late:
        baton.due_ns = baton.closed_ns + PATIENCE_NS
        if now_ns < baton.due_ns:
            return 0
        wait_no_longer(baton, seen.busy)
        baton.due_ns = FOREVER_NS
    settle_turn(baton, now_ns)
    chosen = next_holder(baton)
    if chosen == NO_SLOT:
        return 0
    name_holder(baton, chosen)
    baton.turns += 1
    baton.served[chosen] = baton.turns
    baton.clock_ns = max(baton.clock_ns, baton.used_ns[chosen])
    baton.end_ns = FOREVER_NS if baton.present == slot_bit(chosen) else UNDATED
    return 1
