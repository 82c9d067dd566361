"""Virtual memory management: reserved address ranges, physical pieces, and mappings between them.

Physical memory is one unlinked file of this process, a piece is a range of it. So contents survive unmapping, and a
piece mapped twice shows the same contents twice. Unmapping does not wait: queued work that would still touch the
range dies with ILLEGAL_ADDRESS when the GPU comes to it, and its context with it (seen on an H200).

A piece that may be exported has a file of its own, whose descriptor is the shareable handle. All processes that hold
the piece map that file, so they see the same contents (shares.pxd counts it once). ``VGPU_SIM_READ_ONLY=0`` makes
cuMemSetAccess refuse read-only access. New pieces are zeros, or hold the first character of ``VGPU_SIM_FRESH``.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, getenv
from libc.string cimport memset

from cython_ext.sim.cuda.memory.allocations cimport (
    Allocation, BACKING_MAPPED, mem_add, mem_at, mem_charge, mem_discharge, mem_find, mem_remove,
)
from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, ILLEGAL_ADDRESS, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, Stream,
    drv_begin, drv_current_context, drv_device, drv_end, drv_lock, drv_next_id, drv_streams, drv_unlock,
)
from cython_ext.sim.share cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE,
    mmap, mprotect, munmap,
)
from cython_ext.sim.shares cimport (
    sim_find_share, sim_join_share, sim_leave_share, sim_open_share,
)
from cython_ext.sim.state cimport SIM_QUEUE, SimShare, sim_op


cdef extern from "<sys/mman.h>" nogil:
    int MFD_CLOEXEC
    int memfd_create(const char* name, unsigned int flags) noexcept

cdef extern from "<fcntl.h>" nogil:
    int FALLOC_FL_KEEP_SIZE
    int FALLOC_FL_PUNCH_HOLE
    int fallocate(int fd, int mode, int64_t offset, int64_t size) noexcept

cdef extern from *:
    """
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>
    /* The C library's fstat has another name since glibc 2.33. */
    static inline int sim_stat_of(int fd, struct stat *found) { return (int)syscall(SYS_fstat, fd, found); }
    """
    struct stat_t "stat":
        uint64_t st_ino
        int64_t st_size
    int sim_stat_of(int fd, stat_t* found) noexcept nogil

cdef extern from "<unistd.h>" nogil:
    int close(int fd) noexcept
    int dup(int fd) noexcept
    int ftruncate(int fd, int64_t size) noexcept
    int64_t pwrite(int fd, const void* bytes, size_t size, int64_t at) noexcept

cdef enum:
    GRANULARITY = 2 << 20
    POSIX_DESCRIPTOR = 1    # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    MARK_PHYSICAL = 0x50485931

cdef public struct Physical:
    uint32_t mark
    uint32_t handles        # cuMemCreate and cuMemRetainAllocationHandle less cuMemRelease
    uint32_t mappings
    int device
    int handle_types        # to which it may be exported
    int file
    uint64_t share          # the inode of its file, from its export or import on; 0: no other process has it
    uint64_t id
    uint64_t size
    int64_t offset
    Context* context
    Physical* next

cdef public struct Range:
    uint64_t address
    uint64_t size
    Range* next

cdef Physical* pieces
cdef Range* ranges
cdef int file
cdef int64_t file_bytes


cdef uint64_t rounded(uint64_t size, uint64_t unit) noexcept nogil:
    return (size + unit - 1) / unit * unit


# -- address space

cdef public CUresult cuMemAddressReserve(uint64_t* address, size_t size, size_t alignment, uint64_t at,
                                         unsigned long long flags) noexcept nogil:
    global ranges
    cdef Range* entry
    cdef uint64_t start, whole
    cdef void* memory
    if size == 0 or size % GRANULARITY:
        return INVALID_VALUE
    alignment = max(<size_t>GRANULARITY, alignment)
    whole = size + alignment
    memory = mmap(<void*>at, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        return OUT_OF_MEMORY
    start = rounded(<uint64_t>memory, alignment)
    if start > <uint64_t>memory:
        munmap(memory, start - <uint64_t>memory)
    munmap(<void*>(start + size), <uint64_t>memory + whole - start - size)
    entry = <Range*>calloc(1, sizeof(Range))
    entry.address = start
    entry.size = size
    drv_lock()
    entry.next = ranges
    ranges = entry
    drv_unlock()
    address[0] = start
    return SUCCESS


cdef public CUresult cuMemAddressFree(uint64_t address, size_t size) noexcept nogil:
    """The whole of a reservation, with nothing mapped in it."""
    cdef Range** link = &ranges
    cdef Range* entry
    cdef uint32_t i = 0
    cdef CUresult result = SUCCESS
    drv_lock()
    while link[0] != NULL and link[0].address != address:
        link = &link[0].next
    entry = link[0]
    if entry == NULL or entry.size != size:
        result = INVALID_VALUE
    while result == SUCCESS and mem_at(i) != NULL:
        if address <= mem_at(i).address < address + size:
            result = INVALID_VALUE
        i += 1
    if result == SUCCESS:
        link[0] = entry.next
        munmap(<void*>address, size)
        free(entry)
    drv_unlock()
    return result


# -- physical memory

cdef public struct PieceProperties:
    int type
    int handle_types
    int location_type
    int location
    void* security
    unsigned char flags[8]


cdef public CUresult cuMemGetAllocationGranularity(size_t* granularity, const PieceProperties* properties,
                                                   int option) noexcept nogil:
    granularity[0] = GRANULARITY
    return SUCCESS


cdef void soil(const Physical* piece, uint64_t size) noexcept nogil:
    cdef const char* fresh = getenv(b"VGPU_SIM_FRESH")
    cdef char[4096] page
    cdef uint64_t at = 0
    if fresh == NULL or fresh[0] == 0:
        return
    memset(page, fresh[0], sizeof(page))
    while at < size:
        pwrite(piece.file, page, sizeof(page), piece.offset + at)
        at += sizeof(page)


cdef public CUresult cuMemCreate(Physical** out, size_t size, const PieceProperties* properties,
                                 unsigned long long flags) noexcept nogil:
    global file, file_bytes
    cdef Context* context
    cdef Physical* piece
    cdef bint shareable
    cdef int own = -1
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if size == 0 or size % GRANULARITY or properties.type != 1:
        return INVALID_VALUE
    if properties.location_type != 1:
        return NOT_SUPPORTED  # pieces of host memory
    if drv_device(properties.location) == NULL:
        return INVALID_DEVICE
    if drv_device(properties.location).gpu != context.gpu:
        return NOT_SUPPORTED
    result = drv_begin(context)
    shareable = properties.handle_types & POSIX_DESCRIPTOR
    if result == SUCCESS and (file == 0 or shareable):
        own = memfd_create(b"simulated-gpu-memory", MFD_CLOEXEC)
    if result == SUCCESS and file == 0 and not shareable:
        file = own
    if result == SUCCESS and ((own if shareable else file) <= 0 or not mem_charge(context, size)):
        result = OUT_OF_MEMORY
    if result == SUCCESS:
        piece = add_piece(context, properties.location, size)
        piece.handle_types = properties.handle_types
        piece.file = own if shareable else file
        if not shareable:
            piece.offset = file_bytes
            file_bytes += size
        ftruncate(piece.file, piece.offset + size)
        soil(piece, size)
        out[0] = piece
    elif shareable and own > 0:
        close(own)
    drv_end(context)
    return result


cdef Physical* add_piece(Context* context, int device, uint64_t size) noexcept nogil:
    global pieces
    cdef Physical* piece = <Physical*>calloc(1, sizeof(Physical))
    piece.mark = MARK_PHYSICAL
    piece.handles = 1
    piece.device = device
    piece.id = drv_next_id()
    piece.size = size
    piece.context = context
    piece.next = pieces
    pieces = piece
    return piece


cdef void give_back(Physical* piece) noexcept nogil:
    """What is charged for it. A share that this process has twice stays with the other piece."""
    cdef SimShare* share
    cdef Physical* other = pieces
    if piece.context == NULL:
        return
    if piece.share == 0:
        mem_discharge(piece.context, piece.size)
        return
    while other != NULL and (other == piece or other.share != piece.share or other.context != piece.context):
        other = other.next
    share = sim_find_share(piece.context.gpu, piece.share) if other == NULL else NULL
    if share != NULL:
        sim_leave_share(piece.context.gpu, share, piece.context.slot)


cdef void settle(Physical* piece) noexcept nogil:
    """Without handles and mappings a piece goes back to the GPU. Under the locks."""
    cdef Physical** link = &pieces
    if piece.handles or piece.mappings:
        return
    give_back(piece)
    if piece.file != file:
        close(piece.file)
    else:
        fallocate(file, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, piece.offset, piece.size)
    while link[0] != NULL and link[0] != piece:
        link = &link[0].next
    if link[0] != NULL:
        link[0] = piece.next
    piece.mark = 0
    free(piece)


cdef Physical* find_piece(Physical* handle) noexcept nogil:
    """Handles are checked against the list: they may be any number."""
    cdef Physical* piece = pieces
    while piece != NULL and piece != handle:
        piece = piece.next
    return piece if piece != NULL and piece.handles else NULL


cdef public CUresult cuMemRelease(Physical* handle) noexcept nogil:
    cdef Context* context
    cdef Physical* piece
    drv_lock()
    piece = find_piece(handle)
    context = piece.context if piece != NULL else NULL
    drv_unlock()
    if piece == NULL:
        return INVALID_VALUE
    drv_begin(context)
    piece.handles -= 1
    settle(piece)
    drv_end(context)
    return SUCCESS


cdef public CUresult cuMemRetainAllocationHandle(Physical** out, void* address) noexcept nogil:
    cdef Allocation* allocation
    cdef CUresult result = INVALID_VALUE
    drv_lock()
    allocation = mem_find(<uint64_t>address)
    if allocation != NULL and allocation.backing == BACKING_MAPPED:
        out[0] = <Physical*>allocation.owner
        out[0].handles += 1
        result = SUCCESS
    drv_unlock()
    return result


cdef public CUresult cuMemGetAllocationPropertiesFromHandle(PieceProperties* properties,
                                                            Physical* handle) noexcept nogil:
    cdef Physical* piece
    drv_lock()
    piece = find_piece(handle)
    if piece != NULL:
        memset(properties, 0, sizeof(PieceProperties))
        properties.type = 1
        properties.handle_types = piece.handle_types
        properties.location_type = 1
        properties.location = piece.device
    drv_unlock()
    return SUCCESS if piece != NULL else INVALID_VALUE


cdef public CUresult cuMemExportToShareableHandle(void* out, Physical* handle, int type,
                                                  unsigned long long flags) noexcept nogil:
    """A descriptor of the piece's file."""
    cdef Physical* piece
    cdef Context* context
    cdef stat_t found
    cdef CUresult result = INVALID_VALUE
    drv_lock()
    piece = find_piece(handle)
    context = piece.context if piece != NULL else NULL
    drv_unlock()
    if context == NULL or type != POSIX_DESCRIPTOR or not piece.handle_types & type or flags:
        return INVALID_VALUE
    drv_begin(context)
    if sim_stat_of(piece.file, &found) == 0 and (
        piece.share != 0 or sim_open_share(context.gpu, found.st_ino, piece.size, context.slot)
    ):
        piece.share = found.st_ino
        (<int*>out)[0] = dup(piece.file)
        result = SUCCESS if (<int*>out)[0] >= 0 else OUT_OF_MEMORY
    drv_end(context)
    return result


