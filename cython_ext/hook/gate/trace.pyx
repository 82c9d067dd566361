"""The records that the hook writes while a client records (vgpuctl trace). It writes them where it queries the driver
anyway, or skips that query (logic/gate/poll_skip.pxd), but never for a launch into a busy queue.

With recording off, each function is one load of a word that is in the cache. The caller holds ``gate.lock``: so the
process is its ring's only writer.
"""

from libc.stdint cimport int64_t, uint32_t

from cython_ext.hook.state cimport Gate
from cython_ext.pages.layout cimport FOREVER_NS, GRANTS_TRACED, TRACE_BUSY, TRACE_DRAIN, TRACE_LAUNCH
from cython_ext.logic.meter.durations cimport LaunchKey, is_graph
from cython_ext.logic.gate.trace cimport trace_closed, trace_drain_value, trace_launch_value, trace_part, trace_put
from cython_ext.native cimport load32


cdef inline bint traced(const Gate* gate) noexcept nogil:
    return load32(&gate.grants.flags) & GRANTS_TRACED != 0 and gate.ring != NULL


cdef public void vgpu_trace_idle(Gate* gate, int64_t since_ns) noexcept nogil:
    """The queue was busy from ``since_ns`` on and has just been seen, or taken, to be empty."""
    cdef int64_t begin_ns = 0, end_ns = 0
    if traced(gate) and trace_closed(&gate.backlog, since_ns, &gate.recorded_ns, &begin_ns, &end_ns):
        trace_put(gate.ring, &gate.slot.traced, TRACE_BUSY, begin_ns, end_ns, 0)


cdef public void vgpu_trace_busy(Gate* gate) noexcept nogil:
    """At a regular poll, record a long busy interval up to now in parts."""
    cdef int64_t begin_ns = 0, end_ns = 0
    if traced(gate) and trace_part(&gate.backlog, &gate.recorded_ns, &begin_ns, &end_ns):
        trace_put(gate.ring, &gate.slot.traced, TRACE_BUSY, begin_ns, end_ns, 0)


cdef public void vgpu_trace_launch(Gate* gate, const LaunchKey* key, int64_t lasted_ns, int64_t now) noexcept nogil:
    """A timed launch was found to be complete."""
    if traced(gate):
        trace_put(
            gate.ring, &gate.slot.traced, TRACE_LAUNCH, now - lasted_ns, now,
            trace_launch_value(lasted_ns, key.hash, is_graph(key))
        )


cdef public void vgpu_trace_drain(Gate* gate, uint32_t epoch) noexcept nogil:
    """The lease ``epoch`` has drained, and the window was adapted by it."""
    cdef int64_t end_ns = gate.over_end_ns if gate.over_end_ns < FOREVER_NS else 0
    if traced(gate):
        trace_put(
            gate.ring, &gate.slot.traced, TRACE_DRAIN, end_ns, gate.backlog.drained_ns,
            trace_drain_value(epoch, gate.window_ns)
        )
