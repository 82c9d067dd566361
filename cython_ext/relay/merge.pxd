"""The sum of a vGPU's processes: the relay's state and its merge, without threads (theory: relay.pyx)."""

from libc.stdint cimport INT64_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.pages.layout cimport (
    FOREVER_NS, LEASE_ON_GO, MODE_SPATIAL, SLOT_ACTIVE,
    ActivityPage as Activity, GrantsPage as Grants, Lease, Plan, RelayEntry, RelayPage as Relays, Slot,
    epoch_past, epoch_reached, pthread_mutex_t,
)
from cython_ext.logic.gate.baton cimport (
    NO_SLOT, PATIENCE_NS, Baton, Processes, baton_names, baton_step, baton_stop, baton_take_over,
)
from cython_ext.logic.gate.handover cimport CLOSE_NS
from cython_ext.logic.gate.plan cimport read_plan
from cython_ext.native cimport (
    cas32, exchange32, fence, futex_wake, load32, load64, loadi64, now_ns, or64, store32, store64, storei64,
)
from cython_ext.threads cimport pthread_t

cdef extern from "limits.h":
    const int INT_MAX

cdef enum:
    LOOK_NS = 1_000_000_000      # no wait on a tenant's word is longer
    UNPREDICTED_PATIENCES = 100  # for a stopped process with work of unknown length: 10 s, kernels are shorter
    SLEPT_NS = 5_000_000         # a lease at least so long was time enough to wake for it
    AHEAD_LATE_NS = 5_000_000    # into a lease, work queued ahead of it should have been released long ago
    LAUNCH_LEAST_NS = 100        # no process submits faster
    RECENT = 1 << 30             # epochs closer than this compare safely
    BATON_STEPS = 8              # in one merge; processes with steady wants need three at most


cdef struct Counter:
    uint64_t last                # of the process, as last merged
    uint64_t counted             # what it has grown by since the watch began, as far as that is believed


cdef struct Watch:
    Wire* wire
    Slot* slot
    pthread_t thread
    uint32_t state               # WATCH_*, under the lock
    uint32_t stop
    uint32_t ended
    int64_t died_ns
    bint clean
    int64_t begun_ns
    Counter busy_ns
    Counter launches
    uint64_t gate_waits          # while no lease was in force: one that counts further is awake


cdef struct Wire:
    pthread_mutex_t lock
    Activity* activity
    Grants* grants
    Relays* relays
    uint32_t key
    bint stopping
    bint publish_all             # a new page: publish everything
    int events_descriptor
    uint64_t admitted            # bit per slot
    uint64_t died                # bit per slot, until Python has read it
    # --- what was reported, and what is known of the lease in force
    bint want
    uint32_t reported_drained
    uint32_t reported_returned
    uint32_t reported_tail
    uint32_t reported_split_drain
    int64_t reported_context_ns  # a context for which the relay requested an NVML reading, ...
    int64_t reading_asked_ns         # ... when, ...
    uint32_t look                # ... and Python has not read the request yet
    Lease held                   # the newest lease that was usable; epoch 0: none yet
    Lease before                 # the one before it
    Lease over                   # the newest of the two that is over, as of this merge
    uint32_t judged              # the newest lease that ``clear_stale_wants`` has judged
    int64_t returned_ns
    uint64_t busy_ns
    uint64_t launches
    Baton baton
    # --- doorbell storms
    int64_t budget
    int64_t budget_ns
    uint64_t wakes
    uint64_t rings
    uint64_t returns
    uint64_t undone
    uint64_t hushed
    uint64_t throttled
    pthread_t thread
    Watch[64] watches


cdef struct Merged:
    bint want
    bint limited                 # by ``drained_epoch``: a process has work on the GPU, perhaps of the lease just over
    uint32_t drained_epoch
    int64_t drained_ns
    int64_t want_since_ns
    int64_t longest_kernel_ns
    int64_t refill_ns
    int64_t predicted_end_ns
    int64_t counted_ns
    uint32_t submitted_epoch     # the newest lease that a process submitted work under ...
    int64_t submitted_ns         # ... the first of them at this time
    uint32_t processes
    uint32_t demand_ppm
    uint32_t waits_ppm
    uint32_t burst_us
    uint64_t work_ns
    bint tail                    # a process takes no more work under the lease in force, and will soon have drained ...
    bint spent                   # ... or has drained
    bint split_drain             # a process wants that has drained the newest lease


