"""Memory that graphs allocate: nodes that take and nodes that give back, at addresses known when they are made.

An executable graph needs as much as its nodes have taken at once, in the order in which they were made. It gets that at
its first upload or launch, in steps as a pool does, and keeps it until it is destroyed; then it is *reserved* for
other graphs of the device, until that is trimmed. Trimming also takes it from executable graphs that do not run (H200:
128 MiB were taken when a graph was uploaded, and given back when it had been destroyed and the device was trimmed).
Contents live in this process, at the address, until neither a graph nor an executable one knows it.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_GRAPH, mem_add, mem_charge, mem_discharge, mem_find, mem_remove,
)
from cython_ext.sim.cuda.driver cimport (
    CONTEXT_IS_DESTROYED, CUresult, Context, Graph, GraphMemory, INVALID_DEVICE, INVALID_VALUE, MARK_NODE,
    MARK_STREAM, NODE_GIVES, NODE_TAKES, Node, OUT_OF_MEMORY, SUCCESS, Stream, Work, drv_add_to_graph, drv_begin,
    drv_capture_work, drv_check_unsafe, drv_current_context, drv_device, drv_devices, drv_end, drv_lock, drv_unlock,
)
from cython_ext.sim.share cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap,
)
from cython_ext.sim.state cimport OP_MARK

cdef enum:
    PAGE = 4096
    STEP = 32 << 20
    ATTRIBUTE_USED = 0
    ATTRIBUTE_USED_HIGH = 1
    ATTRIBUTE_RESERVED = 2
    ATTRIBUTE_RESERVED_HIGH = 3


cdef struct Reserve:            # of a device
    Context* context            # pays for it
    uint64_t reserved
    uint64_t used               # by executable graphs that have theirs
    uint64_t reserved_high
    uint64_t used_high
    GraphMemory* graphs

cdef Reserve[16] reserves


cdef uint64_t rounded(uint64_t size, uint64_t unit) noexcept nogil:
    return (size + unit - 1) / unit * unit


cdef Context* owner(Context* context) noexcept nogil:
    return drv_device(context.device).primary if context.is_green else context


# -- addresses; under the process's lock. Allocation.flags: graphs and executable graphs that know it

cdef Allocation* at(uint64_t address) noexcept nogil:
    cdef Allocation* found = mem_find(address)
    return found if found != NULL and found.address == address and found.backing == BACKING_GRAPH else NULL


cdef void forget_if_unknown(Allocation* allocation) noexcept nogil:
    if allocation.flags == 0 and not allocation.accessible:
        munmap(<void*>allocation.address, allocation.mapped)
        mem_remove(allocation)


cdef void release(uint64_t address) noexcept nogil:
    cdef Allocation* allocation = at(address)
    if allocation != NULL:
        allocation.flags -= 1
        forget_if_unknown(allocation)


cdef public void mem_forget_node(const Node* node) noexcept nogil:
    """A graph goes, and with it this node."""
    if node.type == NODE_TAKES:
        release(node.work.target)


cdef public void mem_free_of_graph(Allocation* allocation) noexcept nogil:
    """What a graph has allocated, and did not free itself."""
    allocation.accessible = False
    forget_if_unknown(allocation)


cdef CUresult take(Work* work, Context* context, uint64_t size) noexcept nogil:
    """The work of a node that allocates: an address, but nothing there yet."""
    cdef Allocation allocation
    cdef void* memory
    cdef CUresult result = SUCCESS
    if size == 0:
        return INVALID_VALUE
    memory = mmap(NULL, rounded(size, PAGE), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        return OUT_OF_MEMORY
    memset(&allocation, 0, sizeof(Allocation))
    allocation.address = <uint64_t>memory
    allocation.size = size
    allocation.mapped = rounded(size, PAGE)
    allocation.context = context
    allocation.backing = BACKING_GRAPH
    allocation.flags = 1
    drv_lock()
    if not mem_add(&allocation):
        result = OUT_OF_MEMORY
    drv_unlock()
    memset(work, 0, sizeof(Work))
    work.kind = OP_MARK
    work.memory = NODE_TAKES
    work.target = allocation.address
    work.width = size
    return result


cdef CUresult give(Work* work, uint64_t address) noexcept nogil:
    cdef bint known
    drv_lock()
    known = at(address) != NULL
    drv_unlock()
    memset(work, 0, sizeof(Work))
    work.kind = OP_MARK
    work.memory = NODE_GIVES
    work.target = address
    return SUCCESS if known else INVALID_VALUE


cdef CUresult added(CUresult result, const Work* work) noexcept nogil:
    if result != SUCCESS and work.memory == NODE_TAKES:
        drv_lock()
        release(work.target)
        drv_unlock()
    return result


cdef public CUresult drv_capture_take(Stream* stream, uint64_t* address, uint64_t size) noexcept nogil:
    """cuMemAllocAsync while the stream captures."""
    cdef Work work
    cdef CUresult result = take(&work, owner(stream.context), size)
    if result == SUCCESS:
        address[0] = work.target
        result = added(drv_capture_work(stream, &work), &work)
    return result


cdef public CUresult drv_capture_give(Stream* stream, uint64_t address) noexcept nogil:
    cdef Work work
    cdef CUresult result = give(&work, address)
    return drv_capture_work(stream, &work) if result == SUCCESS else result


cdef public bint drv_waits_for_graph(uint64_t address) noexcept nogil:
    """Only the graph itself may touch it yet, or still."""
    cdef const Allocation* allocation
    cdef bint waits
    drv_lock()
    allocation = mem_find(address)
    waits = allocation != NULL and allocation.backing == BACKING_GRAPH and not allocation.accessible
    drv_unlock()
    return waits


# -- nodes

cdef public struct AllocationNodeParams:    # CUDA_MEM_ALLOC_NODE_PARAMS, with CUmemPoolProps at its beginning
    int type
    int handle_types
    int location_type
    int location
    void* security
    size_t most_bytes
    unsigned short usage
    unsigned char reserved[54]
    void* accesses
    size_t access_count
    size_t size
    uint64_t address


cdef public CUresult cuGraphAddMemAllocNode(
    Node** out, Graph* graph, Node** dependencies, size_t count, AllocationNodeParams* p
) noexcept nogil:
    cdef Work work
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS and (p.type != 1 or p.location_type != 1):
        result = INVALID_VALUE
    if result == SUCCESS and p.location != context.device:
        context = drv_device(p.location).primary if drv_device(p.location) != NULL else NULL
        result = SUCCESS if context != NULL else INVALID_DEVICE
    if result == SUCCESS:
        result = take(&work, owner(context), p.size)
    if result != SUCCESS:
        return result
    p.address = work.target
    return added(drv_add_to_graph(out, graph, dependencies, count, &work, NODE_TAKES), &work)


cdef public CUresult cuGraphAddMemFreeNode(
    Node** out, Graph* graph, Node** dependencies, size_t count, uint64_t address
) noexcept nogil:
    cdef Work work
    cdef CUresult result = give(&work, address)
    return drv_add_to_graph(out, graph, dependencies, count, &work, NODE_GIVES) if result == SUCCESS else result


cdef public CUresult cuGraphMemAllocNodeGetParams(Node* node, AllocationNodeParams* p) noexcept nogil:
    cdef const Allocation* allocation
    if node == NULL or node.mark != MARK_NODE or node.type != NODE_TAKES:
        return INVALID_VALUE
    memset(p, 0, sizeof(AllocationNodeParams))
    p.type = p.location_type = 1
    p.size = node.work.width
    p.address = node.work.target
    drv_lock()
    allocation = at(node.work.target)
    p.location = allocation.context.device if allocation != NULL else 0
    drv_unlock()
    return SUCCESS if allocation != NULL else CONTEXT_IS_DESTROYED


cdef public CUresult cuGraphMemFreeNodeGetParams(Node* node, uint64_t* address) noexcept nogil:
    if node == NULL or node.mark != MARK_NODE or node.type != NODE_GIVES:
        return INVALID_VALUE
    address[0] = node.work.target
    return SUCCESS


# -- executable graphs

cdef uint64_t size_of(const Graph* graph, uint64_t address) noexcept nogil:
    cdef const Node* node = graph.first
    while node != NULL and not (node.type == NODE_TAKES and node.work.target == address):
        node = node.next
    return node.work.width if node != NULL else 0


cdef public CUresult drv_graph_memory(const Graph* graph, GraphMemory** out) noexcept nogil:
    """What a graph that is made executable needs; NULL: nothing. Only one executable graph of it may be there."""
    cdef const Node* node = graph.first
    cdef uint64_t now = 0, most = 0
    cdef GraphMemory* memory = NULL
    cdef const Allocation* allocation
    cdef CUresult result = SUCCESS
    out[0] = NULL
    drv_lock()
    while node != NULL:
        if node.type == NODE_TAKES:
            allocation = at(node.work.target)
            if allocation == NULL:
                result = CONTEXT_IS_DESTROYED
                break
            if allocation.flags > 1:
                result = INVALID_VALUE
            if memory == NULL:
                memory = <GraphMemory*>calloc(1, sizeof(GraphMemory))
                memory.device = allocation.context.device
            now += rounded(node.work.width, PAGE)
            most = max(most, now)
        elif node.type == NODE_GIVES:
            now -= rounded(size_of(graph, node.work.target), PAGE)
        node = node.next
    if memory != NULL and result == SUCCESS:
        memory.size = most
        node = graph.first
        while node != NULL:
            if node.type == NODE_TAKES:
                at(node.work.target).flags += 1
            node = node.next
        memory.next = reserves[memory.device].graphs
        reserves[memory.device].graphs = memory
        out[0] = memory
    else:
        free(memory)
    drv_unlock()
    return result


cdef public CUresult drv_map_graph(GraphMemory* memory, Stream* stream, bint launch) noexcept nogil:
    """Before an upload or launch in ``stream``. A graph that was only uploaded does not run."""
    cdef Reserve* reserve = &reserves[memory.device]
    cdef uint64_t missing
    cdef CUresult result = drv_begin(stream.context)
    if result == SUCCESS and not memory.mapped:
        if reserve.context == NULL:
            reserve.context = owner(stream.context)
        missing = rounded(memory.size - min(memory.size, reserve.reserved - reserve.used), STEP)
        if missing and not mem_charge(reserve.context, missing):
            result = OUT_OF_MEMORY
        else:
            reserve.reserved += missing
            reserve.used += memory.size
            reserve.reserved_high = max(reserve.reserved_high, reserve.reserved)
            reserve.used_high = max(reserve.used_high, reserve.used)
            memory.mapped = True
    if result == SUCCESS and launch:
        memory.stream = stream
    drv_end(stream.context)
    return result


cdef public CUresult drv_do_memory(const Work* work) noexcept nogil:
    """A node of a launched graph takes its memory, or gives it back."""
    cdef Allocation* allocation
    cdef CUresult result = SUCCESS
    drv_lock()
    allocation = at(work.target)
    if allocation == NULL or allocation.accessible == (work.memory == NODE_TAKES):
        result = INVALID_VALUE      # the launch before left it, and no call has freed it since
    else:
        allocation.accessible = work.memory == NODE_TAKES
    drv_unlock()
    return result


cdef void unmap(GraphMemory* memory) noexcept nogil:
    if memory.mapped:
        reserves[memory.device].used -= memory.size
        memory.mapped = False


cdef public void drv_forget_graph_memory(GraphMemory* memory, const Work* work, uint32_t count) noexcept nogil:
    """An executable graph of these nodes is destroyed."""
    cdef GraphMemory** link = &reserves[memory.device].graphs
    cdef uint32_t i
    drv_lock()
    for i in range(count):
        if work[i].memory == NODE_TAKES:
            release(work[i].target)
    while link[0] != memory:
        link = &link[0].next
    link[0] = memory.next
    unmap(memory)
    free(memory)
    drv_unlock()


cdef public void mem_forget_graphs(Context* context) noexcept nogil:
    """The context that pays is gone, and with it the memory. Under the locks."""
    cdef Reserve* reserve
    cdef GraphMemory* memory
    cdef int i
    for i in range(drv_devices()):
        reserve = &reserves[i]
        if reserve.context != context:
            continue
        memory = reserve.graphs
        while memory != NULL:
            unmap(memory)
            memory = memory.next
        reserve.context = NULL
        reserve.reserved = 0


# -- the device's

cdef bint idle(const GraphMemory* memory) noexcept nogil:
    cdef const Stream* stream = memory.stream
    if stream == NULL or stream.mark != MARK_STREAM:
        return True
    return stream.gpu.streams[stream.slot].head == stream.gpu.streams[stream.slot].tail


cdef public CUresult cuDeviceGraphMemTrim(int device) noexcept nogil:
    cdef Reserve* reserve
    cdef GraphMemory* memory
    cdef uint64_t kept
    cdef CUresult result = drv_check_unsafe()
    if result != SUCCESS:
        return result
    if drv_device(device) == NULL:
        return INVALID_DEVICE
    reserve = &reserves[device]
    if reserve.context == NULL:
        return SUCCESS
    drv_begin(reserve.context)
    memory = reserve.graphs
    while memory != NULL:
        if memory.mapped and idle(memory):
            unmap(memory)
        memory = memory.next
    kept = rounded(reserve.used, STEP)
    if reserve.reserved > kept:
        mem_discharge(reserve.context, reserve.reserved - kept)
        reserve.reserved = kept
    drv_end(reserve.context)
    return SUCCESS


cdef public CUresult cuDeviceGetGraphMemAttribute(int device, int attribute, void* value) noexcept nogil:
    cdef uint64_t* wide = <uint64_t*>value
    cdef CUresult result = drv_check_unsafe()
    if result != SUCCESS:
        return result
    if drv_device(device) == NULL:
        return INVALID_DEVICE
    if attribute == ATTRIBUTE_USED:
        wide[0] = reserves[device].used
    elif attribute == ATTRIBUTE_USED_HIGH:
        wide[0] = reserves[device].used_high
    elif attribute == ATTRIBUTE_RESERVED:
        wide[0] = reserves[device].reserved
    elif attribute == ATTRIBUTE_RESERVED_HIGH:
        wide[0] = reserves[device].reserved_high
    else:
        return INVALID_VALUE
    return SUCCESS


cdef public CUresult cuDeviceSetGraphMemAttribute(int device, int attribute, void* value) noexcept nogil:
    """High-water marks can be reset to zero, as documented."""
    if drv_device(device) == NULL:
        return INVALID_DEVICE
    if (<uint64_t*>value)[0] != 0:
        return INVALID_VALUE
    if attribute == ATTRIBUTE_USED_HIGH:
        reserves[device].used_high = reserves[device].used
    elif attribute == ATTRIBUTE_RESERVED_HIGH:
        reserves[device].reserved_high = reserves[device].reserved
    else:
        return INVALID_VALUE
    return SUCCESS
