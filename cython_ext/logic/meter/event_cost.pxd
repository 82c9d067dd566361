"""What two events add to the launch between them, and the launch's own length without that.

A launch's own length is its part of a busy queue. An event waits until the work before it has run, and the launch
behind it cannot begin early. On H100s (benchmarks/experiments/event_cost.c, docs/reference/performance/light.md) events
add the same to launches of 2 to 22 µs:

    ================  ===========================  ====================
    queue             two events alone are apart   they add to a launch
    ================  ===========================  ====================
    busy              1.25 µs                      2.1 µs: 7/4 of that
    empty             1.2 µs beyond host time      0.3–0.45 µs: a third
    ================  ===========================  ====================

So the hook times PAIRS pairs of events with nothing between them in either queue. The shortest pair counts: a host may
be late, and others' time slices may come between. Until then nothing is taken off. All times are nanoseconds.
"""

from libc.stdint cimport int64_t, uint32_t

cdef enum:
    PAIRS = 8                # of each queue, once
    PAIR_MOST_NS = 3_000


cdef struct PairCost:
    uint32_t pairs           # timed so far
    int64_t apart_ns         # the shortest


cdef struct EventCost:
    PairCost busy            # work was queued before the first event
    PairCost empty           # none was


cdef inline bint event_cost_wants(const EventCost* cost, bint empty) noexcept nogil:
    """Whether one more pair in such a queue should be timed."""
    return (cost.empty.pairs if empty else cost.busy.pairs) < PAIRS


cdef inline void event_cost_notes(EventCost* cost, int64_t elapsed_ns, int64_t host_ns, bint empty) noexcept nogil:
    """Two events with nothing between them were ``elapsed_ns`` apart, of which the host took ``host_ns``."""
    cdef PairCost* pair = &cost.empty if empty else &cost.busy
    cdef int64_t apart_ns = min(max(elapsed_ns - host_ns, <int64_t>0), <int64_t>PAIR_MOST_NS)
    pair.apart_ns = min(pair.apart_ns, apart_ns) if pair.pairs else apart_ns
    pair.pairs += 1


cdef inline int64_t event_cost_length_ns(
    const EventCost* cost, int64_t elapsed_ns, int64_t host_ns, bint empty
) noexcept nogil:
    """The own length of a launch between two events that were ``elapsed_ns`` apart. In an empty queue the host needed
    ``host_ns`` of them to launch. At least an eighth of what was seen: no launch is free."""
    cdef int64_t added_ns = cost.empty.apart_ns / 3 if empty else cost.busy.apart_ns * 7 / 4
    return max(max(elapsed_ns - host_ns, elapsed_ns / 4) - added_ns, elapsed_ns / 8)