cdef inline uint64_t lowest(uint64_t bits) noexcept nogil:
    return bits & (~bits + 1)


cdef inline int index_of(uint64_t bit) noexcept nogil:
    cdef int index = 0
    while not bit & 1:
        bit >>= 1
        index += 1
    return index


cdef inline uint64_t growth(Counter* counter, uint64_t now, uint64_t most) noexcept nogil:
    """By how much a process's counter has grown; a counter that fell began anew. All growth together is at most
    ``most``: a process may write any number there, and a sum at its end would never grow again."""
    cdef uint64_t added = min(now - counter.last if now > counter.last else 0, most - min(most, counter.counted))
    counter.last = now
    counter.counted += added
    return added


cdef inline void tell_processes(Wire* wire) noexcept nogil:
    """Publish how many processes were admitted and are not known to be dead: an MPS server counts those, too."""
    cdef uint64_t left = wire.admitted
    cdef uint32_t count = 0
    while left:
        count += 1
        left &= left - 1
    store32(&wire.relays.entries[wire.key].processes, count)


cdef inline bint stopped(const Wire* wire, int index, int64_t at_ns) noexcept nogil:
    """Whether the process is stopped. It has work, has reported nothing for as long as the baton waits, and its own
    prediction says that the work has run. Then the work has run, and neither its siblings nor other vGPUs wait for it.
    A process with so long a kernel reports every few milliseconds that the GPU is busy, or at least that it lives. For
    work without a prediction the relay waits much longer: the GPU goes on while the process is stopped."""
    cdef const Slot* slot = &wire.activity.slots[index]
    cdef int64_t silent_ns
    if not wire.baton.late >> index & 1:
        return 0
    silent_ns = at_ns - max(loadi64(&slot.counted_ns), loadi64(&slot.locked_out_ns))
    if load32(&slot.unpredicted):
        return silent_ns > UNPREDICTED_PATIENCES * <int64_t>PATIENCE_NS
    return silent_ns > PATIENCE_NS and loadi64(&slot.predicted_end_ns) < at_ns


cdef inline bint any_want(Wire* wire, int64_t at_ns) noexcept nogil:
    cdef uint64_t left = wire.admitted
    cdef Slot* slot
    cdef int index
    while left:
        index = index_of(lowest(left))
        left &= left - 1
        slot = &wire.activity.slots[index]
        if load32(&slot.state) != SLOT_ACTIVE or stopped(wire, index, at_ns):
            continue
        if load32(&slot.want) or load32(&slot.undrained):
            return 1
    return 0


cdef inline bint in_force(const Wire* wire) noexcept nogil:
    """Whether the newest lease began and is not over, as of the last ``follow_plan``."""
    return wire.held.epoch != 0 and wire.held.epoch != wire.over.epoch


cdef inline void release_ahead(Wire* wire, int64_t at_ns) noexcept nogil:
    """Advance ``Slot.turn`` for work that a process queued ahead of the lease in force. The process does that itself,
    at once. But its threads may all be held up in the driver by that very queue. Then the relay's regular merge is the
    last resort, in the first half of a lease. Reason: the release lets half a lease of work run at most, and the
    stuck process would not report it."""
    cdef int64_t late_ns = at_ns - wire.held.start_ns
    cdef bint due = in_force(wire) and AHEAD_LATE_NS < late_ns < (wire.held.end_ns - wire.held.start_ns) / 2
    cdef uint64_t left = wire.admitted if due else 0
    cdef Slot* slot
    cdef uint32_t turn, index
    while left:
        index = index_of(lowest(left))
        slot = &wire.activity.slots[index]
        left &= left - 1
        turn = load32(&slot.turn)
        if wire.baton.word != 0 and not baton_names(wire.baton.word, index):
            continue
        if turn != 0 and not epoch_reached(turn, wire.held.epoch):
            cas32(&slot.turn, turn, wire.held.epoch)


