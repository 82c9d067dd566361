"""When to ask the driver whether the queue has run, where the prediction says that it has.

The answer that everything has run costs a launching thread 1.4-1.7 us, half of what the launch itself takes (H100,
benchmarks/experiments/driver_call_cost.c; the answer that something still runs, 0.2 us). A program whose host is
slower than the GPU, under a limit, would pay that at every launch. As long as the answer is yes, the accounts are the
same with or without the question: the work is taken to have ended when it was predicted to (window.pxd).

So after BELIEVED_AFTER such answers in a row, the next few launches go without a question, and then the gate asks
again. The first no to a launching thread starts the count anew. A question is skipped only for a launch behind all work
that may still run, in the same stream and under the same lease (vgpu_may_be_spared). The launch's end is the end of
that work, too, so no drain is reported before it. A wrong belief leaves work out of the accounts until the next launch:
BELIEVED_NS at most in a row.
"""

from libc.stdint cimport int64_t, uint32_t

cdef enum:
    BELIEVED_AFTER = 32
    BELIEVED_LAUNCHES = 7    # then the driver is asked ...
    BELIEVED_NS = 50_000     # ... or after so long


cdef struct Belief:
    uint32_t right           # answers in a row that were as predicted
    uint32_t left            # launches that need not ask
    int64_t until_ns         # ... until then


cdef inline void belief_answered(Belief* belief, bint right, int64_t now_ns) noexcept nogil:
    """The queue should have run, and the driver was asked; ``right``: it had."""
    belief.right = min(belief.right + 1, <uint32_t>BELIEVED_AFTER) if right else 0
    belief.left = BELIEVED_LAUNCHES if belief.right == BELIEVED_AFTER else 0
    belief.until_ns = now_ns + BELIEVED_NS


cdef inline bint belief_suffices(Belief* belief, int64_t now_ns) noexcept nogil:
    """The queue should have run: whether a launch may go without a question. Counts the launch if so."""
    if belief.left == 0 or now_ns >= belief.until_ns:
        return 0
    belief.left -= 1
    return 1
