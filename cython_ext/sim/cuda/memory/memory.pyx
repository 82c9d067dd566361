"""Memory of the device: capacity is charged on the GPU, contents live in this process at the same address.

A device pointer can be followed by the program: what is allocated is memory of the process, reserved and filled
only where touched. That lets copies really copy.
"""

from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memmove, memset

from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, EFFECT_EVENT, Effect, Event, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY, SUCCESS, Stream, TOUCHES,
    drv_begin, drv_check_unsafe, drv_current_context, drv_device, drv_drop_stream, drv_end, drv_lock, drv_next_id,
    drv_streams, drv_synchronize_context, drv_unlock,
)
from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_GRAPH, BACKING_HOST, BACKING_MANAGED, BACKING_POOL, BACKING_PRIVATE,
    mem_forget_graphs, mem_forget_physical, mem_forget_pools, mem_free_of_graph, mem_free_pooled_at_once,
)
from cython_ext.sim.queues cimport sim_memory_used, sim_take_memory
from cython_ext.sim.share cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap, sim_reap,
)
from cython_ext.sim.state cimport SIM_QUEUE, SimContext

cdef enum:
    PAGE = 4096
    SMALL = 1 << 20         # up to this an allocation is carved from a shared block
    BLOCK = 2 << 20         # the driver takes memory from the GPU in blocks of this size
    PITCH = 512
    UNITS = 4096            # of 512 bytes, in a block


cdef struct Shared:
    uint64_t address
    uint32_t used           # units
    unsigned char unit[4096]
    Shared* next


cdef Allocation* table
cdef uint32_t entries
cdef uint32_t capacity


# -- the table (under the process's lock)

cdef uint32_t position(uint64_t address) noexcept nogil:
    """Index of the first allocation that begins after `address`."""
    cdef uint32_t low = 0, high = entries, middle
    while low < high:
        middle = (low + high) / 2
        if table[middle].address <= address:
            low = middle + 1
        else:
            high = middle
    return low


cdef public Allocation* mem_find(uint64_t address) noexcept nogil:
    """The allocation that contains `address`, or NULL."""
    cdef uint32_t at = position(address)
    if at == 0 or address - table[at - 1].address >= max(table[at - 1].size, <uint64_t>1):
        return NULL
    return &table[at - 1]


cdef public Allocation* mem_at(uint32_t index) noexcept nogil:
    return &table[index] if index < entries else NULL


cdef public bint mem_add(Allocation* allocation) noexcept nogil:
    global table, capacity, entries
    cdef uint32_t at
    cdef Allocation* larger
    if entries == capacity:
        larger = <Allocation*>realloc(table, (2 * capacity + 64) * sizeof(Allocation))
        if larger == NULL:
            return False
        table = larger
        capacity = 2 * capacity + 64
    at = position(allocation.address)
    memmove(&table[at + 1], &table[at], (entries - at) * sizeof(Allocation))
    allocation.id = drv_next_id()
    table[at] = allocation[0]
    entries += 1
    return True


cdef public void mem_remove(Allocation* allocation) noexcept nogil:
    global entries
    cdef uint32_t at = <uint32_t>(allocation - table)
    entries -= 1
    memmove(&table[at], &table[at + 1], (entries - at) * sizeof(Allocation))


# -- charging

cdef uint64_t rounded(uint64_t size, uint64_t unit) noexcept nogil:
    return (size + unit - 1) / unit * unit


cdef public bint mem_charge(Context* context, uint64_t size) noexcept nogil:
    """Take memory from the GPU; the dead are asked to give theirs back before it is refused."""
    if sim_take_memory(context.gpu, context.slot, size):
        return True
    sim_reap(context.gpu)
    return sim_take_memory(context.gpu, context.slot, size)


cdef public void mem_discharge(Context* context, uint64_t size) noexcept nogil:
    context.gpu.contexts[context.slot].memory_bytes -= size


