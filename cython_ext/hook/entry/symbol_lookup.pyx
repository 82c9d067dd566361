"""Symbol lookup: the ways by which an application reaches the driver, and which function it finds there.

There are three ways: the exported symbols themselves (exports.map); ``dlsym`` (dlsym.h); ``cuGetProcAddress``. The hook
answers the last two by address. It calls the real function first, with the caller's own arguments. Then it returns its
wrapper of exactly the function that came out. It leaves ``cuGetExportTable`` alone: its private tables launch nothing.

A program may be linked with a library that has functions of the driver's names and is not the driver: a test double, an
emulator. Then the exported symbols step aside. Each wrapper calls the function that the program would have without the
hook, and the process gets no vGPU. That ends once the program asks for the driver itself by another way. The functions
that it gets there are held to the vGPU.

Nothing here is initialised by a constructor. Reason: another library's constructor may call dlsym before the hook's.
"""

from libc.stdint cimport uint32_t
from libc.string cimport strcmp, strncmp, strrchr

from cython_ext.hook.generated.driver cimport (
    VGPU_INTERCEPTED, VGPU_SYMBOLS, real_cuGetProcAddress, real_cuGetProcAddress_v2, vgpu_real, vgpu_symbols,
)
from cython_ext.hook.state cimport attached
from cython_ext.native cimport load32, store32

cdef extern from *:
    """
    #include "hook/hook_native.h"
    #include "hook/generated/table.h"
    #include "hook/dlsym.h"
    void *(*vgpu_real_dlsym)(void *, const char *);
    void *(*vgpu_real_dlvsym)(void *, const char *, const char *) = vgpu_dlvsym;
    extern void *vgpu_dlsym_new(void *, const char *);
    extern void *vgpu_dlvsym_new(void *, const char *, const char *);
    """
    void** vgpu_aliases
    void* vgpu_dlsym_new(void* handle, const char* name) noexcept nogil
    void* vgpu_dlvsym_new(void* handle, const char* name, const char* version) noexcept nogil

cdef extern from "hook/hook_native.h" nogil:
    void* RTLD_DEFAULT
    void* RTLD_NEXT
    enum:
        RTLD_LAZY
        RTLD_NOLOAD
    const char* VGPU_OLD_GLIBC
    ctypedef struct Dl_info:
        const char* dli_fname
    void* vgpu_dlopen(const char* file, int mode) noexcept
    int vgpu_dladdr(const void* address, Dl_info* info) noexcept
    void* vgpu_dlvsym(void* handle, const char* name, const char* version) noexcept
    void* (*vgpu_real_dlsym)(void*, const char*) noexcept

cdef void* cuda_library
cdef void* nvml_library
cdef uint32_t aliases_known
cdef uint32_t[2] aside           # 1: some exports lead to another library than the driver; CUDA's, NVML's
cdef uint32_t[2] asked           # 1: the driver itself was asked for, and no export steps aside any more


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


cdef bint is_drivers(const void* address, bint nvml) noexcept nogil:
    """Whether it lies in a library called as the driver's are."""
    cdef Dl_info info
    cdef const char* name
    if vgpu_dladdr(address, &info) == 0 or info.dli_fname == NULL:
        return 0
    name = strrchr(info.dli_fname, c'/')
    name = info.dli_fname if name == NULL else name + 1
    return strncmp(name, b"libnvidia-ml.so", 15) == 0 if nvml else strncmp(name, b"libcuda.so", 10) == 0


cdef void* anothers(const char* name, bint nvml) noexcept nogil:
    """The function that the program would have under that name without the hook, if not the driver's; else NULL."""
    cdef void* found
    if load32(&asked[nvml]) or attached():
        return NULL
    find_real_dlsym()
    found = vgpu_real_dlsym(RTLD_NEXT, name)
    return NULL if found == NULL or is_drivers(found, nvml) else found


