"""The dispatcher's decisions, without its thread, pages and clock: which lease gets GO now, and when to look again.

Theory of operation
-------------------
A ``LeaseTable`` has a ``VgpuQueue`` for each vGPU (desks.pxd). A queue has up to TURNS published leases that are not
over yet, oldest first. A published lease waits, then it *went* (GO was given), then it is done and leaves the queue.
Four things move it:

* ``board_publish`` / ``board_withdraw``: the scheduler's commands;
* ``board_report``: what the vGPU's relay says (wants, returned, drained);
* ``board_step``: time has passed. It gives GO to every turn that is due, and takes back leases that nobody wants;
* ``board_remove``: the vGPU is gone, which counts as drained.

Every function takes ``now_ns``; none reads a clock or touches a page. What the world must learn is left in three
places: ``touched`` (desks whose page must be written anew from ``desk_face``), ``free``, and ``ring`` (what the
scheduler hears: boardevents.pxd). A caller that steps at ``board_deadline`` gives every GO on time.

A turn is due when its ``start_ns`` has come (any time, with ``early``; a little before, behind predecessors), its
predecessors are done and its vGPU's own older turn is over; at ``go_by_ns`` at the latest. GO at g moves the end by
g − start: a lease keeps its length. Predecessors are struck off the turn when they are done, so a step looks at numbers
only; its cost is the number of waiting turns.

A standing turn has GO when its vGPU wants. With ``alone`` that takes a free GPU, too: nobody else wants or holds, and
nothing waits that the scheduler has granted. The scheduler hears of it afterwards, and may have granted another lease
meanwhile. So once such a turn went, it is *unheard*, and turns of other vGPUs wait for it, until the scheduler
publishes it again; at their ``go_by_ns`` they go all the same. While the GPU is ``free``, hooks need not wait for GO
(logic/gate.pxd): who has *taken* its lease is charged from its first work on, but for what another lease pays for.
Where it was alone in wanting, its lease begins then; where the scheduler had to choose, that begins with GO, since it
may have got an end meanwhile.

A lease's end may be moved away when some of its vGPU's processes have drained it already, and others not. Those that
have wait for another lease: so the relay says that somebody is *stranded*, and the lease ends at once, for good.

Reports are believed when they *change*: epochs live on a 32-bit circle, and a word from 2³¹ leases ago would otherwise
seem to reach a lease that was only just made. They are clamped: no drain lies before GO or after now.

A lease that nobody wants ends as well: a turn that went, of a vGPU that has wanted nothing for QUIET_NS, is done. So a
process that dies while it waits does not keep the GPU idle for a whole lease, and a lease's end needs no process alive
to be noticed. The pause is for wants on their way through the relay.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memmove, memset

from cython_ext.boardevents cimport (
    EVENT_DRAINED, EVENT_IDLE, EVENT_WANTS, EVENT_WENT, BoardEvent, EventRing, ring_due_ns, ring_emit, ring_forget,
    ring_observe, ring_step, ring_went,
)
from cython_ext.desks cimport (
    TURNS, PublishedLease, Report, VgpuQueue, any_at_tail, any_but, desk_quiet_ns, first_waiting, has, next_key, put,
    turn_at_tail, turn_begins, turn_due_ns, turn_idle_ns, turn_opens_ns, turn_used_ns,
)
from cython_ext.layout cimport FOREVER_NS, LEASE_ON_GO, LEASE_OPEN, epoch_reached
from cython_ext.logic.gate cimport TAKE_MOST_NS
from cython_ext.logic.handover cimport awake_after_ns

cdef enum:
    LATENESS_BINS = 40
    OBSERVE_NS = 10_000_000  # between two readings of a holder that nobody asked for
    RECENT = 1 << 30         # epochs closer than this compare safely

    BOARD_OK = 0
    BOARD_OVER = 1           # the epoch is not live any more
    BOARD_FULL = 2           # TURNS leases of the vGPU are live
    BOARD_EMPTY = 3          # ends before it starts


cdef struct LeaseTable:
    uint64_t[4] waiting      # desks with a turn that has not gone
    uint64_t[4] holding      # desks with a turn that has
    uint64_t[4] wanting
    uint64_t[4] unheard      # desks with a turn that is
    uint64_t[4] touched
    bint free                # nobody wants a token, no lease is in force, and only standing ones wait
    int64_t over_ns          # when a lease was last over
    uint32_t newest          # epoch last published on the GPU
    EventRing ring           # for the scheduler
    uint64_t gos
    uint64_t forced
    uint64_t[40] lateness
    VgpuQueue[256] desks


cdef inline int64_t clamp_ns(int64_t value, int64_t low, int64_t high) noexcept nogil:
    return low if value < low else high if value > high else value


cdef inline void board_refile(LeaseTable* board, uint32_t key) noexcept nogil:
    """The desk's turns changed: file it anew, and have its page written."""
    cdef VgpuQueue* desk = &board.desks[key]
    put(board.waiting, key, desk.live > 0 and not desk.turns[desk.live - 1].went)
    put(board.holding, key, desk.live > 0 and desk.turns[0].went)
    put(board.touched, key, 1)


