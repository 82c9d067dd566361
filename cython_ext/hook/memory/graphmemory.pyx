"""Memory that graphs allocate (memory nodes, stream-ordered allocations under a capture). The vGPU is charged for what
the driver has taken for its graphs, as for a pool (pools.pyx).

The driver takes memory when a graph is uploaded or launched, keeps it for the next launch, and gives it back when the
device's graph memory is trimmed. A graph's first launch, and its first one after memory went back to the card, takes
three steps. The hook reserves what the graph's nodes hold at once, uploads the graph, and asks the device what that has
taken. Beyond the limit the launch fails, and memory of graphs that do not run is trimmed. A launch after that costs one
table lookup. The hook checks before the gate, where most launches are refused, and again behind it. Reason: the graph's
memory may have been trimmed while it waited. From there to the driver no thread trims (``Gate.graphs_under_way``).
The driver lets graphs share memory at its choice. A later launch may take more, since graphs that shared run at once
now. That is charged at the next synchronisation.
"""

from libc.stdint cimport uint32_t, uint64_t
from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap

from cython_ext.hook.gate.fastpath cimport named
from cython_ext.hook.generated.driver cimport (
    real_cuDeviceGetGraphMemAttribute, real_cuDeviceGraphMemTrim, real_cuGraphChildGraphNodeGetGraph,
    real_cuGraphExecDestroy, real_cuGraphGetNodes, real_cuGraphInstantiate, real_cuGraphInstantiate_v2,
    real_cuGraphInstantiateWithFlags, real_cuGraphInstantiateWithParams, real_cuGraphInstantiateWithParams_ptsz,
    real_cuGraphMemAllocNodeGetParams, real_cuGraphMemFreeNodeGetParams, real_cuGraphNodeGetType,
    real_cuGraphUpload, real_cuGraphUpload_ptsz,
)
from cython_ext.hook.hook cimport (
    charge_contexts, vgpu_capturing, vgpu_log, vgpu_make_with_room, vgpu_pool_begin, vgpu_pool_end, vgpu_settle_pools,
    vgpu_trim_pools,
)
from cython_ext.hook.gate.relaxed cimport relax, restore
from cython_ext.hook.state cimport (
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, Gate, OUT_OF_MORE_THAN_CARD, POOL_FULL, POOL_GRANTED, POOL_REFUSED,
    attached, is_swappable, state,
)
from cython_ext.logic.memory.alloctable cimport AllocTable, Block, alloc_clear, alloc_find, alloc_insert, alloc_remove
from cython_ext.logic.memory.pools cimport pool_steps
from cython_ext.logic.sync.lock cimport lock_acquire, lock_release
from cython_ext.native cimport add32, add64, fence, load32, load64, store32

cdef enum:
    NODE_CHILD = 4           # CU_GRAPH_NODE_TYPE_*
    NODE_TAKES = 10
    NODE_GIVES = 11
    DEPTH = 8                # of children of children
    USED = 0                 # CU_GRAPH_MEM_ATTR_*
    RESERVED = 2
    UPLOADS = 2              # CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
    INSTANTIATE_ERROR = 1    # CUDA_GRAPH_INSTANTIATE_ERROR
    NO_DEVICE = -1


cdef struct TakingNode:          # CUDA_MEM_ALLOC_NODE_PARAMS
    int type
    int handle_types
    int location_type
    int location_id
    void* security
    size_t most_bytes
    unsigned short usage
    unsigned char reserved[54]
    void* accesses
    size_t access_count
    size_t size
    unsigned long long address


cdef struct Instantiation:       # CUDA_GRAPH_INSTANTIATE_PARAMS
    uint64_t flags
    void* stream
    void* wrong
    int answer


cdef struct Launch:              # or an upload
    bint own                 # stream 0 is the thread's
    void* executable
    void* stream


# --- what a graph needs

cdef struct Needs:
    int device
    uint64_t now
    uint64_t most            # at once, in the order in which the nodes were made
    AllocTable sizes         # what is not freed yet: address → bytes


