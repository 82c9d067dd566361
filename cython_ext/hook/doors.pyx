"""The doors: by which names an application can reach the driver, and which function it finds there.

Three: the exported symbols themselves (exports.map); ``dlsym`` (dlsym.h); ``cuGetProcAddress``. The last two are
answered by address: ask the real one first, with the caller's own arguments, then give our wrapper of exactly the
function that came out. ``cuGetExportTable`` is left alone: its private tables launch nothing.

Nothing here is initialised by a constructor: another library's may call dlsym before ours would run.
"""

from libc.stdint cimport uint32_t
from libc.string cimport strcmp

from cython_ext.hook.generated.driver cimport (
    VGPU_INTERCEPTED, real_cuGetProcAddress, real_cuGetProcAddress_v2, vgpu_real, vgpu_symbols,
)
from cython_ext.native cimport load32, store32

cdef extern from *:
    """
    #include "hook/hook_native.h"
    #include "hook/generated/table.h"
    #include "hook/dlsym.h"
    void *(*vgpu_real_dlsym)(void *, const char *);
    """
    void** vgpu_aliases

cdef extern from "hook/hook_native.h" nogil:
    void* RTLD_DEFAULT
    void* RTLD_NEXT
    enum:
        RTLD_LAZY
        RTLD_NOLOAD
    const char* VGPU_OLD_GLIBC
    void* vgpu_dlopen(const char* file, int mode) noexcept
    void* vgpu_dlvsym(void* handle, const char* name, const char* version) noexcept
    void* (*vgpu_real_dlsym)(void*, const char*) noexcept

cdef void* cuda_library
cdef void* nvml_library
cdef uint32_t aliases_known


cdef int missing_cuda() noexcept nogil:
    return 500               # CUDA_ERROR_NOT_FOUND


cdef int missing_nvml() noexcept nogil:
    return 13                # NVML_ERROR_FUNCTION_NOT_FOUND


cdef int unloaded_cuda() noexcept nogil:
    return 100               # CUDA_ERROR_NO_DEVICE: no driver on this machine


cdef int unloaded_nvml() noexcept nogil:
    return 12                # NVML_ERROR_LIBRARY_NOT_FOUND


cdef inline void find_real_dlsym() noexcept nogil:
    """Never the public dlsym: that is ourselves."""
    global vgpu_real_dlsym
    cdef void* found
    if vgpu_real_dlsym == NULL:
        found = vgpu_dlvsym(RTLD_NEXT, b"dlsym", b"GLIBC_2.34")
        if found == NULL:
            found = vgpu_dlvsym(RTLD_NEXT, b"dlsym", VGPU_OLD_GLIBC)
        vgpu_real_dlsym = <void* (*)(void*, const char*) noexcept nogil>found


cdef void* library(bint nvml, bint load) noexcept nogil:
    """The driver's library: the one the process has loaded, else (``load``) the one the loader would find. NULL:
    none."""
    global cuda_library, nvml_library
    cdef int mode = RTLD_LAZY if load else RTLD_LAZY | RTLD_NOLOAD
    if nvml:
        if nvml_library == NULL:
            nvml_library = vgpu_dlopen(b"libnvidia-ml.so.1", mode)
        return nvml_library
    if cuda_library == NULL:
        cuda_library = vgpu_dlopen(b"libcuda.so.1", mode)
    return cuda_library


cdef void* bind(int symbol, bint load) noexcept nogil:
    cdef bint nvml = vgpu_symbols[symbol].nvml
    cdef void* handle = library(nvml, load)
    cdef void* real
    if handle == NULL:
        return <void*>unloaded_nvml if nvml else <void*>unloaded_cuda
    find_real_dlsym()
    real = vgpu_real_dlsym(handle, vgpu_symbols[symbol].name)
    if real == NULL:
        real = <void*>missing_nvml if nvml else <void*>missing_cuda
    vgpu_real[symbol] = real
    return real