cdef public CUresult cuMemImportFromShareableHandle(Physical** out, void* shared, int type) noexcept nogil:
    """``shared`` is the descriptor, which stays the caller's."""
    cdef Context* context
    cdef Physical* piece
    cdef SimShare* share = NULL
    cdef stat_t found
    cdef int copy
    cdef CUresult result = drv_current_context(&context)
    if result != SUCCESS:
        return result
    if type != POSIX_DESCRIPTOR or sim_stat_of(<int><uint64_t>shared, &found) != 0:
        return INVALID_VALUE
    copy = dup(<int><uint64_t>shared)
    result = drv_begin(context)
    if result == SUCCESS:
        share = sim_find_share(context.gpu, found.st_ino)
        result = INVALID_VALUE if share == NULL or share.bytes != <uint64_t>found.st_size else SUCCESS
    if result == SUCCESS:
        piece = add_piece(context, context.device, share.bytes)
        piece.handle_types = POSIX_DESCRIPTOR
        piece.file = copy
        piece.share = share.id
        sim_join_share(share, context.slot)
        out[0] = piece
    else:
        close(copy)
    drv_end(context)
    return result


# -- mappings

cdef bint is_reserved(uint64_t address, uint64_t size) noexcept nogil:
    cdef Range* entry = ranges
    while entry != NULL:
        if entry.address <= address and address + size <= entry.address + entry.size:
            return True
        entry = entry.next
    return False