cdef inline void clear_stale_wants(Wire* wire) noexcept nogil:
    """Clear the want of a process that wanted the lease that has just ended, and slept through all of it (stopped,
    frozen). Other vGPUs need not wait for it again. Once awake, its gate publishes its want anew at its next poll. A
    process that waited for the baton did not sleep."""
    cdef bint ended = not in_force(wire) and wire.over.epoch != wire.judged
    cdef bint missed = ended and wire.over.end_ns - wire.over.start_ns >= SLEPT_NS
    cdef uint64_t left = 0 if in_force(wire) else wire.admitted
    cdef Watch* watch
    if ended:
        wire.judged = wire.over.epoch
    while left:
        watch = &wire.watches[index_of(lowest(left))]
        left &= left - 1
        if (
            missed and load32(&watch.slot.state) == SLOT_ACTIVE and load64(&watch.slot.gate_waits) == watch.gate_waits
            and (wire.baton.word == 0 or baton_names(wire.baton.word, <uint32_t>(watch - wire.watches)))
            and load32(&watch.slot.last_epoch) != wire.over.epoch and not load32(&watch.slot.undrained)
        ):
            wire.hushed += load32(&watch.slot.want)
            store32(&watch.slot.want, 0)
        watch.gate_waits = load64(&watch.slot.gate_waits)


cdef inline void merge_submission(const Slot* slot, Merged* merged) noexcept nogil:
    cdef uint32_t epoch = load32(&slot.last_epoch)
    cdef int64_t first_ns = loadi64(&slot.first_submit_ns)
    if epoch == 0:
        return
    if epoch == merged.submitted_epoch:
        merged.submitted_ns = min(merged.submitted_ns, first_ns)
    elif merged.submitted_epoch == 0 or epoch_reached(epoch, merged.submitted_epoch):
        merged.submitted_epoch = epoch
        merged.submitted_ns = first_ns


cdef inline void add_up(Wire* wire, const Slot* slot, int index, int64_t at_ns) noexcept nogil:
    cdef Watch* watch = &wire.watches[index]
    cdef uint64_t lasted_ns = <uint64_t>max(at_ns - watch.begun_ns, <int64_t>0)
    wire.busy_ns += growth(&watch.busy_ns, load64(&slot.busy_ns), lasted_ns)
    wire.launches += growth(&watch.launches, load64(&slot.launches), lasted_ns / LAUNCH_LEAST_NS)


