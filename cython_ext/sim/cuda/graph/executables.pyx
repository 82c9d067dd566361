"""Executable graphs: one sequence of a graph's nodes that respects their dependencies, launched as a whole; changes.

The hardware runs independent branches at the same time; here they follow each other in the launching stream. Their
sum of work and their order are right, their overlap is not modelled.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from cython_ext.sim.cuda.driver cimport (
    CUresult, Graph, GraphMemory, INVALID_VALUE, MARK_EXEC, MARK_GRAPH, MARK_NODE, NOT_SUPPORTED, Node, SUCCESS, Stream,
    Work, drv_capture_work, drv_copy_node, drv_do_memory, drv_enqueue, drv_fill_node, drv_forget_graph_memory,
    drv_graph_memory, drv_kernel_node, drv_map_graph, drv_move_data, drv_stream,
)

cdef enum:
    NODE_KERNEL = 0
    NODE_COPY = 1
    NODE_FILL = 2
    NODE_GRAPH = 4
    FLAG_UPLOAD = 2
    KERNEL_PARAMS_V1_BYTES = 56     # what CUDA 12 appended: another handle of the kernel, a context

cdef public struct Exec:
    uint32_t mark
    uint32_t count
    unsigned long long flags
    Work* work
    int* type
    bint* skipped           # nodes that are switched off
    GraphMemory* memory     # NULL: it allocates nothing


cdef CUresult is_graph(Graph* graph) noexcept nogil:
    return SUCCESS if graph != NULL and graph.mark == MARK_GRAPH else INVALID_VALUE


cdef public CUresult cuGraphInstantiateWithFlags(Exec** out, Graph* graph, unsigned long long flags) noexcept nogil:
    cdef Exec* executable
    cdef Node* node
    cdef GraphMemory* memory
    cdef CUresult result = is_graph(graph)
    if result == SUCCESS:
        result = drv_graph_memory(graph, &memory)
    if result != SUCCESS:
        return result
    executable = <Exec*>calloc(1, sizeof(Exec))
    executable.mark = MARK_EXEC
    executable.flags = flags
    executable.memory = memory
    executable.work = <Work*>calloc(graph.count + 1, sizeof(Work))
    executable.type = <int*>calloc(graph.count + 1, sizeof(int))
    executable.skipped = <bint*>calloc(graph.count + 1, sizeof(bint))
    node = graph.first
    while node != NULL:
        executable.work[executable.count] = node.work
        executable.type[executable.count] = node.type
        executable.count += 1
        node = node.next
    out[0] = executable
    return SUCCESS


cdef public CUresult cuGraphInstantiate_v2(Exec** out, Graph* graph, Node** wrong, char* log,
                                           size_t size) noexcept nogil:
    return cuGraphInstantiateWithFlags(out, graph, 0)


cdef public CUresult cuGraphInstantiate(Exec** out, Graph* graph, Node** wrong, char* log, size_t size) noexcept nogil:
    return cuGraphInstantiateWithFlags(out, graph, 0)


cdef public struct InstantiateParams:
    uint64_t flags
    void* upload_stream
    Node* wrong
    int result


cdef public CUresult cuGraphInstantiateWithParams(Exec** out, Graph* graph, InstantiateParams* p) noexcept nogil:
    cdef CUresult result
    p.wrong = NULL
    p.result = 0
    result = cuGraphInstantiateWithFlags(out, graph, p.flags)
    if result == SUCCESS and p.flags & FLAG_UPLOAD:
        result = cuGraphUpload(out[0], p.upload_stream)
    return result


cdef CUresult is_exec(Exec* executable) noexcept nogil:
    return SUCCESS if executable != NULL and executable.mark == MARK_EXEC else INVALID_VALUE


cdef public CUresult cuGraphExecGetFlags(Exec* executable, uint64_t* flags) noexcept nogil:
    if is_exec(executable) != SUCCESS:
        return INVALID_VALUE
    flags[0] = executable.flags
    return SUCCESS


cdef public CUresult cuGraphUpload(Exec* executable, void* handle) noexcept nogil:
    cdef Stream* stream
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = is_exec(executable)
    if result == SUCCESS and executable.memory != NULL:
        result = drv_map_graph(executable.memory, stream, False)
    return result


cdef public CUresult cuGraphLaunch(Exec* executable, void* handle) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef uint32_t i
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = is_exec(executable)
    if result == SUCCESS and executable.memory != NULL:
        result = NOT_SUPPORTED if stream.capture != NULL else drv_map_graph(executable.memory, stream, True)
    for i in range(executable.count if result == SUCCESS else 0):
        if executable.skipped[i]:
            continue
        work = executable.work[i]
        if stream.capture != NULL:
            result = drv_capture_work(stream, &work)
        else:
            if work.data:
                drv_move_data(&work)
            if work.memory:
                result = drv_do_memory(&work)
                if result != SUCCESS:
                    break
            result = drv_enqueue(stream, &work)
        if result != SUCCESS:
            break
    return result


cdef public CUresult cuGraphExecDestroy(Exec* executable) noexcept nogil:
    if is_exec(executable) != SUCCESS:
        return INVALID_VALUE
    executable.mark = 0
    if executable.memory != NULL:
        drv_forget_graph_memory(executable.memory, executable.work, executable.count)
    free(executable.work)
    free(executable.type)
    free(executable.skipped)
    free(executable)
    return SUCCESS


cdef public struct UpdateInfo:
    int result
    Node* wrong
    Node* wrong_from


cdef public CUresult cuGraphExecUpdate_v2(Exec* executable, Graph* graph, UpdateInfo* info) noexcept nogil:
    """Take over a graph's nodes if it has as many, of the same types; else CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE."""
    cdef Node* node
    cdef uint32_t i = 0
    if is_exec(executable) != SUCCESS or is_graph(graph) != SUCCESS:
        return INVALID_VALUE
    memset(info, 0, sizeof(UpdateInfo))
    node = graph.first
    while node != NULL and graph.count == executable.count and node.type == executable.type[i]:
        node = node.next
        i += 1
    if node != NULL or graph.count != executable.count:
        info.result = 2  # CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED
        info.wrong = node
        return 910
    if executable.memory != NULL:
        info.result = 8  # CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED: the addresses are other ones
        return 910
    node = graph.first
    while node != NULL:
        executable.work[node.order] = node.work
        node = node.next
    return SUCCESS