cdef void count_node(void* node, Needs* needs, int depth) noexcept nogil:
    cdef TakingNode taking
    cdef Block block
    cdef unsigned long long address
    cdef void* child = NULL
    cdef int type = 0
    real_cuGraphNodeGetType(node, &type)
    if type == NODE_TAKES and real_cuGraphMemAllocNodeGetParams(node, &taking) == CUDA_SUCCESS:
        block.address = taking.address
        block.bytes = taking.size
        block.aux = block.kind = block.flags = 0
        alloc_insert(&needs.sizes, &block)
        needs.device = taking.location_id
        needs.now += taking.size
        needs.most = max(needs.most, needs.now)
    elif type == NODE_GIVES and real_cuGraphMemFreeNodeGetParams(node, &address) == CUDA_SUCCESS:
        if alloc_remove(&needs.sizes, address, &block):
            needs.now -= block.bytes
    elif type == NODE_CHILD and depth < DEPTH and real_cuGraphChildGraphNodeGetGraph(node, &child) == CUDA_SUCCESS:
        count_nodes(child, needs, depth + 1)


cdef void count_nodes(void* graph, Needs* needs, int depth) noexcept nogil:
    cdef size_t count = 0, size, i
    cdef void* memory
    if real_cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS or count == 0:
        return
    size = count * sizeof(void*)
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if memory == MAP_FAILED:
        return
    if real_cuGraphGetNodes(graph, <void**>memory, &count) == CUDA_SUCCESS:
        for i in range(count):
            count_node((<void**>memory)[i], needs, depth)
    munmap(memory, size)


cdef void note(void* executable, void* graph) noexcept nogil:
    """A graph was made executable."""
    cdef Needs needs
    cdef Block block
    cdef uint32_t i
    needs.device = NO_DEVICE
    needs.now = needs.most = needs.sizes.capacity = needs.sizes.count = 0
    needs.sizes.blocks = NULL
    count_nodes(graph, &needs, 0)
    alloc_clear(&needs.sizes)
    vgpu_graph_dies(executable)          # the driver may reuse the handle of a graph that died with its context
    for i in range(state().gate_count if needs.device != NO_DEVICE else 0):
        if state().gates[i].device == needs.device:
            block.address = <uint64_t>executable
            block.bytes = needs.most
            block.kind = 0
            block.flags = i
            block.aux = 0
            lock_acquire(&state().memory_lock)
            alloc_insert(&state().executables, &block)
            store32(&state().taking, <uint32_t>state().executables.count)
            lock_release(&state().memory_lock)


cdef public void vgpu_graph_dies(void* executable) noexcept nogil:
    cdef Block block
    if attached():
        lock_acquire(&state().memory_lock)
        alloc_remove(&state().executables, <uint64_t>executable, &block)
        store32(&state().taking, <uint32_t>state().executables.count)
        lock_release(&state().memory_lock)


# --- what the driver has taken

cdef public bint vgpu_ask_graphs(const Gate* gate, uint64_t* taken, uint64_t* used) noexcept nogil:
    """What the device has taken for graphs of this process. 0: the driver does not report it."""
    return (
        real_cuDeviceGetGraphMemAttribute(gate.device, RESERVED, taken) == CUDA_SUCCESS
        and real_cuDeviceGetGraphMemAttribute(gate.device, USED, used) == CUDA_SUCCESS
    )


cdef public void vgpu_trim_graphs(Gate* gate) noexcept nogil:
    """Trim the device's graph memory. First no new launch relies on the present memory; launches that already do go
    through. The caller holds pools_lock."""
    add64(&gate.graph_round, 1)
    fence()
    if load32(&gate.graphs_under_way) == 0:
        real_cuDeviceGraphMemTrim(gate.device)


cdef public int cuDeviceGraphMemTrim(int device) noexcept nogil:
    """The program's own."""
    cdef uint32_t i
    cdef int result
    if not attached():
        return real_cuDeviceGraphMemTrim(device)
    lock_acquire(&state().pools_lock)
    for i in range(state().gate_count):
        if state().gates[i].device == device:
            add64(&state().gates[i].graph_round, 1)
    fence()
    result = real_cuDeviceGraphMemTrim(device)
    lock_release(&state().pools_lock)
    vgpu_settle_pools()
    return result


