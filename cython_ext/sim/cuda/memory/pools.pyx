"""Stream-ordered allocation: pools that keep what was freed until they are trimmed or a synchronisation lets it go.

A pool takes memory from the GPU in steps (its *reserved* memory) and hands it out (its *used* memory). A step is 32
MiB, or VGPU_SIM_POOL_STEP bytes: another driver's step may be another.
Memory freed in a stream is reusable at once: contents change at submission here, so no order can be violated.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, getenv, strtoull
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_GRAPH, BACKING_POOL, mem_add, mem_at, mem_charge, mem_discharge, mem_find, mem_free_of_graph,
    mem_remove,
)
from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, Device, INVALID_DEVICE, INVALID_VALUE, MARK_POOL, NOT_PERMITTED,
    OUT_OF_MEMORY, SUCCESS, Stream, Work, drv_begin, drv_capture_give, drv_capture_take, drv_check_unsafe, drv_device,
    drv_end, drv_stream, drv_submit,
)
from cython_ext.sim.share cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap,
)
from cython_ext.sim.state cimport OP_MARK

cdef enum:
    PAGE = 4096
    UNIT = 512
    USUAL_STEP = 32 << 20
    ATTRIBUTE_RELEASE_THRESHOLD = 4
    ATTRIBUTE_RESERVED = 5
    ATTRIBUTE_RESERVED_HIGH = 6
    ATTRIBUTE_USED = 7
    ATTRIBUTE_USED_HIGH = 8

cdef public struct Pool:
    uint32_t mark
    int device
    bint is_default
    bint is_managed
    Context* context        # pays for what is reserved
    uint64_t reserved_bytes
    uint64_t used_bytes
    uint64_t stale_bytes        # freed, and still counted by the attribute
    uint64_t reserved_high_bytes
    uint64_t used_high_bytes
    uint64_t threshold_bytes    # kept at a synchronisation
    uint64_t most_bytes         # 0: no limit of its own
    int reuse[4]
    Pool* next

cdef Pool* pools
cdef uint64_t step              # 0: not known yet


cdef uint64_t rounded(uint64_t size, uint64_t unit) noexcept nogil:
    return (size + unit - 1) / unit * unit


cdef uint64_t step_bytes() noexcept nogil:
    global step
    cdef const char* text
    if step == 0:
        text = getenv(b"VGPU_SIM_POOL_STEP")
        step = strtoull(text, NULL, 10) if text != NULL else 0
        step = step if step else <uint64_t>USUAL_STEP
    return step


cdef Pool* new_pool(int device, bint is_default) noexcept nogil:
    global pools
    cdef Pool* pool = <Pool*>calloc(1, sizeof(Pool))
    if pool == NULL:
        return NULL
    pool.mark = MARK_POOL
    pool.device = device
    pool.is_default = is_default
    pool.reuse[1] = pool.reuse[2] = pool.reuse[3] = 1
    pool.next = pools
    pools = pool
    return pool


cdef Pool* default_pool(int index) noexcept nogil:
    cdef Device* device = drv_device(index)
    if device != NULL and device.default_pool == NULL:
        device.default_pool = new_pool(index, True)
    return <Pool*>device.default_pool if device != NULL else NULL


cdef Pool* current_pool(int index) noexcept nogil:
    cdef Device* device = drv_device(index)
    if device != NULL and device.pool == NULL:
        device.pool = default_pool(index)
    return <Pool*>device.pool if device != NULL else NULL


cdef Pool* managed_pool(int index) noexcept nogil:
    """The device's own pool of managed memory, which is there from its first use on."""
    cdef Pool* pool = pools
    while pool != NULL and not (pool.is_managed and pool.device == index):
        pool = pool.next
    if pool == NULL and drv_device(index) != NULL:
        pool = new_pool(index, True)
        pool.is_managed = True
    return pool


cdef bint is_pool(Pool* pool) noexcept nogil:
    return pool != NULL and pool.mark == MARK_POOL


# -- taking from and giving back to the GPU (under the locks)

cdef bint grow(Pool* pool, Context* context, uint64_t size) noexcept nogil:
    cdef uint64_t missing
    if pool.context == NULL:
        pool.context = context
    if pool.used_bytes + size > pool.reserved_bytes:
        missing = rounded(pool.used_bytes + size - pool.reserved_bytes, step_bytes())
        if pool.most_bytes and pool.reserved_bytes + missing > pool.most_bytes:
            return False
        if not mem_charge(pool.context, missing):
            return False
        pool.reserved_bytes += missing
        pool.reserved_high_bytes = max(pool.reserved_high_bytes, pool.reserved_bytes)
    pool.used_bytes += size
    pool.used_high_bytes = max(pool.used_high_bytes, pool.used_bytes)
    return True


cdef void trim(Pool* pool, uint64_t keep) noexcept nogil:
    cdef uint64_t target = max(rounded(pool.used_bytes, step_bytes()), keep)
    if pool.context != NULL and pool.reserved_bytes > target:
        mem_discharge(pool.context, pool.reserved_bytes - target)
        pool.reserved_bytes = target