cdef uint64_t map_blocks(Context* context, uint64_t size) noexcept nogil:
    """Whole blocks of the GPU's memory, where the address of one begins; 0: there are none."""
    cdef uint64_t begin, whole = rounded(size, BLOCK)
    cdef void* memory
    if whole < size or not mem_charge(context, whole):
        return 0
    memory = mmap(NULL, whole + BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        mem_discharge(context, whole)
        return 0
    begin = rounded(<uint64_t>memory, BLOCK)
    if begin > <uint64_t>memory:
        munmap(memory, begin - <uint64_t>memory)
    munmap(<void*>(begin + whole), <uint64_t>memory + BLOCK - begin)
    return begin


cdef void unmap_blocks(Context* context, uint64_t address, uint64_t size) noexcept nogil:
    munmap(<void*>address, rounded(size, BLOCK))
    mem_discharge(context, rounded(size, BLOCK))


cdef int32_t free_units(const Shared* shared, uint32_t wanted) noexcept nogil:
    """The first of so many free ones in a row; -1: there are none."""
    cdef uint32_t i, found = 0
    if UNITS - shared.used < wanted:
        return -1
    for i in range(UNITS):
        found = 0 if shared.unit[i] else found + 1
        if found == wanted:
            return <int32_t>(i + 1 - wanted)
    return -1


cdef uint64_t carve(Context* context, uint64_t size) noexcept nogil:
    """Part of a shared block; 0: there is no memory for another one."""
    cdef Shared* shared = <Shared*>context.shared
    cdef uint32_t wanted = <uint32_t>(rounded(size, PITCH) / PITCH)
    cdef int32_t at = -1
    while shared != NULL:
        at = free_units(shared, wanted)
        if at >= 0:
            break
        shared = shared.next
    if shared == NULL:
        shared = <Shared*>calloc(1, sizeof(Shared))
        if shared == NULL:
            return 0
        shared.address = map_blocks(context, BLOCK)
        if shared.address == 0:
            free(shared)
            return 0
        shared.next = <Shared*>context.shared
        context.shared = shared
        at = 0
    memset(&shared.unit[at], 1, wanted)
    shared.used += wanted
    return shared.address + <uint64_t>at * PITCH


cdef void uncarve(Context* context, uint64_t address, uint64_t size) noexcept nogil:
    cdef Shared** link = <Shared**>&context.shared
    cdef uint32_t units = <uint32_t>(rounded(size, PITCH) / PITCH)
    cdef Shared* shared
    while link[0].address != address / BLOCK * BLOCK:
        link = &link[0].next
    shared = link[0]
    memset(&shared.unit[(address - shared.address) / PITCH], 0, units)
    shared.used -= units
    if shared.used == 0:
        link[0] = shared.next
        unmap_blocks(context, shared.address, BLOCK)
        free(shared)


cdef uint64_t map_managed(Context* context, uint64_t size) noexcept nogil:
    """Managed memory takes nothing from the GPU until a kernel touches it; 0: not even the host has so much."""
    cdef void* memory = mmap(NULL, rounded(size, PAGE), PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        return 0
    context.gpu.contexts[context.slot].managed_bytes += rounded(size, PAGE)
    return <uint64_t>memory


cdef void unmap_managed(Context* context, uint64_t address, uint64_t size) noexcept nogil:
    cdef SimContext* owner = &context.gpu.contexts[context.slot]
    cdef uint64_t gone
    munmap(<void*>address, rounded(size, PAGE))
    owner.managed_bytes -= rounded(size, PAGE)
    gone = owner.resident_bytes - min(owner.resident_bytes, owner.managed_bytes)
    owner.resident_bytes -= gone
    owner.memory_bytes -= gone


cdef CUresult allocate(uint64_t* address, uint64_t size, uint32_t backing) noexcept nogil:
    cdef Context* context
    cdef Allocation allocation
    cdef uint64_t given = 0
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if address == NULL or size == 0:
        return INVALID_VALUE
    result = drv_check_unsafe()
    if result != SUCCESS:
        return result
    if context.is_green:
        context = drv_device(context.device).primary
    result = drv_begin(context)
    if result == SUCCESS:
        if backing == BACKING_MANAGED:
            given = map_managed(context, size)
        else:
            given = carve(context, size) if size <= SMALL else map_blocks(context, size)
        if given == 0:
            result = OUT_OF_MEMORY
    if result == SUCCESS:
        memset(&allocation, 0, sizeof(Allocation))
        allocation.address = given
        allocation.size = size
        allocation.mapped = size
        allocation.context = context
        allocation.backing = backing
        allocation.accessible = True
        mem_add(&allocation)
        address[0] = allocation.address
    drv_end(context)
    return result


cdef public void mem_release(Allocation* allocation) noexcept nogil:
    """Give back what `allocate` took. Under the locks of its context."""
    if allocation.backing == BACKING_MANAGED:
        unmap_managed(allocation.context, allocation.address, allocation.size)
    elif allocation.size <= SMALL:
        uncarve(allocation.context, allocation.address, allocation.size)
    else:
        unmap_blocks(allocation.context, allocation.address, allocation.size)
    mem_remove(allocation)


# -- device memory

cdef public CUresult cuMemAlloc_v2(uint64_t* address, size_t size) noexcept nogil:
    return allocate(address, size, BACKING_PRIVATE)


cdef public CUresult cuMemAllocPitch_v2(uint64_t* address, size_t* pitch, size_t width, size_t height,
                                        unsigned int element_bytes) noexcept nogil:
    if element_bytes not in (4, 8, 16) or width == 0 or height == 0:
        return INVALID_VALUE
    pitch[0] = rounded(width, PITCH)
    if pitch[0] < width or pitch[0] > <uint64_t>-1 / height:
        return OUT_OF_MEMORY
    return allocate(address, pitch[0] * height, BACKING_PRIVATE)


cdef public CUresult cuMemAllocManaged(uint64_t* address, size_t size, unsigned int flags) noexcept nogil:
    if flags not in (1, 2):
        return INVALID_VALUE
    return allocate(address, size, BACKING_MANAGED)


cdef public CUresult cuMemFree_v2(uint64_t address) noexcept nogil:
    """Waits for the work of the context, as the real one does in effect."""
    cdef Allocation* allocation
    cdef Context* context
    cdef uint32_t backing = 0
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS or address == 0:
        return result
    drv_lock()
    allocation = mem_find(address)
    if allocation != NULL and allocation.address == address:
        context = allocation.context
        backing = allocation.backing if allocation.accessible else 0
    drv_unlock()
    if backing not in (BACKING_PRIVATE, BACKING_MANAGED, BACKING_POOL, BACKING_GRAPH):
        return INVALID_VALUE
    result = drv_synchronize_context(context)
    if result != SUCCESS:
        return result
    result = drv_begin(context)
    allocation = mem_find(address)
    if allocation == NULL or allocation.address != address:
        result = INVALID_VALUE
    elif backing == BACKING_POOL:
        result = mem_free_pooled_at_once(allocation)
    elif backing == BACKING_GRAPH:
        mem_free_of_graph(allocation)
    else:
        mem_release(allocation)
    drv_end(context)
    return result


cdef public CUresult cuMemGetInfo_v2(size_t* left, size_t* total) noexcept nogil:
    """Either may be null, as with NVIDIA's driver."""
    cdef Context* context
    cdef uint64_t limit, used, unused
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    result = drv_begin(context)
    sim_reap(context.gpu)
    used = sim_memory_used(context.gpu)
    unused = context.gpu.memory_bytes - min(used, context.gpu.memory_bytes)
    limit = context.gpu.contexts[context.slot].memory_limit
    used = context.gpu.contexts[context.slot].memory_bytes
    if limit:
        unused = min(unused, limit - min(used, limit))
    if left != NULL:
        left[0] = unused
    if total != NULL:
        total[0] = context.gpu.memory_bytes
    drv_end(context)
    return result


cdef public CUresult cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t address) noexcept nogil:
    cdef Allocation* allocation
    cdef CUresult result = INVALID_VALUE
    drv_lock()
    allocation = mem_find(address)
    if allocation == NULL:
        result = NOT_FOUND
    else:
        if base != NULL:
            base[0] = allocation.address
        if size != NULL:
            size[0] = allocation.size
        result = SUCCESS
    drv_unlock()
    return result


# -- what other parts need

cdef public void drv_touch(Effect* effect, uint64_t address) noexcept nogil:
    """Note that an operation will use the allocation at `address`, if it is one."""
    cdef Allocation* allocation
    if effect.touches == TOUCHES:
        return
    drv_lock()
    allocation = mem_find(address)
    if allocation != NULL and allocation.backing < BACKING_HOST:
        effect.touched[effect.touches] = address
        effect.touches += 1
    drv_unlock()


cdef public CUresult mem_check_range(uint64_t address, uint64_t size) noexcept nogil:
    """Whether an address range of the device is there; several mapped pieces in a row are one. What a graph allocates
    is there for its other nodes."""
    cdef Allocation* allocation
    cdef uint64_t end = address + size
    cdef CUresult result = SUCCESS if end >= address else INVALID_VALUE
    drv_lock()
    while result == SUCCESS and address < end:
        allocation = mem_find(address)
        if allocation == NULL or not (allocation.accessible or allocation.backing == BACKING_GRAPH):
            result = INVALID_VALUE
        else:
            address = allocation.address + allocation.size
    drv_unlock()
    return result


cdef public void drv_forget_context(Context* context) noexcept nogil:
    """Everything a context owns in this process goes with it."""
    cdef uint32_t i = 0, k
    cdef Stream* stream
    cdef Stream* following
    cdef Effect* effect
    drv_begin(context)
    mem_forget_pools(context)
    mem_forget_graphs(context)
    mem_forget_physical(context)
    while i < entries:
        if table[i].context != context:
            i += 1
            continue
        if table[i].backing in (BACKING_PRIVATE, BACKING_MANAGED):
            mem_release(&table[i])
            continue
        if table[i].backing in (BACKING_HOST, BACKING_GRAPH):
            munmap(<void*>table[i].address, table[i].mapped)
        mem_remove(&table[i])
    stream = drv_streams()
    while stream != NULL:
        following = stream.next
        if stream.context == context:
            for k in range(SIM_QUEUE):
                effect = &stream.effects[k]
                if effect.kind == EFFECT_EVENT:
                    (<Event*>effect.event).pending -= 1
                effect.kind = 0
            drv_drop_stream(stream)
        stream = following
    drv_end(context)
