"""Graphs: nodes with dependencies. What becomes of them when they are launched: executables.pyx."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, DATA_FILL, EFFECT_EVENT, EFFECT_HOST, Event, Frontier, Function, Graph, INVALID_HANDLE,
    INVALID_VALUE, MARK_EVENT, MARK_GRAPH, MARK_NODE, NOT_SUPPORTED, Node, OUT_OF_MEMORY, SUCCESS, Work,
    drv_current_context, drv_copy_3d, drv_lock, drv_price_copy, drv_price_kernel, drv_ready, drv_unlock,
    mem_forget_node,
)
from cython_ext.sim.state cimport OP_EXTERNAL, OP_MARK

cdef enum:
    NODE_KERNEL = 0
    NODE_COPY = 1
    NODE_FILL = 2
    NODE_HOST = 3
    NODE_EMPTY = 5
    NODE_RECORD_EVENT = 7

# -- building

cdef public Graph* drv_new_graph() noexcept nogil:
    cdef Graph* graph = <Graph*>calloc(1, sizeof(Graph))
    if graph != NULL:
        graph.mark = MARK_GRAPH
    return graph


cdef public void drv_free_graph(Graph* graph) noexcept nogil:
    """Under the process's lock."""
    cdef Node* node = graph.first
    cdef Node* following
    while node != NULL:
        following = node.next
        mem_forget_node(node)
        node.mark = 0
        free(node)
        node = following
    graph.mark = 0
    free(graph)


cdef public Node* drv_add_node(Graph* graph, Frontier* needs, Work* work, int type) noexcept nogil:
    """A node behind those of `needs`, which are of the same graph: so creation order respects dependencies."""
    cdef Node* node = <Node*>calloc(1, sizeof(Node))
    cdef uint32_t i
    if node == NULL:
        return NULL
    node.mark = MARK_NODE
    node.type = type
    node.graph = graph
    node.work = work[0]
    node.needs = needs[0]
    node.order = graph.count
    for i in range(needs.count):
        needs.node[i].needed_by += 1
    if graph.last != NULL:
        graph.last.next = node
    else:
        graph.first = node
    graph.last = node
    graph.count += 1
    return node


cdef CUresult is_graph(Graph* graph) noexcept nogil:
    return SUCCESS if graph != NULL and graph.mark == MARK_GRAPH else INVALID_VALUE


cdef public CUresult drv_add_to_graph(Node** out, Graph* graph, Node** dependencies, size_t count, Work* work,
                                      int type) noexcept nogil:
    return add(out, graph, dependencies, count, work, type)


cdef CUresult add(Node** out, Graph* graph, Node** dependencies, size_t count, Work* work, int type) noexcept nogil:
    cdef Frontier needs
    cdef size_t i
    if is_graph(graph) != SUCCESS or count > 32:
        return INVALID_VALUE
    needs.count = <uint32_t>count
    for i in range(count):
        if dependencies[i] == NULL or dependencies[i].mark != MARK_NODE or dependencies[i].graph != graph:
            return INVALID_VALUE
        needs.node[i] = dependencies[i]
    out[0] = drv_add_node(graph, &needs, work, type)
    return SUCCESS if out[0] != NULL else OUT_OF_MEMORY


cdef public CUresult cuGraphCreate(Graph** out, unsigned int flags) noexcept nogil:
    cdef CUresult result = drv_ready()
    if result == SUCCESS:
        out[0] = drv_new_graph()
        result = SUCCESS if out[0] != NULL else OUT_OF_MEMORY
    return result


cdef public CUresult cuGraphDestroy(Graph* graph) noexcept nogil:
    cdef CUresult result = is_graph(graph)
    if result == SUCCESS:
        drv_lock()
        drv_free_graph(graph)
        drv_unlock()
    return result


cdef public struct KernelNodeParams:
    Function* function
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared_bytes
    void** parameters
    void** extra
    Function* kernel
    Context* context


cdef public CUresult drv_kernel_node(const void* params, Work* work) noexcept nogil:
    """CUDA_KERNEL_NODE_PARAMS as a piece of work."""
    cdef const KernelNodeParams* p = <const KernelNodeParams*>params
    cdef Context* context
    cdef Function* function = p.function if p.function != NULL else p.kernel
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS:
        result = drv_price_kernel(function, p.grid, p.block, p.shared_bytes, p.parameters, p.extra, context.legacy,
                                  work)
    return result