cdef void ask_the_driver(bint nvml) noexcept nogil:
    """Its functions are used: from now on all wrappers call them."""
    cdef int i
    store32(&asked[nvml], 1)
    if not load32(&aside[nvml]):
        return
    for i in range(VGPU_SYMBOLS):
        if vgpu_symbols[i].nvml == nvml:
            vgpu_real[i] = NULL
    store32(&aside[nvml], 0)
    store32(&aliases_known, 0)


cdef public bint vgpu_stands_aside(bint nvml) noexcept nogil:
    """Whether the program has another library in the driver's place."""
    return anothers(b"nvmlDeviceGetCount_v2" if nvml else b"cuInit", nvml) != NULL


cdef void* bind(int symbol, bint load) noexcept nogil:
    cdef bint nvml = vgpu_symbols[symbol].nvml
    cdef void* handle
    cdef void* real = anothers(vgpu_symbols[symbol].name, nvml)
    if real != NULL:
        store32(&aside[nvml], 1)
        vgpu_real[symbol] = real
        return real
    handle = library(nvml, load)
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
    """The hook's wrapper of the driver's function at ``address``, or NULL."""
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


cdef inline int row_of(const char* name) noexcept nogil:
    if name != NULL and ((name[0] == c'c' and name[1] == c'u') or (name[0] == c'n' and name[1] == c'v')):
        return find(name)
    return -1


cdef void* door_to(int symbol, void* handle, void* found) noexcept nogil:
    """``found``: what that handle has under the name of a row; not for RTLD_DEFAULT and RTLD_NEXT."""
    cdef bint nvml = vgpu_symbols[symbol].nvml
    if not exists(symbol):
        return NULL
    if handle == RTLD_DEFAULT or handle == RTLD_NEXT:
        if handle == RTLD_NEXT and load32(&aside[nvml]):
            if library(nvml, 0) == NULL:
                return NULL
            ask_the_driver(nvml)     # by the library that stands before it
        return vgpu_symbols[symbol].wrapper
    if load32(&aside[nvml]) and found != NULL and is_drivers(found, nvml):
        ask_the_driver(nvml)
        exists(symbol)
    # a library that merely has a function of that name keeps it
    return vgpu_symbols[symbol].wrapper if found == vgpu_real[symbol] else NULL


cdef inline bint is_a_doors(const char* name) noexcept nogil:
    return name != NULL and name[0] == c'd' and (strcmp(name, b"dlsym") == 0 or strcmp(name, b"dlvsym") == 0)


cdef void* same_door(void* found) noexcept nogil:
    """A caller that asks the C library for its dlsym gets the hook's, which calls that."""
    if found != NULL and found == <void*>vgpu_real_dlsym:
        return <void*>vgpu_dlsym_new
    if found != NULL and found == vgpu_dlvsym(RTLD_NEXT, b"dlvsym", VGPU_OLD_GLIBC):
        return <void*>vgpu_dlvsym_new
    return NULL


cdef public void* vgpu_door(void* handle, const char* name) noexcept nogil:
    """What dlsym(handle, name) is to return, or NULL: jump to the real one."""
    cdef bint named = handle != RTLD_DEFAULT and handle != RTLD_NEXT
    cdef int symbol = row_of(name)
    find_real_dlsym()
    if symbol >= 0:
        return door_to(symbol, handle, vgpu_real_dlsym(handle, name) if named else NULL)
    return same_door(vgpu_real_dlsym(handle, name)) if named and is_a_doors(name) else NULL


cdef public void* vgpu_versioned_door(void* handle, const char* name, const char* version) noexcept nogil:
    """The same for dlvsym."""
    cdef bint named = handle != RTLD_DEFAULT and handle != RTLD_NEXT
    cdef int symbol = row_of(name)
    find_real_dlsym()
    if symbol >= 0:
        return door_to(symbol, handle, vgpu_dlvsym(handle, name, version) if named else NULL)
    return same_door(vgpu_dlvsym(handle, name, version)) if named and is_a_doors(name) else NULL


cdef void replace(void** pfn) noexcept nogil:
    cdef void* wrapper
    cdef int i
    if load32(&aside[0]) and is_drivers(pfn[0], 0):
        ask_the_driver(0)
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