cdef public CUresult cuGraphExecUpdate(Exec* executable, Graph* graph, Node** wrong, int* answer) noexcept nogil:
    cdef UpdateInfo info
    cdef CUresult result
    memset(&info, 0, sizeof(UpdateInfo))
    result = cuGraphExecUpdate_v2(executable, graph, &info)
    wrong[0] = info.wrong
    answer[0] = info.result
    return result


cdef CUresult is_node_of(Exec* executable, Node* node, int type) noexcept nogil:
    """Whether the node of the graph that was made executable is there, and of that type (-1: of any)."""
    if is_exec(executable) != SUCCESS or node == NULL or node.mark != MARK_NODE or node.order >= executable.count:
        return INVALID_VALUE
    return SUCCESS if type < 0 or executable.type[node.order] == type else INVALID_VALUE


ctypedef CUresult (*Maker)(const void* params, Work* work) noexcept nogil


cdef CUresult change(Exec* executable, Node* node, int type, Maker make, const void* params) noexcept nogil:
    """Give a node of that type the work that `make` reads from `params`."""
    cdef Work work
    cdef CUresult result = is_node_of(executable, node, type)
    if result == SUCCESS and params == NULL:
        result = INVALID_VALUE
    if result == SUCCESS:
        result = make(params, &work)
    if result == SUCCESS:
        executable.work[node.order] = work
    return result


cdef public CUresult cuGraphExecKernelNodeSetParams_v2(Exec* executable, Node* node,
                                                       const void* params) noexcept nogil:
    return change(executable, node, NODE_KERNEL, drv_kernel_node, params)


cdef public CUresult cuGraphExecKernelNodeSetParams(Exec* executable, Node* node, const void* params) noexcept nogil:
    cdef char[72] full              # KernelNodeParams
    if params == NULL:
        return INVALID_VALUE
    memset(full, 0, sizeof(full))
    memcpy(full, params, KERNEL_PARAMS_V1_BYTES)
    return change(executable, node, NODE_KERNEL, drv_kernel_node, full)


cdef public CUresult cuGraphExecMemsetNodeSetParams(Exec* executable, Node* node, const void* params,
                                                    void* context) noexcept nogil:
    return change(executable, node, NODE_FILL, drv_fill_node, params)


cdef public CUresult cuGraphExecMemcpyNodeSetParams(Exec* executable, Node* node, const void* params,
                                                    void* context) noexcept nogil:
    """Copies of one dimension, before and after."""
    cdef Work work
    cdef CUresult result = is_node_of(executable, node, NODE_COPY)
    if result == SUCCESS:
        result = drv_copy_node(params, &work)
    if result == SUCCESS and (work.height != 1 or executable.work[node.order].height != 1):
        result = INVALID_VALUE
    if result == SUCCESS:
        executable.work[node.order] = work
    return result


cdef public CUresult cuGraphExecChildGraphNodeSetParams(Exec* executable, Node* node, Graph* child) noexcept nogil:
    """Take over the nodes of another child, if it has as many, of the same types."""
    cdef CUresult result = is_node_of(executable, node, -1)
    cdef Node* new
    cdef uint32_t first
    if result != SUCCESS or is_graph(child) != SUCCESS or node.spans != child.count + 1:
        return INVALID_VALUE
    first = node.order + 1 - child.count
    new = child.first
    while new != NULL:
        if new.type != executable.type[first + new.order]:
            return INVALID_VALUE
        new = new.next
    new = child.first
    while new != NULL:
        executable.work[first + new.order] = new.work
        new = new.next
    return SUCCESS


cdef public struct NodeParams:
    int type
    int reserved[3]
    long long values[29]
    long long reserved_too


cdef public CUresult cuGraphExecNodeSetParams(Exec* executable, Node* node, NodeParams* params) noexcept nogil:
    """The others in one: parameters of whatever type the node has."""
    if params == NULL:
        return INVALID_VALUE
    if params.type == NODE_KERNEL:
        return cuGraphExecKernelNodeSetParams_v2(executable, node, params.values)
    if params.type == NODE_COPY:        # behind flags and a context
        return cuGraphExecMemcpyNodeSetParams(executable, node, &params.values[2], NULL)
    if params.type == NODE_FILL:
        return cuGraphExecMemsetNodeSetParams(executable, node, params.values, NULL)
    if params.type == NODE_GRAPH:
        return cuGraphExecChildGraphNodeSetParams(executable, node, <Graph*>params.values[0])
    return INVALID_VALUE


cdef public CUresult cuGraphNodeSetEnabled(Exec* executable, Node* node, unsigned int enabled) noexcept nogil:
    cdef CUresult result = is_node_of(executable, node, -1)
    if result == SUCCESS:
        executable.skipped[node.order] = not enabled
    return result