cdef inline void merge_slots(Wire* wire, uint32_t held_epoch, int64_t at_ns, Merged* merged) noexcept nogil:
    cdef uint64_t left = wire.admitted
    cdef uint32_t drained, undrained
    cdef uint64_t base_ns = 0
    cdef int64_t since
    cdef int index
    cdef Slot* slot
    memset(merged, 0, sizeof(Merged))
    merged.want_since_ns = INT64_MAX
    merged.refill_ns = INT64_MAX
    merged.counted_ns = at_ns
    while left:
        index = index_of(lowest(left))
        left &= left - 1
        slot = &wire.activity.slots[index]
        if load32(&slot.state) != SLOT_ACTIVE:
            continue
        merged.processes += 1
        if stopped(wire, index, at_ns):
            add_up(wire, slot, index, at_ns)
            base_ns -= wire.watches[index].busy_ns.last
            continue
        undrained = load32(&slot.undrained)
        drained = load32(&slot.drained_epoch)
        if load32(&slot.want) or undrained:
            merged.want = 1
            since = loadi64(&slot.want_since_ns)
            if 0 < since < merged.want_since_ns:
                merged.want_since_ns = since
        if load32(&slot.want) and not undrained and epoch_past(drained, held_epoch):
            merged.split_drain = 1
        if undrained and not epoch_past(drained, wire.over.epoch):
            if not merged.limited:
                merged.drained_epoch = drained
            elif merged.drained_epoch != 0 and not epoch_reached(drained, merged.drained_epoch):
                merged.drained_epoch = drained       # the oldest; 0 (it has drained none yet) is older than any
            merged.limited = 1
        if undrained:        # read before busy_ns, which may only be newer
            merged.counted_ns = min(merged.counted_ns, loadi64(&slot.counted_ns))
        if held_epoch != 0 and load32(&slot.tail_epoch) == held_epoch:
            merged.spent = epoch_past(drained, held_epoch)
            merged.tail = not merged.spent and undrained
        merged.drained_ns = max(merged.drained_ns, loadi64(&slot.drained_ns))
        merged.longest_kernel_ns = max(merged.longest_kernel_ns, loadi64(&slot.longest_kernel_ns))
        merged.demand_ppm = max(merged.demand_ppm, load32(&slot.demand_ppm))
        merged.waits_ppm = max(merged.waits_ppm, load32(&slot.waits_ppm))
        merged.burst_us = max(merged.burst_us, load32(&slot.burst_us))
        merged.work_ns += load64(&slot.work_ns)
        merged.predicted_end_ns = max(merged.predicted_end_ns, loadi64(&slot.predicted_end_ns))
        if held_epoch != 0 and load32(&slot.last_epoch) == held_epoch and loadi64(&slot.refill_ns) > 0:
            merged.refill_ns = min(merged.refill_ns, loadi64(&slot.refill_ns))
        merge_submission(slot, merged)
        add_up(wire, slot, index, at_ns)
        base_ns -= wire.watches[index].busy_ns.last
    storei64(&wire.activity.busy_base_ns, <int64_t>(wire.busy_ns + base_ns))
    if merged.want_since_ns == INT64_MAX:
        merged.want_since_ns = 0


cdef inline bint begun(const Lease* lease, uint32_t go_epoch, int64_t at_ns) noexcept nogil:
    if lease.epoch == 0:
        return 0
    if lease.flags & LEASE_ON_GO:
        return epoch_reached(go_epoch, lease.epoch) or at_ns >= lease.go_by_ns
    return at_ns >= lease.start_ns


cdef inline void follow_plan(Wire* wire, int64_t at_ns) noexcept nogil:
    """Update ``held``, ``before`` and ``over``. A lease that is over may be in force again: ends move."""
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
    if not shown or at_ns >= wire.held.end_ns or wire.held.epoch == wire.reported_returned:
        wire.over = wire.held
    else:
        wire.over = wire.before


cdef inline bint news(uint32_t epoch, uint32_t reported) noexcept nogil:
    return epoch != 0 and epoch != reported and not (epoch_reached(reported, epoch) and reported - epoch < RECENT)


cdef inline bint give_back(Wire* wire, int64_t at_ns) noexcept nogil:
    """Return the lease in force, unless a process wakes meanwhile. Whether it is returned."""
    cdef uint32_t before = exchange32(&wire.activity.returned_epoch, wire.held.epoch)
    fence()
    if any_want(wire, at_ns):
        cas32(&wire.activity.returned_epoch, wire.held.epoch, before)
        futex_wake(&wire.grants.change, INT_MAX)
        wire.undone += 1
        return 0
    wire.returned_ns = at_ns
    wire.returns += 1
    return 1


cdef inline void take_back(Wire* wire) noexcept nogil:
    """Where a process wants the lease in force, and the page shows it as returned, undo the return. A predecessor of
    this relay was killed in the middle of ``give_back``. The server has no report of the return, so the lease would not
    end, and no gate would use it."""
    if load32(&wire.activity.returned_epoch) == wire.held.epoch:
        cas32(&wire.activity.returned_epoch, wire.held.epoch, wire.reported_returned)
        futex_wake(&wire.grants.change, INT_MAX)
        wire.undone += 1


