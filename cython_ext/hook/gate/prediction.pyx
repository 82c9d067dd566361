"""The prediction for a launch before it is made: how long it should take, how much longer it may, whether to time it.

The caller holds gate.lock.
"""

from libc.stdint cimport int64_t, uint64_t

from cython_ext.hook.state cimport Prediction, Gate
from cython_ext.logic.meter.durations cimport (
    Duration, LaunchKey, durations_find, durations_launch, durations_longest, durations_predict, is_graph, launch_hash,
    should_sample,
)
from cython_ext.logic.gate.overrun_bound cimport launch_excess_ns
from cython_ext.logic.gate.gate cimport UNKNOWN_MOST_NS, UNKNOWN_NS
from cython_ext.logic.meter.graphs cimport graph_doubted, graph_version
from cython_ext.logic.gate.window cimport backlog_disproved, backlog_scaled_ns

cdef enum:
    ANEW_NS = 1_000_000      # of launches as long as this each is timed while predictions are, or may be, far off


cdef Duration* entry_of(Gate* gate, LaunchKey* key, uint64_t after, bint counted) noexcept nogil:
    """The learned lengths of the launch ``key`` behind the one with that hash. The launch is counted there once. The
    function completes the key."""
    cdef Duration* known = NULL
    key.after = after
    if is_graph(key):
        key.grid_y = graph_version(&gate.graphs, key.handle)
    if not counted or is_graph(key):
        key.hash = launch_hash(key)
    if counted:
        known = durations_find(&gate.durations, key)
    return durations_launch(&gate.durations, key) if known == NULL else known


cdef public const Duration* vgpu_recollect(Gate* gate, LaunchKey* key) noexcept nogil:
    """The learned lengths of the launch ``key``, whatever is before it in its stream. The function counts the launch
    and completes the key. The result is valid until the next call that takes the table."""
    return entry_of(gate, key, 0, 0)


cdef public void vgpu_foresee(
    Gate* gate, LaunchKey* key, uint64_t after, bint counted, Prediction* foreseen
) noexcept nogil:
    """Predict the launch ``key`` behind the one with that hash, and complete the key. ``counted``: this launch was
    predicted, and counted, before."""
    cdef Duration* known = entry_of(gate, key, after, counted)
    cdef bint doubted = is_graph(key) and graph_doubted(&gate.graphs, key.handle)
    cdef int64_t learned_ns = durations_predict(&gate.durations, known)
    foreseen.assumed_ns = min(gate.window_ns, UNKNOWN_MOST_NS)
    if doubted and learned_ns >= 0:
        foreseen.assumed_ns = backlog_scaled_ns(&gate.backlog, learned_ns)
        learned_ns = UNKNOWN_NS
    foreseen.learned_ns = learned_ns
    foreseen.doubted_ns = foreseen.assumed_ns if doubted else 0
    foreseen.excess_ns = launch_excess_ns(&gate.backlog, learned_ns, durations_longest(&gate.durations, known))
    foreseen.sample = doubted or should_sample(known)
    foreseen.disproved = (
        backlog_disproved(&gate.backlog) and backlog_scaled_ns(&gate.backlog, learned_ns) >= <int64_t>ANEW_NS
    )
    foreseen.anew = foreseen.disproved or foreseen.excess_ns >= <int64_t>ANEW_NS