cdef public void* vgpu_bind(int symbol) noexcept nogil:
    """The real function of a table row, looked up at its first use; a stub that returns an error if there is none."""
    return bind(symbol, 1)


cdef bint exists(int symbol) noexcept nogil:
    """Whether the process has loaded a driver library with that function."""
    cdef void* real = vgpu_real[symbol]
    if real == NULL:
        real = bind(symbol, 0)
    return not (
        real == <void*>missing_cuda or real == <void*>missing_nvml
        or real == <void*>unloaded_cuda or real == <void*>unloaded_nvml
    )


cdef int find(const char* name) noexcept nogil:
    """Row of an intercepted function, or -1. The rows are sorted by name."""
    cdef int low = 0, high = VGPU_INTERCEPTED - 1, middle, order
    while low <= high:
        middle = (low + high) // 2
        order = strcmp(name, vgpu_symbols[middle].name)
        if order == 0:
            return middle
        if order < 0:
            high = middle - 1
        else:
            low = middle + 1
    return -1


cdef void learn_aliases() noexcept nogil:
    """cuGetProcAddress may name a function by another address than the linker does: ask it for each."""
    cdef void* address
    cdef int i
    if load32(&aliases_known):
        return
    for i in range(VGPU_INTERCEPTED):
        if vgpu_symbols[i].nvml or not exists(i) or vgpu_symbols[i].version == 0:
            continue
        address = NULL
        if real_cuGetProcAddress_v2(
            vgpu_symbols[i].base, &address, vgpu_symbols[i].version, <unsigned long long>vgpu_symbols[i].flags, NULL
        ) == 0:
            vgpu_aliases[i] = address
    store32(&aliases_known, 1)


cdef public void* vgpu_wrapper_of(void* address) noexcept nogil:
    """Our wrapper of the driver's function at ``address``, or NULL."""
    cdef int i
    if address == NULL:
        return NULL
    # The newest version first, should a driver have one function for two; a function's own address before the
    # address that another one's old version was answered with.
    for i in range(VGPU_INTERCEPTED - 1, -1, -1):
        if address == vgpu_real[i]:
            return vgpu_symbols[i].wrapper
    for i in range(VGPU_INTERCEPTED - 1, -1, -1):
        if address == vgpu_aliases[i]:
            return vgpu_symbols[i].wrapper
    return NULL


cdef public void* vgpu_door(void* handle, const char* name) noexcept nogil:
    """What dlsym(handle, name) is to return, or NULL: jump to the real one."""
    cdef void* found
    cdef int symbol = -1
    find_real_dlsym()
    if name != NULL and ((name[0] == c'c' and name[1] == c'u') or (name[0] == c'n' and name[1] == c'v')):
        symbol = find(name)
    if symbol < 0 or not exists(symbol):
        return NULL
    if handle == RTLD_DEFAULT or handle == RTLD_NEXT:
        return vgpu_symbols[symbol].wrapper
    found = vgpu_real_dlsym(handle, name)
    # a library that merely has a function of that name keeps it
    return vgpu_symbols[symbol].wrapper if found == vgpu_real[symbol] else NULL


cdef void replace(void** pfn) noexcept nogil:
    cdef void* wrapper
    cdef int i
    for i in range(VGPU_INTERCEPTED):
        if not vgpu_symbols[i].nvml:
            exists(i)
    learn_aliases()
    wrapper = vgpu_wrapper_of(pfn[0])
    if wrapper != NULL:
        pfn[0] = wrapper


cdef public int cuGetProcAddress(
    const char* symbol, void** pfn, int version, unsigned long long flags
) noexcept nogil:
    cdef int result = real_cuGetProcAddress(symbol, pfn, version, flags)
    if result == 0 and pfn != NULL:
        replace(pfn)
    return result


cdef public int cuGetProcAddress_v2(
    const char* symbol, void** pfn, int version, unsigned long long flags, int* status
) noexcept nogil:
    cdef int result = real_cuGetProcAddress_v2(symbol, pfn, version, flags, status)
    if result == 0 and pfn != NULL:
        replace(pfn)
    return result