cdef public void mem_reservation(uint64_t address, uint64_t* start, uint64_t* size) noexcept nogil:
    """The reserved range that ``address`` is within. The caller holds the lock."""
    cdef Range* entry = ranges
    while entry != NULL:
        if entry.address <= address < entry.address + entry.size:
            start[0], size[0] = entry.address, entry.size
        entry = entry.next


cdef bint is_free(uint64_t address, uint64_t size) noexcept nogil:
    cdef uint32_t i = 0
    cdef Allocation* other = mem_at(0)
    while other != NULL:
        if other.address < address + size and address < other.address + other.size:
            return False
        i += 1
        other = mem_at(i)
    return True


cdef public CUresult cuMemMap(uint64_t address, size_t size, size_t offset, Physical* handle,
                              unsigned long long flags) noexcept nogil:
    """The whole piece, at a reserved and free place; not accessible yet."""
    cdef Allocation allocation
    cdef Physical* piece
    cdef CUresult result = SUCCESS
    drv_lock()
    piece = find_piece(handle)
    if piece == NULL or size == 0 or offset % GRANULARITY or size % GRANULARITY or flags:
        result = INVALID_VALUE
    elif offset or size != piece.size:
        result = NOT_SUPPORTED
    elif address % GRANULARITY or not is_reserved(address, size) or not is_free(address, size):
        result = INVALID_VALUE
    elif mmap(<void*>address, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, piece.file,
              piece.offset) == MAP_FAILED:
        result = OUT_OF_MEMORY
    else:
        memset(&allocation, 0, sizeof(Allocation))
        allocation.address = address
        allocation.size = allocation.mapped = size
        allocation.context = piece.context
        allocation.backing = BACKING_MAPPED
        allocation.owner = piece
        mem_add(&allocation)
        piece.mappings += 1
    drv_unlock()
    return result


