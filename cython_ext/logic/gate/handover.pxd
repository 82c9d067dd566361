"""The last moments of a lease: which threads stay awake for them, and from when on the next holder may get GO.

Awake
-----
A timed sleep overshoots by 50-160 us, and to wake an idle core costs 100-200 us (H200 host). A hand-over has four
threads in a row. The holder's hook detects the drain, its relay reports that to the dispatcher, the dispatcher gives
GO, and the next hook lets its queue run. Where there are cores to spare, all four stay awake from shortly before a
lease's end until it has drained. They go to sleep once the drain is so late that no prediction dates it any more.

Tail
----
To go from one context's work to another's the GPU needs 138 us (benchmarks/experiments/context_switch.cu, H200), and
it begins when the first has none left and the second has some. So the second's queue should be runnable by then. A
holder publishes its tail (``Slot.tail_epoch``) when its lease ends, it submits nothing more, and its queue is
predicted to be short. Then the dispatcher gives GO to the next. The GPU seldom interrupts the holder for that: its
time slices last 2 ms and more. The holder is charged until it has drained, its successor from then on. They share the
charge for a long overlap.

Closed
------
A lease takes no more work once a launch no longer fits into it and its end is near. Filling the rest one launch at a
time would leave gaps between launches. The vGPU is not charged for the time that it gives up. The next vGPU gets a part
of that time: a lease that waits for others may begin a little before its time once they have drained. This happens in
the last stretch, in which the scheduler admits no other lease (``Policy.round_guard_ns``, less the time that its
message takes).
"""

from libc.stdint cimport int64_t

cdef enum:
    AWAKE_BEFORE_NS = 400_000
    AWAKE_AFTER_NS = 2_000_000
    AWAKE_ASKED_NS = 200_000  # after a want for a lease that may begin at once
    TAIL_NS = 150_000         # three threads need that to pass the report on; the longer, the more often a slice ends
    CLOSE_NS = 1_000_000      # the end is near
    EARLY_NS = 700_000        # before its time: a tail, and half a kernel of 1 ms


cdef inline int64_t awake_before_ns(int64_t lasted_ns) noexcept nogil:
    """How long before the end of a lease of that length the dispatcher and the relay stay awake. It is a thirtieth of
    the lease at most, so that short leases never take more than that part of a core."""
    return min(<int64_t>AWAKE_BEFORE_NS, lasted_ns >> 5)


cdef inline int64_t awake_after_ns(int64_t lasted_ns) noexcept nogil:
    """How long they stay awake after the end while the lease does not drain: at most the same part of it."""
    return min(<int64_t>AWAKE_AFTER_NS, lasted_ns >> 5)


cdef inline bint awake_for(int64_t due_ns, int64_t before_ns, int64_t after_ns, int64_t at_ns) noexcept nogil:
    """Whether ``at_ns`` is so close to the hand-over that is due at ``due_ns``. FOREVER_NS: none is."""
    return -before_ns <= at_ns - due_ns < after_ns