cdef void remember(void* executable, uint64_t round) noexcept nogil:
    """It has its memory, until some goes back to the card."""
    cdef Block* known
    lock_acquire(&state().memory_lock)
    known = alloc_find(&state().executables, <uint64_t>executable)
    if known != NULL:
        known.aux = round
    lock_release(&state().memory_lock)


cdef public int vgpu_graph_takes(bint own, void* executable, void* stream) noexcept nogil:
    """Before a launch that may be of one of ``State.executables``, and before its gate. CUDA_SUCCESS: the graph has its
    memory. Else: out of memory. The launch itself reports any other fault."""
    cdef int result
    if is_swappable(&state().gates[0]) and not has_memory(executable):
        result = take_with_room(own, executable, stream)
    else:
        result = take(own, executable, stream, 1)
    return CUDA_ERROR_OUT_OF_MEMORY if result == OUT_OF_MORE_THAN_CARD else result


cdef int take_with_room(bint own, void* executable, void* stream) noexcept nogil:
    """While the vGPU's memory is on the card. For want of room there, others leave."""
    cdef Launch launch
    cdef Block* known
    cdef uint64_t bytes = 0
    launch.own, launch.executable, launch.stream = own, executable, stream
    lock_acquire(&state().memory_lock)
    known = alloc_find(&state().executables, <uint64_t>executable)
    if known != NULL:
        bytes = known.bytes
    lock_release(&state().memory_lock)
    if known == NULL:
        return CUDA_SUCCESS
    return vgpu_make_with_room(&state().gates[0], pool_steps(bytes), take_in_room, &launch)


cdef int take_in_room(Gate* gate, void* what) noexcept nogil:
    cdef const Launch* launch = <const Launch*>what
    return take(launch.own, launch.executable, launch.stream, 1)


cdef int take(bint own, void* executable, void* stream, bint outside) noexcept nogil:
    """``outside``: of any gate. A thread inside a launch does not wait for a charge, since other threads wait for it.
    CUDA_ERROR_OUT_OF_MEMORY: the card has no room; OUT_OF_MORE_THAN_CARD: it would not do."""
    cdef Block block
    cdef Block* known
    cdef uint64_t round = 0
    cdef int answer, result, mode
    lock_acquire(&state().memory_lock)
    known = alloc_find(&state().executables, <uint64_t>executable)
    if known != NULL:
        block = known[0]
        round = load64(&state().gates[block.flags].graph_round) + 1
    lock_release(&state().memory_lock)
    if known == NULL or block.aux == round or state().stopping or vgpu_capturing(named(stream, own)):
        return CUDA_SUCCESS
    if outside:
        charge_contexts(&state().gates[block.flags])
    answer = vgpu_pool_begin(block.flags + 1, block.bytes)
    if answer == POOL_FULL:
        return CUDA_ERROR_OUT_OF_MEMORY
    if answer == POOL_REFUSED:
        return OUT_OF_MORE_THAN_CARD
    round = load64(&state().gates[block.flags].graph_round) + 1      # room may have been made for it
    mode = relax()           # the driver allows a launch during any capture; perhaps not an upload
    result = real_cuGraphUpload_ptsz(executable, stream) if own else real_cuGraphUpload(executable, stream)
    restore(mode)
    if answer == POOL_GRANTED and not vgpu_pool_end(block.flags + 1, block.bytes, result == CUDA_SUCCESS):
        vgpu_log(b"graph took more than the limit, bytes", block.bytes, 0)
        vgpu_trim_pools()
        return OUT_OF_MORE_THAN_CARD
    if result == CUDA_SUCCESS:
        remember(executable, round)
    return CUDA_ERROR_OUT_OF_MEMORY if result == CUDA_ERROR_OUT_OF_MEMORY else CUDA_SUCCESS


