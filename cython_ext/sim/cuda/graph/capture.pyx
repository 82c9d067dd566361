"""Stream capture: work becomes nodes of a graph instead of being done, and much is refused meanwhile.

A capture in mode GLOBAL forbids every thread, in mode THREAD_LOCAL its own, calls that might wait for the GPU or
change what the capture assumes (cuEventQuery, cuStreamQuery, cuMemAlloc, synchronisation): they fail and they break
the capture, unless the calling thread's mode is RELAXED. The legacy stream may not be used at all while a blocking
stream of its context captures: that breaks the capture in any mode of the thread. (Checked against an H200.)
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc

from cython_ext.sim.cuda.driver cimport (
    CAPTURED_EVENT, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, Capture, Context, CUresult, DATA_COPY,
    EFFECT_EVENT, EFFECT_HOST, EFFECT_WAIT, EFFECT_WRITE, Event, Frontier, Graph, ILLEGAL_STATE, INVALID_VALUE,
    MARK_GRAPH, Node, OUT_OF_MEMORY, SUCCESS, Stream, Work, drv_add_node, drv_free_graph, drv_lock,
    drv_new_graph, drv_next_id, drv_stream, drv_streams, drv_unlock, sim_thread,
)
from cython_ext.sim.state cimport OP_WAIT, STREAM_LEGACY, STREAM_NONBLOCKING

cdef enum:
    MODE_GLOBAL = 0
    MODE_THREAD_LOCAL = 1
    MODE_RELAXED = 2
    STATUS_NONE = 0
    STATUS_ACTIVE = 1
    STATUS_INVALIDATED = 2
    NODE_KERNEL = 0
    NODE_COPY = 1
    NODE_FILL = 2
    NODE_HOST = 3
    NODE_EMPTY = 5
    NODE_WAIT_EVENT = 6
    NODE_RECORD_EVENT = 7
    NODE_WORDS = 12

cdef Capture* captures


cdef uint32_t this_thread() noexcept nogil:
    if sim_thread.id == 0:
        sim_thread.id = drv_next_id()
    return sim_thread.id


cdef public CUresult drv_check_unsafe() noexcept nogil:
    """Before a call that captures forbid: SUCCESS, or it has just broken them."""
    cdef Capture* capture
    cdef int mode = sim_thread.capture_mode
    cdef bint own
    cdef CUresult result = SUCCESS
    if captures == NULL or mode == MODE_RELAXED:
        return SUCCESS
    drv_lock()
    capture = captures
    while capture != NULL:
        own = capture.thread == this_thread() and capture.mode != MODE_RELAXED
        if own or (mode == MODE_GLOBAL and capture.mode == MODE_GLOBAL):
            capture.invalidated = True
            result = CAPTURE_UNSUPPORTED
        capture = capture.next
    drv_unlock()
    return result


cdef public CUresult drv_break_captures(Context* context) noexcept nogil:
    """The legacy stream was used while blocking streams of its context capture. Under the locks."""
    cdef Stream* stream = drv_streams()
    while stream != NULL:
        if stream.context == context and stream.capture != NULL and not stream.flags & STREAM_NONBLOCKING:
            stream.capture.invalidated = True
        stream = stream.next
    return CAPTURE_IMPLICIT


# -- frontiers

cdef bint merge(Frontier* into, Frontier* other) noexcept nogil:
    cdef uint32_t i, k
    for i in range(other.count):
        k = 0
        while k < into.count and into.node[k] != other.node[i]:
            k += 1
        if k < into.count:
            continue
        if into.count == 32:
            return False
        into.node[into.count] = other.node[i]
        into.count += 1
    return True


cdef void join(Stream* stream, Capture* capture) noexcept nogil:
    stream.capture = capture
    stream.frontier.count = 0
    if not stream.flags & STREAM_NONBLOCKING:
        stream.context.captures += 1


cdef void leave(Stream* stream) noexcept nogil:
    stream.capture = NULL
    stream.frontier.count = 0
    if not stream.flags & STREAM_NONBLOCKING:
        stream.context.captures -= 1


# -- what a capturing stream is given

cdef int node_type(Work* work) noexcept nogil:
    if work.memory:
        return work.memory
    if work.function != NULL:
        return NODE_KERNEL
    if work.data:
        return NODE_COPY if work.data == DATA_COPY else NODE_FILL
    if work.effect.kind == EFFECT_HOST:
        return NODE_HOST
    if work.effect.kind in (EFFECT_WAIT, EFFECT_WRITE):
        return NODE_WORDS
    if work.effect.kind == EFFECT_EVENT:
        return NODE_RECORD_EVENT
    return NODE_WAIT_EVENT if work.kind == OP_WAIT else NODE_EMPTY


cdef public CUresult drv_capture_work(Stream* stream, Work* work) noexcept nogil:
    cdef Node* node
    cdef CUresult result = SUCCESS
    drv_lock()
    if stream.capture == NULL:
        result = ILLEGAL_STATE
    elif stream.capture.invalidated:
        result = CAPTURE_INVALIDATED
    else:
        node = drv_add_node(stream.capture.graph, &stream.frontier, work, node_type(work))
        if node == NULL:
            result = OUT_OF_MEMORY
        else:
            stream.frontier.node[0] = node
            stream.frontier.count = 1
    drv_unlock()
    return result


cdef public CUresult drv_capture_event(Stream* stream, Event* event) noexcept nogil:
    """Record: the event stands for the stream's place in the capture."""
    cdef CUresult result = SUCCESS
    drv_lock()
    if stream.capture.invalidated:
        result = CAPTURE_INVALIDATED
    else:
        event.recorded = True
        event.capture = stream.capture
        event.frontier = stream.frontier
    drv_unlock()
    return result