cdef public CUresult cuGraphAddKernelNode_v2(Node** out, Graph* graph, Node** dependencies, size_t count,
                                             const KernelNodeParams* p) noexcept nogil:
    cdef Work work
    cdef CUresult result = drv_kernel_node(p, &work)
    return add(out, graph, dependencies, count, &work, NODE_KERNEL) if result == SUCCESS else result


cdef public CUresult cuGraphAddEmptyNode(Node** out, Graph* graph, Node** dependencies, size_t count) noexcept nogil:
    cdef Work work
    memset(&work, 0, sizeof(Work))
    work.kind = OP_MARK
    return add(out, graph, dependencies, count, &work, NODE_EMPTY)


cdef public struct HostNodeParams:
    void* function
    void* user


cdef public CUresult cuGraphAddHostNode(Node** out, Graph* graph, Node** dependencies, size_t count,
                                        const HostNodeParams* p) noexcept nogil:
    cdef Work work
    memset(&work, 0, sizeof(Work))
    work.kind = OP_EXTERNAL
    work.effect.kind = EFFECT_HOST
    work.effect.function = p.function
    work.effect.address = <uint64_t>p.user
    return add(out, graph, dependencies, count, &work, NODE_HOST)


cdef public CUresult cuGraphAddEventRecordNode(Node** out, Graph* graph, Node** dependencies, size_t count,
                                               Event* event) noexcept nogil:
    cdef Work work
    if event == NULL or event.mark != MARK_EVENT:
        return INVALID_HANDLE
    memset(&work, 0, sizeof(Work))
    work.kind = OP_MARK
    work.effect.kind = EFFECT_EVENT
    work.effect.event = event
    return add(out, graph, dependencies, count, &work, NODE_RECORD_EVENT)


cdef public struct FillNodeParams:
    uint64_t target
    size_t pitch
    unsigned int value
    unsigned int element_bytes
    size_t width
    size_t height


cdef public CUresult drv_fill_node(const void* params, Work* work) noexcept nogil:
    """CUDA_MEMSET_NODE_PARAMS as a piece of work."""
    cdef const FillNodeParams* p = <const FillNodeParams*>params
    cdef Context* current
    cdef CUresult result = drv_current_context(&current)
    if result != SUCCESS:
        return result
    if p.element_bytes not in (1, 2, 4):
        return INVALID_VALUE
    memset(work, 0, sizeof(Work))
    work.data = DATA_FILL
    work.target = p.target
    work.target_pitch = p.pitch
    work.width = p.width * p.element_bytes
    work.height = p.height
    work.fill = p.value
    work.fill_bytes = p.element_bytes
    return drv_price_copy(current.legacy, work)


cdef public CUresult cuGraphAddMemsetNode(Node** out, Graph* graph, Node** dependencies, size_t count,
                                          const FillNodeParams* p, Context* context) noexcept nogil:
    cdef Work work
    cdef CUresult result = drv_fill_node(p, &work)
    return add(out, graph, dependencies, count, &work, NODE_FILL) if result == SUCCESS else result


cdef public CUresult drv_copy_node(const void* params, Work* work) noexcept nogil:
    """CUDA_MEMCPY3D as a piece of work: a copy with slices that follow each other without a gap."""
    cdef Context* current
    cdef CUresult result = drv_current_context(&current)
    if result == SUCCESS:
        result = drv_copy_3d(params, work)
    return drv_price_copy(current.legacy, work) if result == SUCCESS else result


cdef public CUresult cuGraphAddMemcpyNode(Node** out, Graph* graph, Node** dependencies, size_t count,
                                          const void* params, Context* context) noexcept nogil:
    cdef Work work
    cdef CUresult result = drv_copy_node(params, &work)
    return add(out, graph, dependencies, count, &work, NODE_COPY) if result == SUCCESS else result


cdef bint has_memory(const Graph* graph) noexcept nogil:
    """Such a graph can neither be cloned nor be a child."""
    cdef const Node* node = graph.first
    while node != NULL and not node.work.memory:
        node = node.next
    return node != NULL


cdef public CUresult cuGraphAddChildGraphNode(Node** out, Graph* graph, Node** dependencies, size_t count,
                                              Graph* child) noexcept nogil:
    """The child's nodes are put in its place."""
    cdef Node* node
    cdef Frontier needs
    cdef CUresult result = cuGraphAddEmptyNode(out, graph, dependencies, count)
    if result == SUCCESS:
        result = is_graph(child)
    if result == SUCCESS and has_memory(child):
        result = NOT_SUPPORTED
    if result != SUCCESS:
        return result
    needs.node[0] = out[0]
    needs.count = 1
    node = child.first
    while node != NULL:
        needs.node[0] = drv_add_node(graph, &needs, &node.work, node.type)
        if needs.node[0] == NULL:
            return OUT_OF_MEMORY
        needs.node[0].spans = node.spans
        node = node.next
    out[0] = needs.node[0]
    out[0].spans = child.count + 1
    return SUCCESS