cdef CUresult whole_mappings(uint64_t address, uint64_t size) noexcept nogil:
    """Whether a range consists of whole mappings."""
    cdef uint64_t at = address
    cdef Allocation* mapping
    while at < address + size:
        mapping = mem_find(at)
        if mapping == NULL or mapping.backing != BACKING_MAPPED or mapping.address != at:
            return INVALID_VALUE
        at += mapping.size
    return SUCCESS if at == address + size else INVALID_VALUE


cdef public struct Access:
    int location_type
    int location
    int flags               # 0 none, 1 read, 3 read and write


cdef public CUresult cuMemSetAccess(uint64_t address, size_t size, const Access* accesses,
                                    size_t count) noexcept nogil:
    cdef uint64_t at = address
    cdef Allocation* mapping
    cdef int protection = PROT_NONE
    cdef size_t i
    cdef CUresult result
    for i in range(count):
        if accesses[i].flags & 1:
            # Host and peers follow the same pointer: all that have any access share the strongest.
            protection |= PROT_READ
        if accesses[i].flags & 2:
            protection |= PROT_WRITE
    if protection == PROT_READ and getenv(b"VGPU_SIM_READ_ONLY") != NULL and getenv(b"VGPU_SIM_READ_ONLY")[0] == 48:
        return NOT_SUPPORTED
    drv_lock()
    result = whole_mappings(address, size)
    while result == SUCCESS and at < address + size:
        mapping = mem_find(at)
        mapping.accessible = protection != PROT_NONE
        at += mapping.size
    if result == SUCCESS and mprotect(<void*>address, size, protection) != 0:
        result = INVALID_VALUE
    drv_unlock()
    return result