cdef inline PublishedLease* board_find(LeaseTable* board, uint32_t key, uint32_t epoch) noexcept nogil:
    cdef VgpuQueue* desk = &board.desks[key]
    cdef uint32_t i
    for i in range(desk.live):
        if desk.turns[i].lease.epoch == epoch:
            return &desk.turns[i]
    return NULL


cdef inline void board_strike(LeaseTable* board, uint32_t key, uint32_t epoch, int64_t at_ns) noexcept nogil:
    """Nobody need wait for this lease any more."""
    cdef PublishedLease* turn
    cdef uint32_t i, j
    cdef int other = next_key(board.waiting, 0)
    while other >= 0:
        for i in range(board.desks[other].live):
            turn = &board.desks[other].turns[i]
            j = 0
            while j < turn.waits:
                if turn.after[j].key == key and turn.after[j].epoch == epoch:
                    turn.waits -= 1
                    turn.after[j] = turn.after[turn.waits]
                    turn.ready_ns = max(turn.ready_ns, at_ns)
                else:
                    j += 1
        other = next_key(board.waiting, other + 1)


cdef inline void board_drop(LeaseTable* board, uint32_t key, uint32_t index, int64_t at_ns) noexcept nogil:
    cdef VgpuQueue* desk = &board.desks[key]
    cdef uint32_t epoch = desk.turns[index].lease.epoch
    if desk.turns[index].unheard:
        put(board.unheard, key, 0)
    if desk.turns[index].went:
        board.over_ns = max(board.over_ns, at_ns)
    desk.live -= 1
    memmove(&desk.turns[index], &desk.turns[index + 1], (desk.live - index) * sizeof(PublishedLease))
    board_refile(board, key)
    board_strike(board, key, epoch, at_ns)


cdef inline void board_done(LeaseTable* board, uint32_t key, uint32_t index, int64_t at_ns, bint wants) noexcept nogil:
    cdef VgpuQueue* desk = &board.desks[key]
    cdef PublishedLease* turn = &desk.turns[index]
    cdef BoardEvent* event = ring_emit(&board.ring, EVENT_DRAINED, key, turn.lease.epoch, at_ns)
    event.wants = wants
    event.idle_ns = turn_idle_ns(desk, turn, at_ns)
    event.used_ns = turn_used_ns(desk, turn, at_ns)
    event.longest_kernel_ns = desk.report.longest_kernel_ns
    event.refill_ns = desk.report.refill_ns
    board_drop(board, key, index, at_ns)


