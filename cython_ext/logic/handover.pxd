"""The last moments of a lease: who stays awake for them, and from when on the next holder may be let in.

Awake
-----
A timed sleep overshoots by 50-160 us, and to wake an idle core costs 100-200 us (H200 host). A hand-over has four
threads in a row: the holder's hook sees the drain, its relay tells the dispatcher, that gives GO, the next hook lets
its queue run. Where there are cores to spare all of them stay awake from shortly before a lease's end until it has
drained, or for so long that a late one is no longer a matter of prediction.

Tail
----
To go from one context's work to another's the GPU needs 138 us (benchmarks/experiments/context_switch.cu, H200), and it begins when
the first has none left and the second has some. So the second's queue should be runnable by then. A holder whose lease
ends, that submits nothing more and whose queue is predicted to be short says so (``Slot.tail_epoch``), and GO is given.
Seldom does the GPU take the holder off for that: its time slices last 2 ms and more. The holder pays until it has
drained, its successor from then on; a long overlap they share.

Closed
------
A lease takes no more work once a launch no longer fits into it and its end is near. To fill the last of it one launch
at a time would leave gaps between them; what is given up is not paid for. Who comes next has a part of it instead: a
lease that waits for others may begin a little before its time once they have drained, in that last stretch in which the
scheduler lets nobody else in (``Policy.round_guard_ns``, less the time that its word takes).
"""

from libc.stdint cimport int64_t

cdef enum:
    AWAKE_BEFORE_NS = 400_000
    AWAKE_AFTER_NS = 2_000_000
    AWAKE_ASKED_NS = 200_000  # after asking for what may be had at once
    TAIL_NS = 150_000         # what three threads need to pass the word on; the more, the more often a slice ends in it
    CLOSE_NS = 1_000_000      # the end is near
    EARLY_NS = 700_000        # before its time: a tail, and half a kernel of 1 ms


cdef inline int64_t awake_before_ns(int64_t lasted_ns) noexcept nogil:
    """How long before the end of a lease of that length to stay awake, for who serves all: a thirtieth of it at most,
    so that no number of short leases takes more than that of a core."""
    return min(<int64_t>AWAKE_BEFORE_NS, lasted_ns >> 5)


cdef inline int64_t awake_after_ns(int64_t lasted_ns) noexcept nogil:
    """And after it, if it does not drain: the same part of it."""
    return min(<int64_t>AWAKE_AFTER_NS, lasted_ns >> 5)


cdef inline bint awake_for(int64_t due_ns, int64_t before_ns, int64_t after_ns, int64_t at_ns) noexcept nogil:
    """Whether ``at_ns`` is so close to the hand-over that is due at ``due_ns``. FOREVER_NS: none is."""
    return -before_ns <= at_ns - due_ns < after_ns