cdef inline void forget_return(Wire* wire, int64_t at_ns) noexcept nogil:
    """Clear a returned epoch that the plan has not shown for long. It is of no use, and after 2³¹ leases it would seem
    to return a new lease."""
    cdef uint32_t returned = load32(&wire.activity.returned_epoch)
    cdef Plan plan
    if returned == 0 or at_ns - wire.returned_ns < LOOK_NS or not read_plan(wire.grants, &plan):
        return
    if plan.current.epoch != returned and plan.next.epoch != returned:
        cas32(&wire.activity.returned_epoch, returned, 0)


cdef inline bint at_its_tail(const Wire* wire, const Merged* merged, int64_t at_ns) noexcept nogil:
    """Whether the newest lease has come to its tail, and that was not reported yet. Only for a vGPU with one process:
    another might still submit."""
    return (
        merged.tail and merged.processes == 1 and wire.reported_tail != wire.held.epoch
        and wire.held.end_ns - at_ns <= CLOSE_NS
    )


cdef inline void read_processes(Wire* wire, Processes* seen) noexcept nogil:
    cdef uint64_t left = wire.admitted
    cdef Slot* slot
    cdef int index
    seen.wants = seen.busy = 0
    seen.leased = in_force(wire)
    while left:
        index = index_of(lowest(left))
        left &= left - 1
        slot = &wire.activity.slots[index]
        if load32(&slot.state) != SLOT_ACTIVE or not load32(&slot.baton):
            continue
        seen.looks[index] = load64(&slot.gate_waits)
        if load32(&slot.undrained):
            seen.busy |= (<uint64_t>1) << index
        if load32(&slot.want):
            seen.wants |= (<uint64_t>1) << index
    seen.wants |= seen.busy


cdef inline bint goes_round(const Wire* wire) noexcept nogil:
    """Whether the baton goes round: in spatial mode always; in temporal mode for two processes or more, from a lease
    with an end until one without."""
    cdef uint64_t left = wire.admitted
    cdef const Slot* slot
    cdef int taking = 0
    if load32(&wire.grants.mode) == MODE_SPATIAL:
        return 1
    while left:
        slot = &wire.activity.slots[index_of(lowest(left))]
        left &= left - 1
        taking += load32(&slot.state) == SLOT_ACTIVE and load32(&slot.baton) != 0
    if wire.held.epoch != 0 and wire.held.end_ns < FOREVER_NS:       # or it had one: a process may not have drained it
        return taking >= 2
    return taking >= 2 and not in_force(wire) and load32(&wire.activity.baton) != 0


cdef inline void publish_baton(Wire* wire) noexcept nogil:
    """Write the relay's word and end over those in the page. Where the word names a process, the end goes first."""
    cdef bint moved = load32(&wire.activity.baton) != wire.baton.word
    if wire.baton.holder != NO_SLOT and loadi64(&wire.activity.baton_end_ns) != wire.baton.end_ns:
        storei64(&wire.activity.baton_end_ns, wire.baton.end_ns)
    if moved:
        exchange32(&wire.activity.baton, wire.baton.word)
        futex_wake(&wire.activity.baton, INT_MAX)
        futex_wake(&wire.grants.change, INT_MAX)     # hook threads: siblings now wait for their drains
    fence()


cdef inline void pass_baton(Wire* wire, int64_t at_ns) noexcept nogil:
    """Pass the baton, so that one process at a time submits (theory: logic/gate/baton.pxd)."""
    cdef Processes seen
    cdef int _
    if wire.baton.word == 0 and (load32(&wire.activity.baton) or goes_round(wire)):
        baton_take_over(&wire.baton, load32(&wire.activity.baton), at_ns)    # a predecessor's, if there is one
    if not goes_round(wire):
        if wire.baton.word != 0:
            baton_stop(&wire.baton)
            publish_baton(wire)
        return
    publish_baton(wire)
    for _ in range(BATON_STEPS):
        read_processes(wire, &seen)
        if not baton_step(&wire.baton, &seen, at_ns):
            break
        publish_baton(wire)


