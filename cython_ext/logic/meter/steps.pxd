"""Steps: which waits of a program end a decode step or a prefill, and whether that was in time (``--slo``).

Theory of operation
-------------------
A program that answers requests launches work, and waits for its result: a copy of tokens to the host, a stream, an
event. A *step* of a thread goes from its first launch after a wait to the end of a later wait. There are two kinds:

    decode     one token: its work is about as long each time
    prefill    the first step after a pause of PAUSE_NS, or one with far more work than a decode step

Behind no pause, work tells them apart, not time: the learned GPU time of the thread's launches by themselves, metered
(meter.pxd) or predicted under leases with an end. Reason: beside other vGPUs a decode step takes longer, and remains
one.

A wait ends no step if little work of its own thread came before it: the step goes on with the next launch. Reason:
programs look at single values between two tokens. ``usual_ns`` is the work of a decode step, a moving average. A
program may change: after CHANGED waits in a row with far less work these are its decode steps, and after LONGER
prefills in a row those are. CHANGED prefills are enough where few decode steps were seen. Reason: the first launches of
a graph have no learned length.

The time of a decode step counts from the end of the step before it (TPOT, time per output token). After a pause it
counts from its first launch. The time of a prefill counts from its first launch (TTFT, time to first token): the hook
does not see a request before the program launches something for it.

Each wait costs one launch off the fast path, which reads the clock. A thread writes its own ``Steps`` alone. All times
are nanoseconds.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    STEP_NONE = 0            # no step ended
    STEP_DECODE = 1
    STEP_PREFILL = 2

    PAUSE_NS = 20_000_000    # after a longer pause the next launch is for a new request (Policy.slo_pause_ns)
    STEP_LEAST_NS = 100_000  # work of the shortest step
    FAR = 4                  # times less work than a decode step has: it goes on
    LONG = 2                 # times more work: a prefill
    CHANGED = 4
    LONGER = 16


cdef struct Steps:
    bint waited              # since the last launch that began or continued a step
    bint request             # the step under way is the first one after a pause
    int64_t waited_ns        # when the last wait ended; 0: none yet
    int64_t began_ns         # the step under way; 0: none
    int64_t ended_ns         # the last step; 0: none yet
    uint64_t spent_ns        # by the thread, when the step under way began ...
    uint64_t waited_spent_ns     # ... and when the last wait ended
    uint64_t usual_ns        # work of a decode step; 0: not known yet
    uint32_t shorter         # waits with far less work, in a row
    uint32_t longer          # prefills, in a row
    uint32_t seen            # decode steps since ``usual_ns`` was set anew, LONGER at most


cdef inline void steps_begin(Steps* steps, int64_t now_ns, uint64_t spent_ns) noexcept nogil:
    """The first launch after a wait. The thread's launches before took ``spent_ns`` by themselves."""
    cdef bint pause = steps.waited_ns == 0 or now_ns - steps.waited_ns > PAUSE_NS
    steps.waited = 0
    if steps.began_ns != 0 and not pause:
        return                           # the step goes on
    steps.began_ns = now_ns
    steps.spent_ns = spent_ns
    steps.request = pause
    steps.shorter = 0 if pause else steps.shorter


cdef inline bint goes_on(Steps* steps, uint64_t own_ns, uint64_t* work_ns) noexcept nogil:
    """Whether a wait ends no step. ``own_ns``: the work since the wait before, ``work_ns``: that of the step. Where the
    program's steps have become shorter, ``work_ns`` becomes that of one."""
    if own_ns < STEP_LEAST_NS:
        return 1
    if steps.usual_ns == 0 or own_ns >= steps.usual_ns / FAR:
        steps.shorter = 0
        return 0
    steps.shorter += 1
    if steps.shorter < CHANGED:
        return 1
    work_ns[0] /= steps.shorter
    steps.usual_ns = work_ns[0]
    steps.shorter = steps.seen = 0
    return 0


cdef inline int kind_of(Steps* steps, uint64_t work_ns) noexcept nogil:
    if steps.request:
        return STEP_PREFILL
    if steps.usual_ns == 0:
        steps.usual_ns = work_ns
    if work_ns > LONG * steps.usual_ns:
        steps.longer += 1
        if steps.longer < (LONGER if steps.seen == LONGER else CHANGED):
            return STEP_PREFILL
        steps.usual_ns = work_ns
        steps.seen = 0
    steps.longer = 0
    steps.seen = min(steps.seen + 1, <uint32_t>LONGER)
    steps.usual_ns = (7 * steps.usual_ns + work_ns) / 8
    return STEP_DECODE


cdef inline int steps_end(Steps* steps, int64_t now_ns, uint64_t spent_ns, int64_t* lasted_ns) noexcept nogil:
    """A wait for the GPU is over. STEP_*: what ended with it, and how long that took."""
    cdef uint64_t work_ns = spent_ns - min(spent_ns, steps.spent_ns)
    cdef uint64_t own_ns = spent_ns - min(spent_ns, steps.waited_spent_ns)
    cdef int64_t since_ns = steps.began_ns
    cdef int kind
    steps.waited = 1
    steps.waited_ns = now_ns
    steps.waited_spent_ns = spent_ns
    if steps.began_ns == 0 or goes_on(steps, own_ns, &work_ns):
        return STEP_NONE
    kind = kind_of(steps, work_ns)
    if kind == STEP_DECODE and steps.ended_ns != 0 and steps.began_ns - steps.ended_ns <= PAUSE_NS:
        since_ns = steps.ended_ns
    lasted_ns[0] = now_ns - since_ns
    steps.began_ns = 0
    steps.ended_ns = now_ns
    return kind