cdef public int vgpu_graph_goes(bint own, void* executable, void* stream, Gate** gate) noexcept nogil:
    """Behind the gate, with the launch to follow: as ``vgpu_graph_takes``. No thread trims until ``vgpu_graph_went`` is
    called with ``gate``."""
    cdef Block* known
    cdef int result
    gate[0] = NULL
    lock_acquire(&state().memory_lock)
    known = alloc_find(&state().executables, <uint64_t>executable)
    if known != NULL:
        gate[0] = &state().gates[known.flags]
    lock_release(&state().memory_lock)
    if gate[0] == NULL:
        return CUDA_SUCCESS
    result = take(own, executable, stream, 0)    # if much has to be done, not while trims are held up
    while result == CUDA_SUCCESS:
        add32(&gate[0].graphs_under_way, 1)
        fence()
        if has_memory(executable):
            return CUDA_SUCCESS
        vgpu_graph_went(gate[0])
        result = take(own, executable, stream, 0)
        if not has_memory(executable):
            break            # its upload fails, and so may the launch, which then reports that
    gate[0] = NULL
    return result


cdef public void vgpu_graph_went(Gate* gate) noexcept nogil:
    if gate != NULL:
        add32(&gate.graphs_under_way, <uint32_t>-1)


cdef bint has_memory(void* executable) noexcept nogil:
    cdef Block* known
    cdef bint has
    lock_acquire(&state().memory_lock)
    known = alloc_find(&state().executables, <uint64_t>executable)
    has = known == NULL or known.aux == load64(&state().gates[known.flags].graph_round) + 1
    lock_release(&state().memory_lock)
    return has


# --- the calls

cdef inline int made(int result, void** executable, void* graph) noexcept nogil:
    if result == CUDA_SUCCESS and attached():
        note(executable[0], graph)
    return result


cdef public int cuGraphInstantiate(
    void** executable, void* graph, void** wrong, char* log, size_t size
) noexcept nogil:
    return made(real_cuGraphInstantiate(executable, graph, wrong, log, size), executable, graph)


cdef public int cuGraphInstantiate_v2(
    void** executable, void* graph, void** wrong, char* log, size_t size
) noexcept nogil:
    return made(real_cuGraphInstantiate_v2(executable, graph, wrong, log, size), executable, graph)


cdef public int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) noexcept nogil:
    return made(real_cuGraphInstantiateWithFlags(executable, graph, flags), executable, graph)


cdef int instantiate(bint own, void** executable, void* graph, Instantiation* params) noexcept nogil:
    """Instantiate, then do the upload that the flags may ask for. Else the upload would take memory of unknown size."""
    cdef Instantiation split
    cdef bint uploads = attached() and params != NULL and params.flags & UPLOADS
    cdef int result
    if not uploads:
        if own:
            return made(real_cuGraphInstantiateWithParams_ptsz(executable, graph, params), executable, graph)
        return made(real_cuGraphInstantiateWithParams(executable, graph, params), executable, graph)
    split = params[0]
    split.flags &= ~<uint64_t>UPLOADS
    if own:
        result = made(real_cuGraphInstantiateWithParams_ptsz(executable, graph, &split), executable, graph)
    else:
        result = made(real_cuGraphInstantiateWithParams(executable, graph, &split), executable, graph)
    params.wrong = split.wrong
    params.answer = split.answer
    if result == CUDA_SUCCESS:
        result = upload(own, executable[0], params.stream)
        if result != CUDA_SUCCESS:
            vgpu_graph_dies(executable[0])
            real_cuGraphExecDestroy(executable[0])
            executable[0] = NULL
            params.answer = INSTANTIATE_ERROR
    return result


cdef public int cuGraphInstantiateWithParams(void** executable, void* graph, void* params) noexcept nogil:
    return instantiate(0, executable, graph, <Instantiation*>params)


cdef public int cuGraphInstantiateWithParams_ptsz(void** executable, void* graph, void* params) noexcept nogil:
    return instantiate(1, executable, graph, <Instantiation*>params)


cdef int upload(bint own, void* executable, void* stream) noexcept nogil:
    """A second upload, after the hook's own, costs next to nothing."""
    cdef int result = CUDA_SUCCESS
    if attached() and state().taking:
        result = vgpu_graph_takes(own, executable, stream)
    if result != CUDA_SUCCESS:
        return result
    return real_cuGraphUpload_ptsz(executable, stream) if own else real_cuGraphUpload(executable, stream)


cdef public int cuGraphUpload(void* executable, void* stream) noexcept nogil:
    return upload(0, executable, stream)


cdef public int cuGraphUpload_ptsz(void* executable, void* stream) noexcept nogil:
    return upload(1, executable, stream)
