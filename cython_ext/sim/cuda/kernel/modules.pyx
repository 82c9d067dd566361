"""Modules, libraries and kernels: the PTX is read for names and parameters, its annotations for costs."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport FILE, fclose, fopen, fread, fseek, ftell
from libc.stdlib cimport calloc, free, malloc, strtoul
from libc.string cimport memcpy, strcmp, strlen, strncmp, strstr

from cython_ext.sim.cost cimport sim_annotation
from cython_ext.sim.cuda.driver cimport (
    Context, CUresult, FILE_NOT_FOUND, Function, INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE,
    MARK_FUNCTION, MARK_MODULE, Module, NOT_FOUND, OUT_OF_MEMORY, SUCCESS, drv_current_context, drv_lock,
    drv_ready, drv_unlock,
)

cdef enum:
    FATBIN_MAGIC = 0xba55ed50
    FATBIN_WRAPPER = 0x466243b1
    ELF_MAGIC = 0x464c457f
    ATTRIBUTE_MAX_THREADS = 0
    ATTRIBUTE_REGISTERS = 4
    ATTRIBUTE_PTX = 5
    ATTRIBUTE_BINARY = 6
    ATTRIBUTE_MAX_DYNAMIC_SHARED = 8
    ATTRIBUTE_CARVEOUT = 9
    ATTRIBUTES = 20


# -- reading PTX

cdef uint32_t type_bytes(const char* at) noexcept nogil:
    """Size of a PTX type such as .u64, .b8, .f32, .pred."""
    cdef const char* digits = at
    while digits[0] != 0 and not 48 <= digits[0] <= 57:
        digits += 1
    return <uint32_t>strtoul(digits, NULL, 10) / 8


cdef void read_parameter(Function* function, const char* at, const char* end) noexcept nogil:
    """One ``.param [.align N] .TYPE name[count]``."""
    cdef uint32_t size = 0, align = 0, offset = 0, count = 1
    cdef int n = function.parameters
    cdef const char* word = at
    if n == 64:
        return
    while word < end:
        if word[0] == 46 and strncmp(word, b".align", 6) == 0:
            align = <uint32_t>strtoul(word + 6, NULL, 10)
        elif word[0] == 46 and word[1] in (98, 102, 115, 117) and 48 <= word[2] <= 57:  # .b .f .s .u
            size = type_bytes(word)
        elif word[0] == 91:
            count = <uint32_t>strtoul(word + 1, NULL, 10)
        word += 1
    if align == 0:
        align = size if size else 1
    if n:
        offset = function.offset[n - 1] + function.size[n - 1]
    function.offset[n] = (offset + align - 1) / align * align
    function.size[n] = size * count
    function.parameters = n + 1


cdef Function* add_function(Module* module, const char* name, size_t length) noexcept nogil:
    cdef Function* function = <Function*>calloc(1, sizeof(Function))
    if function == NULL:
        return NULL
    function.mark = MARK_FUNCTION
    function.module = module
    memcpy(function.name, name, min(length, <size_t>255))
    function.hashes = strcmp(function.name, b"vgpu_hash_pieces") == 0
    function.attributes[ATTRIBUTE_MAX_THREADS] = 1024
    function.attributes[ATTRIBUTE_REGISTERS] = 32
    function.attributes[ATTRIBUTE_PTX] = 70
    function.attributes[ATTRIBUTE_BINARY] = 90
    function.attributes[ATTRIBUTE_MAX_DYNAMIC_SHARED] = 49152
    function.attributes[ATTRIBUTE_CARVEOUT] = -1
    if module.text != NULL:
        function.ns = sim_annotation(module.text, function.name, b"ns")
        function.sms = sim_annotation(module.text, function.name, b"sms")
        function.interval = sim_annotation(module.text, function.name, b"interval")
        function.fault = sim_annotation(module.text, function.name, b"fault")
    function.next = module.functions
    module.functions = function
    return function


cdef bint is_name(char c) noexcept nogil:
    return 48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122 or c in (36, 95)


cdef CUresult read_entries(Module* module) noexcept nogil:
    """Every ``.entry NAME ( parameters )``."""
    cdef const char* at = strstr(module.text, b".entry")
    cdef const char* name
    cdef const char* end
    cdef Function* function
    while at != NULL:
        name = at + 6
        while name[0] in (9, 10, 13, 32):
            name += 1
        end = name
        while is_name(end[0]):
            end += 1
        if end == name:
            return INVALID_PTX
        function = add_function(module, name, end - name)
        if function == NULL:
            return OUT_OF_MEMORY
        at = end
        while at[0] != 0 and at[0] not in (40, 123):
            at += 1
        while at[0] == 40 or at[0] == 44:
            end = at + 1
            while end[0] != 0 and end[0] not in (41, 44):
                end += 1
            if strstr(at, b".param") != NULL and strstr(at, b".param") < end:
                read_parameter(function, strstr(at, b".param") + 6, end)
            at = end
        at = strstr(at, b".entry")
    return SUCCESS


cdef CUresult load(const void* image, bint is_library, Module** out) noexcept nogil:
    """PTX is text that says .version; other images (cubin, fat binary) are taken as they are: every name is found
    in them, and their kernels cost what the grid suggests."""
    cdef const char* text = <const char*>image
    cdef uint32_t magic
    cdef Module* module
    cdef CUresult result = SUCCESS
    if image == NULL:
        return INVALID_VALUE
    memcpy(&magic, image, 4)
    module = <Module*>calloc(1, sizeof(Module))
    if module == NULL:
        return OUT_OF_MEMORY
    module.mark = MARK_MODULE
    module.is_library = is_library
    if magic not in (<uint32_t>FATBIN_MAGIC, <uint32_t>FATBIN_WRAPPER, <uint32_t>ELF_MAGIC):
        if strstr(text, b".version") == NULL or strstr(text, b".target") == NULL:
            result = INVALID_IMAGE
        else:
            module.text = <char*>malloc(strlen(text) + 1)
            memcpy(module.text, text, strlen(text) + 1)
            result = read_entries(module)
    if result == SUCCESS:
        out[0] = module
    else:
        unload(module)
    return result


cdef void unload(Module* module) noexcept nogil:
    cdef Function* function = module.functions
    cdef Function* following
    while function != NULL:
        following = function.next
        function.mark = 0
        free(function)
        function = following
    free(module.text)
    module.mark = 0
    free(module)


cdef CUresult load_file(const char* path, bint is_library, Module** out) noexcept nogil:
    cdef FILE* file = fopen(path, b"rb")
    cdef char* image
    cdef long size
    cdef CUresult result
    if file == NULL:
        return FILE_NOT_FOUND
    fseek(file, 0, 2)
    size = ftell(file)
    fseek(file, 0, 0)
    image = <char*>calloc(1, size + 4)
    fread(image, 1, size, file)
    fclose(file)
    result = load(image, is_library, out)
    free(image)
    return result


cdef CUresult find(Module* module, const char* name, Function** out) noexcept nogil:
    cdef Function* function
    if module == NULL or module.mark != MARK_MODULE:
        return INVALID_HANDLE
    if name == NULL:
        return INVALID_VALUE
    drv_lock()
    function = module.functions
    while function != NULL and strcmp(function.name, name) != 0:
        function = function.next
    if function == NULL and module.text == NULL:
        function = add_function(module, name, strlen(name))
    drv_unlock()
    out[0] = function
    return SUCCESS if function != NULL else NOT_FOUND


# -- modules

cdef public CUresult cuModuleLoadData(Module** out, const void* image) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    return load(image, False, out) if result == SUCCESS else result


cdef public CUresult cuModuleLoadDataEx(Module** out, const void* image, unsigned int count, int* options,
                                        void** values) noexcept nogil:
    return cuModuleLoadData(out, image)


cdef public CUresult cuModuleLoadFatBinary(Module** out, const void* image) noexcept nogil:
    return cuModuleLoadData(out, image)


cdef public CUresult cuModuleLoad(Module** out, const char* path) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    return load_file(path, False, out) if result == SUCCESS else result


cdef public CUresult cuModuleUnload(Module* module) noexcept nogil:
    if module == NULL or module.mark != MARK_MODULE:
        return INVALID_HANDLE
    unload(module)
    return SUCCESS


cdef public CUresult cuModuleGetFunction(Function** out, Module* module, const char* name) noexcept nogil:
    return find(module, name, out)


cdef public CUresult cuModuleGetFunctionCount(unsigned int* count, Module* module) noexcept nogil:
    return cuLibraryGetKernelCount(count, module)


cdef public CUresult cuModuleGetLoadingMode(int* mode) noexcept nogil:
    mode[0] = 2  # lazy
    return SUCCESS


cdef public CUresult cuModuleGetGlobal_v2(uint64_t* address, size_t* size, Module* module,
                                          const char* name) noexcept nogil:
    return NOT_FOUND


# -- libraries (modules without a context)

cdef public CUresult cuLibraryLoadData(Module** out, const void* code, int* jit, void** jit_values,
                                       unsigned int jits, int* options, void** values,
                                       unsigned int count) noexcept nogil:
    cdef CUresult result = drv_ready()
    return load(code, True, out) if result == SUCCESS else result


cdef public CUresult cuLibraryLoadFromFile(Module** out, const char* path, int* jit, void** jit_values,
                                           unsigned int jits, int* options, void** values,
                                           unsigned int count) noexcept nogil:
    cdef CUresult result = drv_ready()
    return load_file(path, True, out) if result == SUCCESS else result


cdef public CUresult cuLibraryUnload(Module* library) noexcept nogil:
    return cuModuleUnload(library)


cdef public CUresult cuLibraryGetKernel(Function** out, Module* library, const char* name) noexcept nogil:
    return find(library, name, out)


cdef public CUresult cuLibraryGetModule(Module** out, Module* library) noexcept nogil:
    out[0] = library
    return SUCCESS if library != NULL and library.mark == MARK_MODULE else INVALID_HANDLE


cdef public CUresult cuLibraryGetKernelCount(unsigned int* count, Module* library) noexcept nogil:
    cdef Function* function
    if library == NULL or library.mark != MARK_MODULE:
        return INVALID_HANDLE
    count[0] = 0
    function = library.functions
    while function != NULL:
        count[0] += 1
        function = function.next
    return SUCCESS


cdef public CUresult cuLibraryEnumerateKernels(Function** out, unsigned int count, Module* library) noexcept nogil:
    cdef Function* function
    cdef unsigned int i
    if library == NULL or library.mark != MARK_MODULE:
        return INVALID_HANDLE
    function = library.functions
    for i in range(count):
        if function == NULL:
            break
        out[i] = function
        function = function.next
    return SUCCESS


cdef public CUresult cuLibraryGetGlobal(uint64_t* address, size_t* size, Module* library,
                                        const char* name) noexcept nogil:
    return NOT_FOUND


cdef public CUresult cuLibraryGetManaged(uint64_t* address, size_t* size, Module* library,
                                         const char* name) noexcept nogil:
    return NOT_FOUND


# -- functions and kernels (one object serves as both)

cdef CUresult check(Function* function) noexcept nogil:
    return SUCCESS if function != NULL and function.mark == MARK_FUNCTION else INVALID_HANDLE


cdef public CUresult cuKernelGetFunction(Function** out, Function* kernel) noexcept nogil:
    out[0] = kernel
    return check(kernel)


cdef public CUresult cuKernelGetLibrary(Module** out, Function* kernel) noexcept nogil:
    cdef CUresult result = check(kernel)
    if result == SUCCESS:
        out[0] = kernel.module
    return result


cdef public CUresult cuFuncGetModule(Module** out, Function* function) noexcept nogil:
    return cuKernelGetLibrary(out, function)


cdef public CUresult cuFuncGetName(const char** name, Function* function) noexcept nogil:
    cdef CUresult result = check(function)
    if result == SUCCESS:
        name[0] = function.name
    return result


cdef public CUresult cuKernelGetName(const char** name, Function* kernel) noexcept nogil:
    return cuFuncGetName(name, kernel)


cdef public CUresult cuFuncIsLoaded(int* state, Function* function) noexcept nogil:
    state[0] = 1
    return check(function)


cdef public CUresult cuFuncLoad(Function* function) noexcept nogil:
    return check(function)


cdef public CUresult cuFuncGetParamInfo(Function* function, size_t index, size_t* offset,
                                        size_t* size) noexcept nogil:
    cdef CUresult result = check(function)
    if result == SUCCESS and index >= <size_t>function.parameters:
        result = INVALID_VALUE
    if result == SUCCESS:
        offset[0] = function.offset[index]
        if size != NULL:
            size[0] = function.size[index]
    return result


cdef public CUresult cuKernelGetParamInfo(Function* kernel, size_t index, size_t* offset,
                                          size_t* size) noexcept nogil:
    return cuFuncGetParamInfo(kernel, index, offset, size)


cdef public CUresult cuFuncGetAttribute(int* value, int attribute, Function* function) noexcept nogil:
    cdef CUresult result = check(function)
    if result == SUCCESS and not 0 <= attribute < ATTRIBUTES:
        result = INVALID_VALUE
    if result == SUCCESS:
        value[0] = function.attributes[attribute]
    return result


cdef public CUresult cuFuncSetAttribute(Function* function, int attribute, int value) noexcept nogil:
    cdef CUresult result = check(function)
    if result == SUCCESS and not ATTRIBUTE_MAX_DYNAMIC_SHARED <= attribute < ATTRIBUTES:
        result = INVALID_VALUE
    if result == SUCCESS and attribute == ATTRIBUTE_MAX_DYNAMIC_SHARED and value > 232448:
        result = INVALID_VALUE
    if result == SUCCESS:
        function.attributes[attribute] = value
    return result


cdef public CUresult cuKernelGetAttribute(int* value, int attribute, Function* kernel, int device) noexcept nogil:
    return cuFuncGetAttribute(value, attribute, kernel)


cdef public CUresult cuKernelSetAttribute(int attribute, int value, Function* kernel, int device) noexcept nogil:
    return cuFuncSetAttribute(kernel, attribute, value)


cdef public CUresult cuFuncSetCacheConfig(Function* function, int config) noexcept nogil:
    return check(function)


cdef public CUresult cuKernelSetCacheConfig(Function* kernel, int config, int device) noexcept nogil:
    return check(kernel)


# -- occupancy

cdef int resident_blocks(Function* function, int threads, size_t shared_bytes) noexcept nogil:
    """Blocks of `threads` that one SM of Hopper's size holds: by threads, blocks and shared memory."""
    cdef int blocks = 2048 / ((threads + 31) / 32 * 32) if threads > 0 else 0
    if shared_bytes > 0:
        blocks = min(blocks, <int>(233472 / (shared_bytes + 1024)))
    return min(blocks, 32)


