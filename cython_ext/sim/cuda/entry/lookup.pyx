"""How programs find the driver's functions: cuGetProcAddress, and the names of results.

The table of what exists is the library's own symbol table: what is exported can be asked for. Only names with
several versions need to be known here.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport strchr, strcmp, strlen, strncmp

from cython_ext.sim.cuda.driver cimport CUresult, INVALID_VALUE, NOT_FOUND, SUCCESS


cdef extern from "<elf.h>" nogil:
    ctypedef struct Symbol "Elf64_Sym":
        uint32_t st_name
        uint64_t st_value
        unsigned short st_shndx
    ctypedef struct DynamicValue "__typeof__(((Elf64_Dyn *)0)->d_un)":
        uint64_t d_val
        uint64_t d_ptr
    ctypedef struct Dynamic "Elf64_Dyn":
        int64_t d_tag
        DynamicValue d_un
    int DT_NULL
    int DT_SYMTAB
    int DT_STRTAB
    int DT_GNU_HASH

cdef extern from "<link.h>" nogil:
    ctypedef struct link_map "struct link_map":
        uint64_t l_addr
        Dynamic* l_ld

cdef extern from "<dlfcn.h>" nogil:
    ctypedef struct Dl_info:
        const char* dli_fname
    int RTLD_DL_LINKMAP
    int dladdr1(const void* address, Dl_info* info, void** extra, int flags) noexcept


# base name, then pairs "version suffix": the last version that is not newer than the one asked for wins. Names
# that are not here have one version, whose symbol is the name itself or the name with _v2.
cdef const char* versions() noexcept nogil:
    return (b"\ncuDeviceTotalMem 3020_v2\ncuDeviceGetUuid 9020 11040_v2"
            b"\ncuDevicePrimaryCtxRelease 7000_v2\ncuDevicePrimaryCtxSetFlags 7000_v2\ncuDevicePrimaryCtxReset 7000_v2"
            b"\ncuCtxCreate 3020_v2 11040_v3 12050_v4\ncuCtxDestroy 4000_v2"
            b"\ncuCtxPushCurrent 4000_v2\ncuCtxPopCurrent 4000_v2\ncuCtxGetDevice 2000 13000_v2"
            b"\ncuCtxSynchronize 2000 13000_v2\ncuStreamGetCtx 9020 12050_v2\ncuStreamBeginCapture 10000 10010_v2"
            b"\ncuStreamGetCaptureInfo 10000 11030_v2 12030_v3\ncuStreamUpdateCaptureDependencies 11030 12030_v2"
            b"\ncuStreamWaitValue32 8000 11070_v2\ncuStreamWriteValue32 8000 11070_v2"
            b"\ncuStreamWaitValue64 9000 11070_v2\ncuStreamWriteValue64 9000 11070_v2"
            b"\ncuStreamBatchMemOp 8000 11070_v2\ncuEventElapsedTime 2000 12080_v2"
            b"\ncuGraphInstantiate 10000 11000_v2 12000WithFlags\ncuGraphExecUpdate 10020 12000_v2"
            b"\ncuGraphAddKernelNode 10000 12000_v2\ncuGraphKernelNodeGetParams 10000 12000_v2"
            b"\ncuGraphKernelNodeSetParams 10000 12000_v2\ncuGraphExecKernelNodeSetParams 10010 12000_v2"
            b"\ncuGraphGetEdges 10000 12030_v2\ncuGraphNodeGetDependencies 10000 12030_v2"
            b"\ncuGraphNodeGetDependentNodes 10000 12030_v2\ncuGraphAddDependencies 10000 12030_v2"
            b"\ncuGraphRemoveDependencies 10000 12030_v2\ncuGraphAddNode 12020 12030_v2"
            b"\ncuMemPrefetchAsync 8000 12020_v2\ncuMemAdvise 8000 12020_v2\ncuMemcpyBatchAsync 12080 13000_v2"
            b"\ncuMemcpy3DBatchAsync 12080 13000_v2\ncuGetProcAddress 11030 12000_v2\n")


cdef uint64_t find_symbol(const char* name) noexcept nogil:
    """Address of a symbol that this library exports; 0 if there is none.

    Read from the library's own tables and not by dlsym: a library that interposes on dlsym would return its own.
    """
    cdef Dl_info info
    cdef link_map* library = NULL
    cdef Dynamic* entry
    cdef Symbol* symbols = NULL
    cdef const char* strings = NULL
    cdef uint32_t* hashes = NULL
    cdef uint32_t* buckets
    cdef uint32_t* chain
    cdef uint32_t h = 5381, i
    cdef const unsigned char* c = <const unsigned char*>name
    if dladdr1(<void*>find_symbol, &info, <void**>&library, RTLD_DL_LINKMAP) == 0 or library == NULL:
        return 0
    entry = library.l_ld
    while entry.d_tag != DT_NULL:
        if entry.d_tag == DT_SYMTAB:
            symbols = <Symbol*>entry.d_un.d_ptr
        elif entry.d_tag == DT_STRTAB:
            strings = <const char*>entry.d_un.d_ptr
        elif entry.d_tag == DT_GNU_HASH:
            hashes = <uint32_t*>entry.d_un.d_ptr
        entry += 1
    if symbols == NULL or strings == NULL or hashes == NULL:
        return 0
    while c[0] != 0:
        h = h * 33 + c[0]
        c += 1
    # header: buckets, first symbol, words of the Bloom filter, its shift
    buckets = hashes + 4 + 2 * hashes[2]
    chain = buckets + hashes[0]
    i = buckets[h % hashes[0]]
    while i >= hashes[1]:
        if chain[i - hashes[1]] | 1 == h | 1 and strcmp(strings + symbols[i].st_name, name) == 0:
            return library.l_addr + symbols[i].st_value if symbols[i].st_shndx else 0
        if chain[i - hashes[1]] & 1:
            break
        i += 1
    return 0


cdef const char* entry_of(const char* name) noexcept nogil:
    """The list of versions after a name in the table; NULL if it is not there."""
    cdef const char* at = versions()
    cdef size_t n = strlen(name)
    while at != NULL and at[1] != 0:
        at += 1
        if strncmp(at, name, n) == 0 and at[n] == 32:
            return at + n
        at = strchr(at, 10)
    return NULL


cdef uint64_t variant(const char* name, const char* suffix, int length, bint per_thread) noexcept nogil:
    cdef char symbol[256]
    cdef uint64_t address = 0
    if per_thread:
        snprintf(symbol, sizeof(symbol), b"%s%.*s_ptsz", name, length, suffix)
        address = find_symbol(symbol)
        if address == 0:
            snprintf(symbol, sizeof(symbol), b"%s%.*s_ptds", name, length, suffix)
            address = find_symbol(symbol)
    if address == 0:
        snprintf(symbol, sizeof(symbol), b"%s%.*s", name, length, suffix)
        address = find_symbol(symbol)
    return address


cdef uint64_t resolve(const char* name, int version, bint per_thread, bint* too_old) noexcept nogil:
    cdef const char* at = entry_of(name)
    cdef const char* suffix = NULL
    cdef int length = 0, since
    cdef uint64_t address = 0
    too_old[0] = False
    if at == NULL:
        address = variant(name, b"_v2", 3, per_thread)
        return address if address else variant(name, b"", 0, per_thread)
    too_old[0] = True
    while at[0] == 32:
        at += 1
        since = 0
        while 48 <= at[0] <= 57:
            since = since * 10 + at[0] - 48
            at += 1
        suffix = at
        while at[0] not in (32, 10):
            at += 1
        if since <= version:
            too_old[0] = False
            length = <int>(at - suffix)
            address = variant(name, suffix, length, per_thread)
    return address


cdef public CUresult cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                                         int* status) noexcept nogil:
    """flags: 1 the legacy default stream, 2 the per-thread one. status: 0 found, 1 no such name, 2 too old."""
    cdef bint too_old = False
    cdef uint64_t address = 0
    if function == NULL or name == NULL or flags > 2:
        return INVALID_VALUE
    if name[0] != 0:
        address = resolve(name, version, flags == 2, &too_old)
    function[0] = <void*>address
    if status != NULL:
        status[0] = 0 if address else 2 if too_old else 1
    return SUCCESS if address else NOT_FOUND


cdef public CUresult cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) noexcept nogil:
    return cuGetProcAddress_v2(name, function, version, flags, NULL)


cdef public CUresult cuGetExportTable(const void** table, const void* uuid) noexcept nogil:
    """Private tables of the real driver; there are none here."""
    table[0] = NULL
    return NOT_FOUND