cdef public void mem_trim_pools(Context* context) noexcept nogil:
    """At a synchronisation pools let go of what is beyond their threshold."""
    cdef Pool* pool = pools
    if pool == NULL:
        return
    drv_begin(context)
    while pool != NULL:
        if pool.context == context:
            trim(pool, pool.threshold_bytes)
        pool = pool.next
    drv_end(context)


cdef public CUresult mem_free_pooled_at_once(Allocation* allocation) noexcept nogil:
    """By cuMemFree. As on the H200 the pool lets go of it at once, and goes on counting it as used for ever."""
    cdef Pool* pool = <Pool*>allocation.owner
    pool.stale_bytes += rounded(allocation.size, UNIT)
    mem_free_pooled(allocation)
    trim(pool, pool.threshold_bytes)
    return SUCCESS


cdef public CUresult mem_free_pooled(Allocation* allocation) noexcept nogil:
    (<Pool*>allocation.owner).used_bytes -= rounded(allocation.size, UNIT)
    munmap(<void*>allocation.address, allocation.mapped)
    mem_remove(allocation)
    return SUCCESS


cdef public void mem_forget_pools(Context* context) noexcept nogil:
    """The context that pays for a pool is gone, and with it the pool's memory."""
    cdef Pool* pool = pools
    cdef Allocation* allocation
    cdef uint32_t i = 0
    while mem_at(i) != NULL:
        allocation = mem_at(i)
        if allocation.backing == BACKING_POOL and (<Pool*>allocation.owner).context == context:
            mem_free_pooled(allocation)
        else:
            i += 1
    while pool != NULL:
        if pool.context == context:
            pool.context = NULL
            pool.reserved_bytes = pool.used_bytes = 0
        pool = pool.next


# -- allocation