cdef inline void board_go(LeaseTable* board, uint32_t key, uint32_t index, int64_t now_ns) noexcept nogil:
    cdef VgpuQueue* desk = &board.desks[key]
    cdef PublishedLease* turn = &desk.turns[index]
    cdef BoardEvent* event
    cdef int64_t due = max(turn.ready_ns, turn_opens_ns(turn))
    cdef int64_t first_ns
    cdef uint64_t late
    cdef uint32_t i = 0
    if turn.on_want:
        due = max(due, desk.want_changed_ns)
    if index > 0:
        due = max(due, min(desk.turns[index - 1].lease.end_ns, turn.lease.go_by_ns))
    if turn.waits > 0:
        board.forced += 1
        due = turn.lease.go_by_ns
        turn.waits = 0
    # Without ON_GO the hooks did not wait for us: the lease is as old as it said.
    turn.go_ns = now_ns if turn.lease.flags & LEASE_ON_GO else clamp_ns(due, 0, now_ns)
    first_ns = turn.go_ns
    if turn.stood and desk.report.submitted_epoch == turn.lease.epoch and next_key(board.holding, 0) < 0:    # taken
        first_ns = clamp_ns(desk.report.submitted_ns, max(board.over_ns, now_ns - TAKE_MOST_NS), now_ns)
    if turn.alone:
        turn.go_ns = first_ns
    turn_begins(turn)
    turn.went = 1
    if turn.alone:
        turn.unheard = 1
        put(board.unheard, key, 1)
    turn.busy_at_go_ns = desk.report.busy_ns
    board.gos += 1
    late = <uint64_t>max(0, now_ns - due)
    while late and i < LATENESS_BINS - 1:
        late >>= 1
        i += 1
    board.lateness[i] += 1
    event = ring_emit(&board.ring, EVENT_WENT, key, turn.lease.epoch, turn.go_ns)
    event.end_ns = turn.lease.end_ns
    event.taken_ns = max(0, turn.go_ns - first_ns)
    ring_went(&board.ring, turn, any_at_tail(board.holding, board.desks))
    board_refile(board, key)


cdef inline int64_t board_due_ns(const LeaseTable* board, uint32_t key, uint32_t index) noexcept nogil:
    """From when on the desk's first waiting turn, unless it is an alone one, may get GO, as things stand."""
    cdef const PublishedLease* turn = &board.desks[key].turns[index]
    if turn.alone:
        return FOREVER_NS
    if not turn.on_want and any_but(board.unheard, key):
        return turn.lease.go_by_ns
    return turn_due_ns(&board.desks[key], index)


cdef inline bint board_rests(const LeaseTable* board) noexcept nogil:
    """No lease is in force, and only standing ones wait."""
    cdef const VgpuQueue* desk
    cdef int key = next_key(board.waiting, 0)
    cdef uint32_t i
    while key >= 0:
        desk = &board.desks[key]
        for i in range(desk.live):
            if not desk.turns[i].on_want:
                return 0
        key = next_key(board.waiting, key + 1)
    return next_key(board.holding, 0) < 0


cdef inline int board_alone(const LeaseTable* board) noexcept nogil:
    """Who alone wants on a GPU that rests, and has a turn that waits; −1: nobody."""
    cdef int alone = next_key(board.wanting, 0)
    if alone < 0 or any_but(board.wanting, alone) or not has(board.waiting, alone) or not board_rests(board):
        return -1
    return alone


cdef inline void board_step(LeaseTable* board, int64_t now_ns) noexcept nogil:
    """Whatever is due at ``now_ns``."""
    cdef bint again = 1
    cdef int key
    cdef uint32_t i
    cdef VgpuQueue* desk
    ring_step(&board.ring, now_ns)
    while again:
        again = 0
        key = next_key(board.waiting, 0)
        while key >= 0:
            desk = &board.desks[key]
            i = first_waiting(desk)
            while i < desk.live and board_due_ns(board, key, i) <= now_ns:
                board_go(board, key, i, now_ns)
                i += 1
            key = next_key(board.waiting, key + 1)
        key = board_alone(board)
        if key >= 0 and board.desks[key].turns[0].alone:
            board_go(board, key, 0, now_ns)
            again = 1
        key = next_key(board.holding, 0)
        while key >= 0:
            desk = &board.desks[key]
            while not desk.want and desk.live > 0 and desk.turns[0].went and desk_quiet_ns(desk) <= now_ns:
                board_done(board, key, 0, now_ns, 0)
                again = 1
            key = next_key(board.holding, key + 1)
    board.free = next_key(board.wanting, 0) < 0 and board_rests(board)


