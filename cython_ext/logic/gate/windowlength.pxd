"""How long the in-flight window is: it follows how far leases drain after their ends."""

from libc.stdint cimport int64_t

from cython_ext.logic.gate.window cimport clip_ns

cdef enum:
    OVERRUN_LEAST_NS = 1_000_000         # tolerated whatever the window
    WINDOW_CREEP = 64                    # good leases from nothing to the widest window
    WINDOW_LEAST_NS = 50_000             # a smaller window cannot hide the latency of a launch


cdef inline int64_t overrun_tolerated_ns(int64_t most_ns, int64_t longest_ns) noexcept nogil:
    """How far a lease may drain after its end before the window is to blame. ``most_ns``: the widest window;
    ``longest_ns``: of the kernels launched lately, of which half may hang over by the rule of the gate.

    Other vGPUs wait for an overrun, and the vGPU is charged for it. So no vGPU loses by one now and then. A queue too
    short to hide the host loses all the time. 1 ms of 12 is an error of 8 % in the predictions.
    """
    return max(<int64_t>OVERRUN_LEAST_NS, most_ns / 2) + longest_ns / 2


cdef inline int64_t window_adapt(
    int64_t window_ns, int64_t most_ns, int64_t overrun_ns, int64_t target_ns
) noexcept nogil:
    """The window after a lease drained ``overrun_ns`` after its end (below 0: before): additive increase, halving.

    ``most_ns`` is GrantsPage.window_ns, ``target_ns`` the overrun to be tolerated. Chiu and Jain 1989.
    """
    cdef int64_t least_ns = min(<int64_t>WINDOW_LEAST_NS, most_ns)
    if overrun_ns > target_ns:
        return clip_ns(window_ns / 2, least_ns, most_ns)
    return clip_ns(window_ns + most_ns / WINDOW_CREEP + 1, least_ns, most_ns)