cdef public CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        int* blocks, Function* function, int threads, size_t shared_bytes, unsigned int flags) noexcept nogil:
    cdef CUresult result = check(function)
    if result == SUCCESS:
        blocks[0] = resident_blocks(function, threads, shared_bytes)
    return result


cdef public CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
        int* blocks, Function* function, int threads, size_t shared_bytes) noexcept nogil:
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0)


ctypedef public size_t (*SharedBytesOf)(int threads) noexcept nogil


cdef public CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(
        int* grid, int* threads, Function* function, SharedBytesOf shared_of, size_t shared_bytes, int limit,
        unsigned int flags) noexcept nogil:
    cdef Context* context
    cdef CUresult result = drv_current_context(&context)
    if result == SUCCESS:
        result = check(function)
    if result != SUCCESS:
        return result
    threads[0] = min(1024, limit) if limit > 0 else 1024
    if shared_of != NULL:
        shared_bytes = shared_of(threads[0])
    grid[0] = resident_blocks(function, threads[0], shared_bytes) * <int>context.gpu.sms
    return SUCCESS


cdef public CUresult cuOccupancyMaxPotentialBlockSize(
        int* grid, int* threads, Function* function, SharedBytesOf shared_of, size_t shared_bytes,
        int limit) noexcept nogil:
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, threads, function, shared_of, shared_bytes, limit, 0)


cdef public CUresult cuOccupancyAvailableDynamicSMemPerBlock(
        size_t* shared_bytes, Function* function, int blocks, int threads) noexcept nogil:
    shared_bytes[0] = 233472 / max(blocks, 1) - 1024
    return check(function)


cdef public CUresult cuOccupancyMaxActiveClusters(int* clusters, Function* function, void* config) noexcept nogil:
    clusters[0] = 16
    return check(function)