cdef inline int64_t board_deadline(const LeaseTable* board, bint* sharp) noexcept nogil:
    """When to step next, FOREVER_NS if only an event can matter. ``sharp``: somebody waits for that very moment."""
    cdef int64_t deadline = FOREVER_NS, due
    cdef int key = next_key(board.waiting, 0)
    cdef uint32_t i
    sharp[0] = 0
    while key >= 0:
        i = first_waiting(&board.desks[key])
        due = board_due_ns(board, key, i)
        if due < deadline:
            deadline = due
            sharp[0] = board.desks[key].turns[i].waits == 0 and board.desks[key].turns[i].lease.flags & LEASE_ON_GO != 0
        key = next_key(board.waiting, key + 1)
    key = next_key(board.holding, 0)
    while key >= 0:
        if not board.desks[key].want and desk_quiet_ns(&board.desks[key]) < deadline:
            deadline = desk_quiet_ns(&board.desks[key])
            sharp[0] = 0
        key = next_key(board.holding, key + 1)
    if ring_due_ns(&board.ring) < deadline:
        deadline, sharp[0] = ring_due_ns(&board.ring), 0
    return deadline


cdef inline int64_t board_handover_ns(const LeaseTable* board, int64_t now_ns, int64_t* lasted_ns) noexcept nogil:
    """The nearest end of a lease whose drain somebody waits for, perhaps just past, and how long that lease has been
    in force by then; FOREVER_NS if there is none."""
    cdef int64_t nearest = FOREVER_NS
    cdef const VgpuQueue* desk
    cdef const PublishedLease* turn
    cdef uint32_t i, j
    cdef int key = next_key(board.waiting, 0)
    while key >= 0:
        desk = &board.desks[key]
        i = first_waiting(desk)
        if i < desk.live:
            for j in range(desk.turns[i].waits):
                turn = board_find(<LeaseTable*>board, desk.turns[i].after[j].key, desk.turns[i].after[j].epoch)
                if turn == NULL or not turn.went or turn.lease.end_ns >= nearest:
                    continue
                if now_ns - turn.lease.end_ns < awake_after_ns(turn.lease.end_ns - turn.go_ns):
                    nearest = turn.lease.end_ns
                    lasted_ns[0] = turn.lease.end_ns - turn.go_ns
        key = next_key(board.waiting, key + 1)
    return nearest