cdef public CUresult drv_capture_wait(Stream* stream, Event* event) noexcept nogil:
    """Wait for an event where either side captures: the stream joins, or something is wrong."""
    cdef CUresult result = SUCCESS
    drv_lock()
    if stream.capture != NULL and stream.capture.invalidated:
        result = CAPTURE_INVALIDATED
    elif event.capture != NULL and event.capture.graph == NULL:
        result = CAPTURED_EVENT  # of a capture that is over
    elif event.capture == NULL:
        # Work outside of the capture cannot be waited for inside.
        stream.capture.invalidated = True
        result = CAPTURE_ISOLATION
    elif stream.capture != NULL and stream.capture != event.capture:
        stream.capture.invalidated = event.capture.invalidated = True
        result = CAPTURE_MERGE
    elif stream.capture == NULL and stream.flags & STREAM_LEGACY:
        event.capture.invalidated = True
        result = CAPTURE_IMPLICIT
    else:
        if stream.capture == NULL:
            join(stream, event.capture)
        if not merge(&stream.frontier, &event.frontier):
            result = OUT_OF_MEMORY
    drv_unlock()
    return result


# -- begin and end

cdef CUresult begin(void* handle, int mode, Graph* graph, Frontier* needs) noexcept nogil:
    global captures
    cdef Stream* stream
    cdef Capture* capture
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if not MODE_GLOBAL <= mode <= MODE_RELAXED:
        return INVALID_VALUE
    if stream.flags & STREAM_LEGACY:
        return CAPTURE_UNSUPPORTED
    if stream.capture != NULL:
        return ILLEGAL_STATE
    capture = <Capture*>calloc(1, sizeof(Capture))
    if capture == NULL:
        return OUT_OF_MEMORY
    capture.id = drv_next_id()
    capture.mode = mode
    capture.thread = this_thread()
    capture.foreign = graph != NULL
    capture.graph = graph if graph != NULL else drv_new_graph()
    capture.origin = stream
    drv_lock()
    capture.next = captures
    captures = capture
    join(stream, capture)
    if needs != NULL:
        stream.frontier = needs[0]
    drv_unlock()
    return SUCCESS


cdef public CUresult cuStreamBeginCapture_v2(void* stream, int mode) noexcept nogil:
    return begin(stream, mode, NULL, NULL)


cdef public CUresult cuStreamBeginCapture(void* stream) noexcept nogil:
    return begin(stream, MODE_GLOBAL, NULL, NULL)


cdef public CUresult cuStreamBeginCaptureToGraph(void* stream, Graph* graph, Node** dependencies, void* edges,
                                                 size_t count, int mode) noexcept nogil:
    cdef Frontier needs
    cdef size_t i
    if graph == NULL or graph.mark != MARK_GRAPH or count > 32:
        return INVALID_VALUE
    needs.count = <uint32_t>count
    for i in range(count):
        needs.node[i] = dependencies[i]
    return begin(stream, mode, graph, &needs)


cdef bint is_joined(Capture* capture) noexcept nogil:
    """Whether every node without a successor is behind the origin."""
    cdef Node* node = capture.graph.first
    cdef Frontier* frontier = &capture.origin.frontier
    cdef uint32_t k
    while node != NULL:
        if node.needed_by == 0:
            k = 0
            while k < frontier.count and frontier.node[k] != node:
                k += 1
            if k == frontier.count:
                return False
        node = node.next
    return True


