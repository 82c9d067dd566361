"""When to ask the driver whether the queue has run, where it should have by its prediction.

To hear that everything has run costs a launching thread 1.4-1.7 us, half of what the launch itself takes (H100,
benchmarks/experiments/driver_call_cost.c; that something still runs, 0.2 us). A program whose host is slower than the GPU, under a limit,
would pay that at every launch. And the books come out the same, asked at each launch or not, as long as the answer is
yes: the work is taken to have ended when it was predicted to (window.pxd).

So who has got BELIEVED_AFTER such answers in a row goes without for the next few launches, and is asked again before
long; the first no to a launching thread starts it all over. Only for a launch behind all that may still run, in the
same stream and under the same lease (vgpu_may_be_spared): its end is the end of that, too, so that a drain is never
told before it. A wrong belief leaves work out of the books until the next launch: BELIEVED_NS at most in a row.
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
    """The queue should have run: whether a launch may take it for granted. Counts it if so."""
    if belief.left == 0 or now_ns >= belief.until_ns:
        return 0
    belief.left -= 1
    return 1