cdef inline int board_publish(
    LeaseTable* board, uint32_t key, const PublishedLease* asked, int64_t now_ns
) noexcept nogil:
    """A new lease, or a new version of a live one. ``asked``: lease, window, early, on_want, alone, waits and
    after.

    One of BOARD_*; without OK nothing changed. Steps are the caller's.
    """
    cdef VgpuQueue* desk = &board.desks[key]
    cdef PublishedLease* turn = board_find(board, key, asked.lease.epoch)
    cdef const PublishedLease* before
    cdef bint stood = asked.alone or (turn != NULL and turn.stood)
    cdef uint32_t i
    if turn != NULL and turn.went:
        if not turn.stranded:
            turn.lease.end_ns = asked.lease.end_ns
            turn.lease.flags = (turn.lease.flags & ~<uint32_t>LEASE_OPEN) | (asked.lease.flags & LEASE_OPEN)
        turn.window_ns = asked.window_ns
        if turn.unheard:
            turn.unheard = 0
            put(board.unheard, key, 0)
        board_refile(board, key)
        return BOARD_OK
    if asked.lease.end_ns <= asked.lease.start_ns:
        return BOARD_EMPTY
    if turn == NULL:
        if epoch_reached(desk.newest, asked.lease.epoch) and board.newest - desk.newest < RECENT:
            return BOARD_OVER
        if desk.live == TURNS:
            return BOARD_FULL
        turn = &desk.turns[desk.live]
        desk.live += 1
        desk.newest = asked.lease.epoch
        if board.newest == 0 or epoch_reached(asked.lease.epoch, board.newest):
            board.newest = asked.lease.epoch
    turn[0] = asked[0]
    turn.stood = stood
    turn.went = turn.unheard = turn.stranded = 0
    turn.ready_ns = now_ns
    turn.lease.go_by_ns = max(asked.lease.go_by_ns, asked.lease.start_ns)
    turn.lease.flags &= LEASE_OPEN
    turn.lease.flags |= LEASE_ON_GO if turn.early or turn.on_want else 0
    turn.waits = 0
    for i in range(asked.waits):
        before = board_find(board, asked.after[i].key, asked.after[i].epoch)
        if before == NULL:
            continue
        turn.lease.flags |= LEASE_ON_GO
        if not turn_at_tail(&board.desks[asked.after[i].key], before, now_ns):   # told only once
            turn.after[turn.waits] = asked.after[i]
            turn.waits += 1
    board_refile(board, key)
    return BOARD_OK


cdef inline int64_t board_allowed_ns(
    LeaseTable* board, uint32_t key, uint32_t epoch, int64_t allowance_ns
) noexcept nogil:
    """``GrantsPage.allowed_ns`` where the vGPU may use ``allowance_ns`` under that lease in all: from its GO on, or
    from now where it has not gone. Below 0: without a limit."""
    cdef const PublishedLease* turn = board_find(board, key, epoch)
    cdef uint64_t from_ns = board.desks[key].report.busy_ns
    if allowance_ns < 0:
        return 0
    if turn != NULL and turn.went:
        from_ns = turn.busy_at_go_ns
    return <int64_t>min(max(from_ns, <uint64_t>1), <uint64_t>FOREVER_NS / 2) + min(allowance_ns, FOREVER_NS / 2)


cdef inline void board_end(LeaseTable* board, uint32_t key, PublishedLease* turn, int64_t now_ns) noexcept nogil:
    """A lease that went ends now, unless it has."""
    turn.lease.end_ns = min(turn.lease.end_ns, now_ns)
    turn.lease.flags &= ~<uint32_t>LEASE_OPEN
    board_refile(board, key)


cdef inline bint board_withdraw(LeaseTable* board, uint32_t key, uint32_t epoch, int64_t now_ns) noexcept nogil:
    """1: taken back, as if it had never been. 0: it is over, or it went and ends now. Step to ``now_ns`` first."""
    cdef PublishedLease* turn = board_find(board, key, epoch)
    if turn == NULL:
        return 0
    if turn.went:
        board_end(board, key, turn, now_ns)
        return 0
    board_drop(board, key, <uint32_t>(turn - board.desks[key].turns), now_ns)
    return 1


cdef inline bint board_finish(
    LeaseTable* board, uint32_t key, uint32_t reached, int64_t at_ns, int64_t now_ns, bint wants
) noexcept nogil:
    """Every turn that went and lies at or before epoch ``reached`` is done. Whether there was one."""
    cdef VgpuQueue* desk = &board.desks[key]
    cdef bint any_done = 0
    while desk.live > 0 and desk.turns[0].went and epoch_reached(reached, desk.turns[0].lease.epoch):
        board_done(board, key, 0, clamp_ns(at_ns, desk.turns[0].go_ns, now_ns), wants)
        any_done = 1
    return any_done