cdef public CUresult cuMemGetAccess(unsigned long long* flags, const Access* location,
                                    uint64_t address) noexcept nogil:
    cdef Allocation* mapping
    drv_lock()
    mapping = mem_find(address)
    if mapping != NULL:
        flags[0] = 3 if mapping.accessible else 0
    drv_unlock()
    return SUCCESS if mapping != NULL else INVALID_VALUE


cdef void condemn(Context* context, uint64_t address, uint64_t size) noexcept nogil:
    """Queued operations that touch a range fail when the GPU comes to them. Under the locks."""
    cdef Stream* stream = drv_streams()
    cdef uint64_t i, end
    cdef uint32_t k
    while stream != NULL:
        if stream.gpu == context.gpu:
            i = stream.gpu.streams[stream.slot].head
            end = min(stream.gpu.streams[stream.slot].tail, i + SIM_QUEUE)
            while i < end:
                for k in range(stream.effects[i % SIM_QUEUE].touches):
                    if address <= stream.effects[i % SIM_QUEUE].touched[k] < address + size:
                        sim_op(stream.gpu, stream.slot, i).failed = ILLEGAL_ADDRESS
                i += 1
        stream = stream.next


cdef public CUresult cuMemUnmap(uint64_t address, size_t size) noexcept nogil:
    cdef Context* context = NULL
    cdef Allocation* mapping
    cdef Physical* piece
    cdef uint64_t end = address + size
    cdef CUresult result
    drv_lock()
    result = whole_mappings(address, size)
    if result == SUCCESS and size:
        context = mem_find(address).context
    drv_unlock()
    if context == NULL:
        return INVALID_VALUE
    drv_begin(context)
    condemn(context, address, size)
    while address < end:
        mapping = mem_find(address)
        piece = <Physical*>mapping.owner
        mmap(<void*>address, mapping.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
        address += mapping.size
        mem_remove(mapping)
        piece.mappings -= 1
        settle(piece)
    drv_end(context)
    return SUCCESS


cdef public void mem_forget_physical(Context* context) noexcept nogil:
    """Address space and handles outlive the context; its memory is gone with it."""
    cdef Physical* piece = pieces
    cdef Physical* following
    cdef Allocation* mapping
    cdef uint32_t i = 0
    while mem_at(i) != NULL:
        mapping = mem_at(i)
        if mapping.backing == BACKING_MAPPED and mapping.context == context:
            mmap(<void*>mapping.address, mapping.size, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
            (<Physical*>mapping.owner).mappings -= 1
            mem_remove(mapping)
        else:
            i += 1
    while piece != NULL:
        following = piece.next
        if piece.context == context:
            piece.handles = 0
            settle(piece)
        piece = following
