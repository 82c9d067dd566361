"""Executable graphs that are changed after they were made: which of their learned lengths still hold.

An update may change a node's pointer, which is nothing, or its grid, which is everything. So a graph is **doubted**
from an update until the first launch after it was timed. A doubted graph counts for as long as it was, but only one
runs at a time: if it has become ten times as long, nothing is queued behind it. If the sample is off by more than
double, the graph gets a new **version**, part of its LaunchKey, and is learned from the beginning.

Some programs update before every launch, for other addresses, and would never have two in flight (JAX does). So a graph
that has been **steady** for long enough, by the samples, is believed as a kernel is. A kernel's arguments may change
its length, too. The required time doubles each time that a graph's length did change. It halves while the length does
not change for long. Reason: a sample may be off by itself (the host paused between its events, caches are cold after a
hand-over). One such sample now and then must not end the belief for ever. A sample that is off by less than double
counts neither way.

A cache in memory of the caller's (zeroed): a full set forgets the graph that was updated longest ago. Its first version
is then believed again. The caller serialises.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from cython_ext.logic.meter.durations cimport mix64

cdef enum:
    GRAPH_SETS = 64
    GRAPH_WAYS = 8
    GRAPH_STEADY = 16        # samples behind updates that changed nothing, until the next ones are believed
    GRAPH_STEADY_MOST = 1 << 20
    GRAPH_STEADY_LONG = 8    # times as many as were needed: half would have done


cdef struct UpdatedGraph:
    uint64_t handle          # CUgraphExec; 0: free
    uint64_t used            # GraphTable.clock of the newest update
    uint32_t updates         # so far
    uint32_t proven          # of these, known for their effect on the length
    uint32_t version
    uint32_t steady          # samples behind updates that took as long as before, since its length last changed
    uint32_t needed          # so many of them to be believed


cdef struct GraphTable:
    UpdatedGraph[512] graphs
    uint64_t clock
    uint32_t versions        # given so far: none is given twice


cdef inline UpdatedGraph* graph_find(GraphTable* table, uint64_t handle) noexcept nogil:
    """NULL: never updated."""
    cdef UpdatedGraph* graph = table.graphs + (mix64(handle) % GRAPH_SETS) * GRAPH_WAYS
    cdef int way
    for way in range(GRAPH_WAYS):
        if graph[way].handle == handle:
            return graph + way
    return NULL


cdef inline void graph_updated(GraphTable* table, uint64_t handle) noexcept nogil:
    cdef UpdatedGraph* graph = graph_find(table, handle)
    cdef UpdatedGraph* others = table.graphs + (mix64(handle) % GRAPH_SETS) * GRAPH_WAYS
    cdef int way
    if graph == NULL:
        graph = others
        for way in range(1, GRAPH_WAYS):
            if others[way].used < graph.used:
                graph = others + way
        memset(graph, 0, sizeof(UpdatedGraph))
        graph.handle = handle
        graph.needed = GRAPH_STEADY
    table.clock += 1
    graph.used = table.clock
    graph.updates += 1


cdef inline uint32_t graph_version(GraphTable* table, uint64_t handle) noexcept nogil:
    cdef const UpdatedGraph* graph = graph_find(table, handle)
    return 0 if graph == NULL else graph.version


cdef inline uint32_t graph_updates(GraphTable* table, uint64_t handle) noexcept nogil:
    """To be handed to ``graph_timed`` with the sample of a launch that follows now."""
    cdef const UpdatedGraph* graph = graph_find(table, handle)
    return 0 if graph == NULL else graph.updates


cdef inline bint graph_doubted(GraphTable* table, uint64_t handle) noexcept nogil:
    cdef const UpdatedGraph* graph = graph_find(table, handle)
    return graph != NULL and graph.proven != graph.updates and graph.steady < graph.needed


cdef inline void graph_timed(
    GraphTable* table, uint64_t handle, uint32_t updates, int64_t learned_ns, int64_t lasted_ns
) noexcept nogil:
    """A launch behind so many ``updates`` took ``lasted_ns``, where ``learned_ns`` was known; below 0: nothing."""
    cdef UpdatedGraph* graph = graph_find(table, handle)
    if graph == NULL or updates > graph.updates:
        return               # another graph than the one that was launched
    if learned_ns >= 0 and graph.proven < updates:
        if lasted_ns > 2 * learned_ns or learned_ns > 2 * lasted_ns:
            table.versions += 1
            graph.version = table.versions
            graph.steady = 0
            graph.needed = min(2 * graph.needed, <uint32_t>GRAPH_STEADY_MOST)
        elif 4 * (lasted_ns - learned_ns) <= learned_ns and 4 * (learned_ns - lasted_ns) <= learned_ns:
            graph.steady += 1
            if graph.steady / GRAPH_STEADY_LONG >= graph.needed:
                graph.needed = max(graph.needed / 2, <uint32_t>GRAPH_STEADY)
                graph.steady = graph.needed
    graph.proven = max(graph.proven, updates)


cdef inline void graph_forget(GraphTable* table, uint64_t handle) noexcept nogil:
    """It was destroyed; 0: all were."""
    cdef UpdatedGraph* graph
    if handle == 0:
        memset(table.graphs, 0, sizeof(table.graphs))
        return
    graph = graph_find(table, handle)
    if graph != NULL:
        memset(graph, 0, sizeof(UpdatedGraph))