cdef public CUresult cuGraphAddDependencies_v2(Graph* graph, Node** before, Node** after, void* edges,
                                               size_t count) noexcept nogil:
    """Only from older to newer nodes: creation order is the order of execution."""
    cdef size_t i
    for i in range(count):
        if before[i].order >= after[i].order or after[i].needs.count == 32:
            return INVALID_VALUE
        after[i].needs.node[after[i].needs.count] = before[i]
        after[i].needs.count += 1
        before[i].needed_by += 1
    return SUCCESS


cdef public CUresult cuGraphAddDependencies(Graph* graph, Node** before, Node** after, size_t count) noexcept nogil:
    return cuGraphAddDependencies_v2(graph, before, after, NULL, count)


cdef public CUresult cuGraphClone(Graph** out, Graph* graph) noexcept nogil:
    cdef Node* node
    cdef Node** copies
    cdef Frontier needs
    cdef uint32_t i
    if is_graph(graph) != SUCCESS:
        return INVALID_VALUE
    if has_memory(graph):
        return NOT_SUPPORTED
    out[0] = drv_new_graph()
    copies = <Node**>calloc(graph.count + 1, sizeof(Node*))
    node = graph.first
    while node != NULL:
        needs.count = node.needs.count
        for i in range(needs.count):
            needs.node[i] = copies[node.needs.node[i].order]
        copies[node.order] = drv_add_node(out[0], &needs, &node.work, node.type)
        copies[node.order].spans = node.spans
        node = node.next
    free(copies)
    return SUCCESS


# -- looking

cdef public CUresult cuGraphGetNodes(Graph* graph, Node** nodes, size_t* count) noexcept nogil:
    cdef Node* node
    cdef size_t i = 0, room
    if is_graph(graph) != SUCCESS:
        return INVALID_VALUE
    room = count[0]
    count[0] = graph.count
    if nodes == NULL:
        return SUCCESS
    node = graph.first
    for i in range(room):
        nodes[i] = node
        node = node.next if node != NULL else NULL
    count[0] = min(room, <size_t>graph.count)
    return SUCCESS


cdef public CUresult cuGraphGetRootNodes(Graph* graph, Node** nodes, size_t* count) noexcept nogil:
    cdef Node* node
    cdef size_t found = 0
    if is_graph(graph) != SUCCESS:
        return INVALID_VALUE
    node = graph.first
    while node != NULL:
        if node.needs.count == 0:
            if nodes != NULL and found < count[0]:
                nodes[found] = node
            found += 1
        node = node.next
    count[0] = found if nodes == NULL else min(found, count[0])
    return SUCCESS


cdef public CUresult cuGraphGetEdges_v2(Graph* graph, Node** before, Node** after, void* edges,
                                        size_t* count) noexcept nogil:
    cdef Node* node
    cdef size_t found = 0
    cdef uint32_t i
    if is_graph(graph) != SUCCESS:
        return INVALID_VALUE
    node = graph.first
    while node != NULL:
        for i in range(node.needs.count):
            if before != NULL and found < count[0]:
                before[found] = node.needs.node[i]
                after[found] = node
            found += 1
        node = node.next
    count[0] = found if before == NULL else min(found, count[0])
    return SUCCESS


cdef public CUresult cuGraphGetEdges(Graph* graph, Node** before, Node** after, size_t* count) noexcept nogil:
    return cuGraphGetEdges_v2(graph, before, after, NULL, count)


cdef public CUresult cuGraphNodeGetType(Node* node, int* type) noexcept nogil:
    if node == NULL or node.mark != MARK_NODE:
        return INVALID_VALUE
    type[0] = node.type
    return SUCCESS


cdef public CUresult cuGraphKernelNodeGetParams_v2(Node* node, KernelNodeParams* p) noexcept nogil:
    """Everything but the parameters' values, which are not kept."""
    if node == NULL or node.mark != MARK_NODE or node.type != NODE_KERNEL:
        return INVALID_VALUE
    memset(p, 0, sizeof(KernelNodeParams))
    p.function = node.work.function
    memcpy(p.grid, node.work.grid, 12)
    memcpy(p.block, node.work.block, 12)
    p.shared_bytes = node.work.shared_bytes
    return SUCCESS