cdef CUresult allocate(uint64_t* address, uint64_t size, Pool* pool, void* handle) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef Allocation allocation
    cdef void* memory = NULL
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if pool == NULL:
        pool = current_pool(stream.context.device)
    if size == 0 or not is_pool(pool):
        return INVALID_VALUE
    if stream.capture != NULL:
        return drv_capture_take(stream, address, size)
    result = drv_begin(stream.context)
    if result == SUCCESS and not grow(pool, stream.context, rounded(size, UNIT)):
        result = OUT_OF_MEMORY
    if result == SUCCESS:
        memory = mmap(NULL, rounded(size, PAGE), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if memory == MAP_FAILED:
            pool.used_bytes -= rounded(size, UNIT)
            result = OUT_OF_MEMORY
    if result == SUCCESS:
        memset(&allocation, 0, sizeof(Allocation))
        allocation.address = <uint64_t>memory
        allocation.size = size
        allocation.mapped = rounded(size, PAGE)
        allocation.context = stream.context
        allocation.backing = BACKING_POOL
        allocation.owner = pool
        allocation.accessible = True
        mem_add(&allocation)
        address[0] = allocation.address
    drv_end(stream.context)
    if result == SUCCESS:
        memset(&work, 0, sizeof(Work))
        work.kind = OP_MARK
        result = drv_submit(stream, &work)
    return result


cdef public CUresult cuMemAllocAsync(uint64_t* address, size_t size, void* stream) noexcept nogil:
    return allocate(address, size, NULL, stream)


cdef public CUresult cuMemAllocFromPoolAsync(uint64_t* address, size_t size, Pool* pool, void* stream) noexcept nogil:
    return allocate(address, size, pool, stream) if is_pool(pool) else INVALID_VALUE


cdef public CUresult cuMemFreeAsync(uint64_t address, void* handle) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef Allocation* allocation
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if stream.capture != NULL:
        return drv_capture_give(stream, address)
    memset(&work, 0, sizeof(Work))
    work.kind = OP_MARK
    result = drv_submit(stream, &work)
    if result != SUCCESS:
        return result
    drv_begin(stream.context)
    allocation = mem_find(address)
    if allocation == NULL or allocation.address != address:
        result = INVALID_VALUE
    elif allocation.backing == BACKING_GRAPH and allocation.accessible:
        mem_free_of_graph(allocation)
    elif allocation.backing != BACKING_POOL:
        result = INVALID_VALUE
    else:
        result = mem_free_pooled(allocation)
    drv_end(stream.context)
    return result


# -- pools

cdef public struct PoolProperties:
    int type
    int handle_types
    int location_type
    int location
    void* security
    size_t most_bytes
    unsigned short usage
    unsigned char reserved[54]


cdef public CUresult cuMemPoolCreate(Pool** out, const PoolProperties* properties) noexcept nogil:
    if properties.type != 1 or properties.location_type != 1:
        return INVALID_VALUE
    if drv_device(properties.location) == NULL:
        return INVALID_DEVICE
    out[0] = new_pool(properties.location, False)
    if out[0] == NULL:
        return OUT_OF_MEMORY
    out[0].most_bytes = properties.most_bytes
    return SUCCESS


cdef public CUresult cuMemPoolDestroy(Pool* pool) noexcept nogil:
    """What is still allocated stays until it is freed; nothing more is handed out."""
    cdef Device* device
    if not is_pool(pool):
        return INVALID_VALUE
    if pool.is_default:
        return NOT_PERMITTED
    device = drv_device(pool.device)
    if device.pool == pool:
        device.pool = default_pool(pool.device)
    if pool.context != NULL:
        drv_begin(pool.context)
        trim(pool, 0)
        drv_end(pool.context)
    pool.mark = 0
    pool.threshold_bytes = 0
    return SUCCESS


cdef public CUresult cuDeviceGetDefaultMemPool(Pool** out, int device) noexcept nogil:
    out[0] = default_pool(device)
    return SUCCESS if out[0] != NULL else INVALID_DEVICE


cdef public CUresult cuDeviceGetMemPool(Pool** out, int device) noexcept nogil:
    out[0] = current_pool(device)
    return SUCCESS if out[0] != NULL else INVALID_DEVICE


# Place: type (1: a device; 0: none is preferred) and number.
cdef CUresult pool_at(Pool** out, const int* place, int type, Pool* own) noexcept nogil:
    """``own``: of memory that is not managed."""
    if type not in (1, 2) or place[0] != 1 and not (type == 2 and place[0] == 0):
        return INVALID_VALUE
    out[0] = own if type == 1 else managed_pool(place[1])
    return SUCCESS if out[0] != NULL else INVALID_DEVICE


cdef public CUresult cuMemGetDefaultMemPool(Pool** out, const int* place, int type) noexcept nogil:
    return pool_at(out, place, type, default_pool(place[1]))


cdef public CUresult cuMemGetMemPool(Pool** out, const int* place, int type) noexcept nogil:
    return pool_at(out, place, type, current_pool(place[1]))


cdef public CUresult cuDeviceSetMemPool(int device, Pool* pool) noexcept nogil:
    if drv_device(device) == NULL:
        return INVALID_DEVICE
    if not is_pool(pool) or pool.device != device:
        return INVALID_VALUE
    drv_device(device).pool = pool
    return SUCCESS


cdef public CUresult cuMemPoolTrimTo(Pool* pool, size_t keep) noexcept nogil:
    cdef CUresult result = drv_check_unsafe()
    if result != SUCCESS:
        return result
    if not is_pool(pool):
        return INVALID_VALUE
    if pool.context != NULL:
        drv_begin(pool.context)
        trim(pool, keep)
        drv_end(pool.context)
    return SUCCESS


cdef public CUresult cuMemPoolGetAttribute(Pool* pool, int attribute, void* value) noexcept nogil:
    cdef uint64_t* wide = <uint64_t*>value
    cdef CUresult result = drv_check_unsafe()
    if result != SUCCESS:
        return result
    if not is_pool(pool) or not 1 <= attribute <= ATTRIBUTE_USED_HIGH:
        return INVALID_VALUE
    if attribute < ATTRIBUTE_RELEASE_THRESHOLD:
        (<int*>value)[0] = pool.reuse[attribute]
    elif attribute == ATTRIBUTE_RELEASE_THRESHOLD:
        wide[0] = pool.threshold_bytes
    elif attribute == ATTRIBUTE_RESERVED:
        wide[0] = pool.reserved_bytes
    elif attribute == ATTRIBUTE_RESERVED_HIGH:
        wide[0] = pool.reserved_high_bytes
    elif attribute == ATTRIBUTE_USED:
        wide[0] = pool.used_bytes + pool.stale_bytes
    else:
        wide[0] = pool.used_high_bytes
    return SUCCESS


cdef public CUresult cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) noexcept nogil:
    """High-water marks can only be reset to zero, as documented."""
    if not is_pool(pool):
        return INVALID_VALUE
    if 1 <= attribute < ATTRIBUTE_RELEASE_THRESHOLD:
        pool.reuse[attribute] = (<int*>value)[0]
    elif attribute == ATTRIBUTE_RELEASE_THRESHOLD:
        pool.threshold_bytes = (<uint64_t*>value)[0]
    elif (<uint64_t*>value)[0] != 0:
        return INVALID_VALUE
    elif attribute == ATTRIBUTE_RESERVED_HIGH:
        pool.reserved_high_bytes = pool.reserved_bytes
    elif attribute == ATTRIBUTE_USED_HIGH:
        pool.used_high_bytes = pool.used_bytes
    else:
        return INVALID_VALUE
    return SUCCESS


cdef public CUresult cuMemPoolSetAccess(Pool* pool, const void* accesses, size_t count) noexcept nogil:
    return SUCCESS if is_pool(pool) else INVALID_VALUE


cdef public CUresult cuMemPoolGetAccess(int* flags, Pool* pool, int* location) noexcept nogil:
    """Every GPU of a simulated node reaches all of its memory."""
    flags[0] = 3
    return SUCCESS if is_pool(pool) else INVALID_VALUE