cdef inline bint merge(Wire* wire) noexcept nogil:
    """Update the entry. Whether the relay must ring the dispatcher. Under the lock."""
    cdef RelayEntry* entry = &wire.relays.entries[wire.key]
    cdef int64_t at_ns = now_ns()
    cdef bint must_ring = wire.publish_all
    cdef bint returned = 0
    cdef uint32_t drained = 0
    cdef Merged merged
    follow_plan(wire, at_ns)
    clear_stale_wants(wire)
    release_ahead(wire, at_ns)
    pass_baton(wire, at_ns)
    merge_slots(wire, wire.held.epoch, at_ns, &merged)
    if not merged.want and in_force(wire):
        returned = give_back(wire, at_ns)
        merged.want = not returned
        if returned:
            wire.judged = wire.held.epoch        # no process wanted it: the next to want has not slept through it
    elif in_force(wire):
        take_back(wire)
    if not returned and wire.over.epoch != 0:
        drained = wire.over.epoch
        if merged.limited:       # an epoch that seems to be newer is from very long ago, or a lie
            drained = merged.drained_epoch if epoch_reached(drained, merged.drained_epoch) else 0
    if not returned and merged.spent and merged.processes == 1 and in_force(wire):
        wire.over = wire.held            # the scheduler moved its end when it was at its tail already
        drained = wire.held.epoch
    wire.publish_all = 0
    # Order matters: see queue_pages.pxd.
    storei64(&entry.submitted_ns, merged.submitted_ns)
    store32(&entry.submitted_epoch, merged.submitted_epoch)
    if merged.want != wire.want or merged.want != load32(&entry.want) or must_ring:      # the entry may begin anew
        wire.want = merged.want
        store32(&wire.activity.want, merged.want)
        store32(&entry.want, merged.want)
        must_ring = 1
    tell_processes(wire)
    store64(&entry.busy_ns, wire.busy_ns)
    storei64(&entry.counted_ns, merged.counted_ns)
    store64(&entry.launches, wire.launches)
    storei64(&entry.longest_kernel_ns, merged.longest_kernel_ns)
    store32(&entry.demand_ppm, merged.demand_ppm)
    store32(&entry.waits_ppm, merged.waits_ppm)
    store32(&entry.burst_us, merged.burst_us)
    store64(&entry.work_ns, merged.work_ns)
    storei64(&entry.predicted_end_ns, merged.predicted_end_ns)
    storei64(&entry.want_since_ns, merged.want_since_ns)
    if merged.refill_ns != INT64_MAX:
        storei64(&entry.refill_ns, merged.refill_ns)
    if at_its_tail(wire, &merged, at_ns):
        wire.reported_tail = wire.held.epoch
        store32(&entry.tail_epoch, wire.held.epoch)
        must_ring = 1
    if merged.split_drain and merged.processes > 1 and in_force(wire) and wire.reported_split_drain != wire.held.epoch:
        # Its end moved after some processes, not all, had drained it: all processes go on under the next lease.
        wire.reported_split_drain = wire.held.epoch
        store32(&entry.split_drain_epoch, wire.held.epoch)
        must_ring = 1
    if returned:
        wire.reported_returned = wire.held.epoch
        storei64(&entry.drained_ns, at_ns)
        store32(&entry.returned_epoch, wire.held.epoch)
        must_ring = 1
    elif drained != wire.reported_returned and news(drained, wire.reported_drained):
        wire.reported_drained = drained
        storei64(&entry.drained_ns, drained_at_ns(wire, &merged, at_ns))
        store32(&entry.drained_epoch, drained)
        must_ring = 1
    or64(&wire.relays.dirty[wire.key >> 6], (<uint64_t>1) << (wire.key & 63))
    forget_return(wire, at_ns)
    return must_ring


cdef inline int64_t drained_at_ns(Wire* wire, const Merged* merged, int64_t at_ns) noexcept nogil:
    """When the lease that is over had drained; a lease that no process used was held to its end."""
    if merged.drained_ns <= wire.over.start_ns:
        return min(at_ns, wire.over.end_ns)
    return min(at_ns, merged.drained_ns)
