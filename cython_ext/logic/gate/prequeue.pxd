"""Work queued ahead of its lease: already in the driver's queue, behind a word that the GPU waits for.

Theory of operation
-------------------
A host that runs ahead of the GPU loses its lead at every hand-over: the new lease begins with an empty queue, and the
GPU idles until the host has caught up (3 ms for a ResNet-50 trainer on an H200). So a process without a lease goes on
launching, up to a limit of predicted work, into streams that wait for ``Slot.turn``. The lease's first act is to
advance that word, and the GPU goes on with a full queue.

Only launches of known length are taken, and at most AHEAD_LAUNCHES: the driver's queue holds a thousand, and a launch
into a full one would wait inside the driver. What is queued ahead is kept apart from the backlog, which means what runs
or may run: the drain of the lease before is judged by the markers of that. ``ahead_release`` joins the two.

The caller serialises.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.logic.gate.window cimport (
    MARKERS, PREDICTION_MAX_NS, Backlog, Stretch, backlog_scaled_ns, backlog_wake, clip_ns, note_longest,
    stretch_end_ns, unsure_now_ns,
)

cdef enum:
    AHEAD_MARKERS = 24
    AHEAD_LAUNCHES = 600     # of a queue that takes 1020; copies and events of the application's take places, too
    AHEAD_NODE_NS = 2_000    # a graph may take a place for each node, and has as many as fit into its length, at most


cdef struct Ahead:
    uint32_t launches        # in all; 0: nothing is queued ahead
    uint32_t nodes           # more than those, of graphs, at most
    int64_t work_ns          # predicted, in all
    int64_t excess_ns        # how much longer it may take
    uint32_t count           # of ``marked``
    Stretch[24] marked
    Stretch unmarked


cdef inline bint ahead_begins(const Backlog* backlog) noexcept nogil:
    """Whether markers separate the work that is queued already, and leave room for markers to come."""
    return backlog.unmarked.launches == 0 and backlog.count + <uint32_t>AHEAD_MARKERS < <uint32_t>MARKERS


cdef inline bint ahead_takes(
    const Ahead* ahead, const Backlog* backlog, int64_t learned_ns, int64_t excess_ns, int64_t most_ns
) noexcept nogil:
    """Whether a launch of that learned length may be queued ahead, with ``most_ns`` of work in all, and it may take no
    more than that longer (``excess_ns``: this one)."""
    return (
        learned_ns >= 0
        and ahead.launches + ahead.nodes < AHEAD_LAUNCHES
        and ahead.count < AHEAD_MARKERS
        and backlog_scaled_ns(backlog, learned_ns) <= most_ns - ahead.work_ns
        and excess_ns <= most_ns - ahead.excess_ns
    )


cdef inline int64_t graph_nodes(int64_t learned_ns) noexcept nogil:
    return learned_ns / AHEAD_NODE_NS


cdef inline bint ahead_takes_graph(const Ahead* ahead, int64_t learned_ns) noexcept nogil:
    """Whether the queue has room for the nodes of a graph of that learned length, too."""
    return graph_nodes(learned_ns) < <int64_t>AHEAD_LAUNCHES - ahead.launches - ahead.nodes


cdef inline void ahead_submit_graph(Ahead* ahead, int64_t learned_ns) noexcept nogil:
    """What was submitted last was a graph."""
    ahead.nodes += <uint32_t>graph_nodes(learned_ns)


cdef inline void ahead_submit(
    Ahead* ahead, const Backlog* backlog, int64_t learned_ns, int64_t excess_ns
) noexcept nogil:
    cdef int64_t work_ns = clip_ns(backlog_scaled_ns(backlog, learned_ns), 0, PREDICTION_MAX_NS)
    if ahead.unmarked.launches == 0:
        memset(&ahead.unmarked, 0, sizeof(Stretch))
    ahead.unmarked.launches += 1
    ahead.unmarked.work_ns = min(ahead.unmarked.work_ns + work_ns, PREDICTION_MAX_NS)
    ahead.unmarked.learned_ns = min(ahead.unmarked.learned_ns + learned_ns, PREDICTION_MAX_NS)
    ahead.unmarked.excess_ns = min(ahead.unmarked.excess_ns + excess_ns, PREDICTION_MAX_NS)
    ahead.launches += 1
    ahead.excess_ns = min(ahead.excess_ns + excess_ns, PREDICTION_MAX_NS)
    ahead.work_ns = min(ahead.work_ns + work_ns, PREDICTION_MAX_NS)


cdef inline bint ahead_mark(Ahead* ahead, uint64_t tag) noexcept nogil:
    """A marker follows everything queued ahead so far: 1; 0 if there is nothing to mark or no room."""
    if ahead.unmarked.launches == 0 or ahead.count == AHEAD_MARKERS:
        return 0
    ahead.unmarked.tag = tag
    ahead.marked[ahead.count] = ahead.unmarked
    ahead.count += 1
    memset(&ahead.unmarked, 0, sizeof(Stretch))
    return 1


cdef inline void join_stretch(Stretch* stretch, const Stretch* other) noexcept nogil:
    """Launches that were submitted meanwhile, if any, all the same."""
    if other.launches:
        stretch.launches += other.launches
        stretch.unknown += other.unknown
        stretch.work_ns = min(stretch.work_ns + other.work_ns, PREDICTION_MAX_NS)
        stretch.learned_ns = min(stretch.learned_ns + other.learned_ns, PREDICTION_MAX_NS)
        stretch.excess_ns = min(stretch.excess_ns + other.excess_ns, PREDICTION_MAX_NS)
        stretch.tail_ns = max(stretch.tail_ns, other.tail_ns)
        stretch.unsure_ns = PREDICTION_MAX_NS


cdef inline void ahead_release(Ahead* ahead, Backlog* backlog, int64_t now_ns, bint late) noexcept nogil:
    """The word is about to be advanced: all work queued ahead counts as submitted at ``now_ns``. ``late``: another
    thread has advanced the word before. There is room for every marker, because ``ahead_begins`` held, and nothing was
    submitted since."""
    cdef Stretch* stretch
    cdef int64_t unsure_ns = PREDICTION_MAX_NS if late else unsure_now_ns(backlog)
    cdef uint32_t i
    if ahead.launches == 0:
        return
    backlog_wake(backlog, now_ns)
    for i in range(ahead.count + 1):
        stretch = &ahead.marked[i] if i < ahead.count else &ahead.unmarked
        if stretch.launches == 0:
            continue
        stretch.first_ns = stretch.last_ns = now_ns
        stretch.tail_ns = min(now_ns, PREDICTION_MAX_NS) + stretch.work_ns
        stretch.unsure_ns = unsure_ns
        note_longest(backlog, now_ns, (stretch.work_ns + stretch.excess_ns) / stretch.launches)
        backlog.work_ns = min(backlog.work_ns + stretch.work_ns, PREDICTION_MAX_NS)
        backlog.excess_ns = min(backlog.excess_ns + stretch.excess_ns, PREDICTION_MAX_NS)
        backlog.end_ns = stretch_end_ns(stretch, max(backlog.end_ns, now_ns))
        if i < ahead.count:
            backlog.marked[(backlog.head + backlog.count) % MARKERS] = stretch[0]
            backlog.count += 1
        else:
            join_stretch(stretch, &backlog.unmarked)
            backlog.unmarked = stretch[0]
        unsure_ns = PREDICTION_MAX_NS if late or backlog.discard else 0
    memset(&ahead.unmarked, 0, sizeof(Stretch))
    ahead.count = 0
    ahead.launches = 0
    ahead.nodes = 0
    ahead.work_ns = ahead.excess_ns = 0
