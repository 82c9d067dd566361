"""How much longer than predicted the queued work may take, where it has kernels that were longer of late.

One kernel at one width takes 1 ms or 10 by its arguments, and nothing shows which before it has run. A window of 12 ms
of such short kernels takes 120 ms once they are long. Then other vGPUs get the GPU before the queue has drained, the
GPU switches back and forth, and the vGPU is charged for all of it. So a launch counts for more where its kernel's
highest estimate of late (durations.pxd) would disprove the prediction. The difference is its **excess**. The excess of
a queue is bounded (gate.pxd, prequeue.pxd). A queue with an excess is marked more often, so that its rest is known.
Such launches are timed, so that their new length is known after a few.

Lengths that vary by less have no excess: predictions are right in the sum. Nor have kernels that are short at their
longest. Reason: the GPU's clock, its caches and a hand-over vary their lengths by as much, and a queue that they keep
short would hide no host time.
"""

from libc.stdint cimport int64_t

from cython_ext.logic.gate.window cimport DISPROVED, FORGIVEN_NS, PREDICTION_MAX_NS, Backlog, backlog_scaled_ns

cdef enum:
    EXCESS_LEAST_NS = 1_000_000          # a kernel that takes no longer at its longest has no excess


cdef inline int64_t launch_excess_ns(
    const Backlog* backlog, int64_t predicted_ns, int64_t longest_ns
) noexcept nogil:
    """Of a launch that was learned to take ``predicted_ns``, and ``longest_ns`` at most of late."""
    cdef int64_t scaled_ns = backlog_scaled_ns(backlog, predicted_ns)
    if scaled_ns < 0 or longest_ns < <int64_t>EXCESS_LEAST_NS or <double>longest_ns <= DISPROVED * <double>scaled_ns:
        return 0
    return min(longest_ns, PREDICTION_MAX_NS) - scaled_ns


cdef inline int64_t backlog_excess_ns(const Backlog* backlog, int64_t now_ns) noexcept nogil:
    """Of everything queued; none while the queue is forgiven."""
    return 0 if now_ns - backlog.forgiven_ns <= <int64_t>FORGIVEN_NS else backlog.excess_ns