cdef inline void board_tail(LeaseTable* board, uint32_t key, uint32_t epoch, int64_t now_ns) noexcept nogil:
    """The lease takes no more work and will soon have drained: nobody need wait for that. It stays, and is charged."""
    cdef const PublishedLease* turn = board_find(board, key, epoch)
    if turn != NULL and turn_at_tail(&board.desks[key], turn, now_ns):
        board_strike(board, key, epoch, now_ns)


cdef inline void board_wants(LeaseTable* board, uint32_t key, bint want, int64_t now_ns) noexcept nogil:
    board.desks[key].want = want
    board.desks[key].want_changed_ns = now_ns
    put(board.wanting, key, want)


cdef inline void board_report(LeaseTable* board, uint32_t key, const Report* report, int64_t now_ns) noexcept nogil:
    """What the relay says now. Step to ``now_ns`` first (a hook may have begun before us), and after."""
    cdef VgpuQueue* desk = &board.desks[key]
    cdef Report before = desk.report
    cdef PublishedLease* turn
    if not desk.present:
        return
    desk.report = report[0]
    if report.returned_epoch != before.returned_epoch:
        # Who wants again after a return wants anew, even if the return and the wish came in one report.
        if board_finish(board, key, report.returned_epoch, report.drained_ns, now_ns, 0) and desk.want:
            board_wants(board, key, 0, now_ns)
    if report.drained_epoch != before.drained_epoch:
        if board_finish(board, key, report.drained_epoch, report.drained_ns, now_ns, report.want):
            if desk.want and not report.want:
                board_wants(board, key, 0, now_ns)
    if report.tail_epoch != before.tail_epoch:
        board_tail(board, key, report.tail_epoch, now_ns)
    if report.stranded_epoch != before.stranded_epoch:
        turn = board_find(board, key, report.stranded_epoch)
        if turn != NULL and turn.went:
            board_end(board, key, turn, now_ns)
            turn.stranded = 1
    if report.want != desk.want:
        board_wants(board, key, report.want, now_ns)
        if report.want:
            ring_emit(&board.ring, EVENT_WANTS, key, 0, now_ns)
        elif not has(board.holding, key):
            ring_emit(&board.ring, EVENT_IDLE, key, 0, now_ns)
    if has(board.holding, key) and now_ns - desk.observed_ns >= OBSERVE_NS:
        turn = &desk.turns[first_waiting(desk) - 1]
        desk.observed_ns = now_ns
        ring_observe(&board.ring, key, desk, turn, now_ns)


cdef inline void board_add(LeaseTable* board, uint32_t key, const Report* report, int64_t now_ns) noexcept nogil:
    """A new vGPU. ``report``: what its entry says already; epochs in it are of another time, a want is news."""
    cdef VgpuQueue* desk = &board.desks[key]
    memset(desk, 0, sizeof(VgpuQueue))
    desk.present = 1
    desk.report = report[0]
    desk.want_changed_ns = now_ns
    board_refile(board, key)
    board_report(board, key, report, now_ns)


cdef inline void board_remove(LeaseTable* board, uint32_t key, int64_t now_ns) noexcept nogil:
    """The vGPU is gone: its leases are over, its unread events are nobody's. Its page shows an empty plan."""
    cdef VgpuQueue* desk = &board.desks[key]
    while desk.live > 0:
        board_drop(board, key, desk.live - 1, now_ns)
    ring_forget(&board.ring, key)
    memset(desk, 0, sizeof(VgpuQueue))
    put(board.wanting, key, 0)
    put(board.touched, key, 1)


cdef int read_turn(
    PublishedLease* turn, object epoch, object start_ns, object end_ns, object after, object go_by_ns, bint early,
    bint on_want, bint alone, object window_ns,
) except -1
cdef object event_reading(const BoardEvent* event)
cdef LeaseTable* board_new() except NULL
cdef void board_free(LeaseTable* board) noexcept