cdef void forget(Capture* capture) noexcept nogil:
    global captures
    cdef Capture** link = &captures
    cdef Stream* stream = drv_streams()
    while link[0] != capture:
        link = &link[0].next
    link[0] = capture.next
    while stream != NULL:
        if stream.capture == capture:
            leave(stream)
        stream = stream.next
    # Events of this capture may outlive it: its memory stays, and shows that it is over.
    capture.graph = NULL
    capture.origin = NULL


cdef public CUresult cuStreamEndCapture(void* handle, Graph** out) noexcept nogil:
    cdef Stream* stream
    cdef Capture* capture
    cdef Graph* graph
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    out[0] = NULL
    drv_lock()
    capture = stream.capture
    if capture == NULL:
        result = ILLEGAL_STATE
    elif capture.mode != MODE_RELAXED and capture.thread != this_thread():
        result = CAPTURE_WRONG_THREAD
    elif capture.origin != stream:
        capture.invalidated = True
        result = CAPTURE_UNMATCHED
    else:
        graph = capture.graph
        if capture.invalidated:
            result = CAPTURE_INVALIDATED
        elif not is_joined(capture):
            result = CAPTURE_UNJOINED
        else:
            out[0] = graph
        if result != SUCCESS and not capture.foreign:
            drv_free_graph(graph)
        forget(capture)
    drv_unlock()
    return result


# -- asking

cdef CUresult status_of(void* handle, int* status, Stream** stream) noexcept nogil:
    cdef CUresult result = drv_stream(handle, stream)
    if result != SUCCESS:
        return result
    if stream[0].flags & STREAM_LEGACY and stream[0].context.captures:
        return CAPTURE_IMPLICIT
    status[0] = STATUS_NONE
    if stream[0].capture != NULL:
        status[0] = STATUS_INVALIDATED if stream[0].capture.invalidated else STATUS_ACTIVE
    return SUCCESS


cdef public CUresult cuStreamIsCapturing(void* handle, int* status) noexcept nogil:
    cdef Stream* stream
    return status_of(handle, status, &stream)


cdef public CUresult cuStreamGetCaptureInfo_v2(void* handle, int* status, uint64_t* number, Graph** graph,
                                               Node*** dependencies, size_t* count) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = status_of(handle, status, &stream)
    if result != SUCCESS or status[0] != STATUS_ACTIVE:
        return result
    if number != NULL:
        number[0] = stream.capture.id
    if graph != NULL:
        graph[0] = stream.capture.graph
    if dependencies != NULL:
        dependencies[0] = stream.frontier.node
    if count != NULL:
        count[0] = stream.frontier.count
    return SUCCESS


cdef public CUresult cuStreamGetCaptureInfo(void* stream, int* status, uint64_t* number) noexcept nogil:
    return cuStreamGetCaptureInfo_v2(stream, status, number, NULL, NULL, NULL)


cdef public CUresult cuStreamGetCaptureInfo_v3(void* stream, int* status, uint64_t* number, Graph** graph,
                                               Node*** dependencies, const void** edges,
                                               size_t* count) noexcept nogil:
    if edges != NULL:
        edges[0] = NULL
    return cuStreamGetCaptureInfo_v2(stream, status, number, graph, dependencies, count)


cdef public CUresult cuStreamUpdateCaptureDependencies_v2(void* handle, Node** dependencies, void* edges,
                                                          size_t count, unsigned int flags) noexcept nogil:
    """flags: 0 add to, 1 replace what the stream's next node depends on."""
    cdef Stream* stream
    cdef Frontier others
    cdef size_t i
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if stream.capture == NULL:
        return ILLEGAL_STATE
    if count > 32:
        return INVALID_VALUE
    others.count = <uint32_t>count
    for i in range(count):
        others.node[i] = dependencies[i]
    drv_lock()
    if flags & 1:
        stream.frontier = others
    else:
        merge(&stream.frontier, &others)
    drv_unlock()
    return SUCCESS


cdef public CUresult cuStreamUpdateCaptureDependencies(void* handle, Node** dependencies, size_t count,
                                                       unsigned int flags) noexcept nogil:
    return cuStreamUpdateCaptureDependencies_v2(handle, dependencies, NULL, count, flags)


cdef public CUresult cuThreadExchangeStreamCaptureMode(int* mode) noexcept nogil:
    cdef int before = sim_thread.capture_mode
    if mode == NULL or not MODE_GLOBAL <= mode[0] <= MODE_RELAXED:
        return INVALID_VALUE
    sim_thread.capture_mode = mode[0]
    mode[0] = before
    return SUCCESS
