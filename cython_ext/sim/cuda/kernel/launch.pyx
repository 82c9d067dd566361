"""Launching kernels: parameters are read as the driver reads them, the cost model makes of them a duration.

Where ``VGPU_SIM_HASHES`` is ``zeros``, the hook's kernel for hashes takes all pieces for zeros; where it is ``same``,
for the same. Where it is a number, the kernel cannot be launched more often.
"""

from libc.math cimport ceil
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport getenv, strtoul
from libc.string cimport memcpy, memset, strcmp

from cython_ext.logic.memory.piece_hash cimport PieceHash, piece_hash
from cython_ext.logic.memory.pieces cimport PIECE_BYTES
from cython_ext.sim.cost cimport SimTerms, sim_evaluate
from cython_ext.sim.cuda.driver cimport (
    COOPERATIVE_LAUNCH_TOO_LARGE, Context, CUresult, EFFECT_HOST, EFFECT_INTERVAL, Function, INVALID_HANDLE,
    INVALID_VALUE, MARK_FUNCTION, SUCCESS, Stream, Work, drv_current, drv_stream, drv_submit, drv_touch,
)
from cython_ext.sim.state cimport OP_EXTERNAL, OP_KERNEL

cdef extern CUresult cuCtxSetCurrent(Context* context) noexcept nogil

cdef enum:
    LAUNCH_BUFFER = 1
    LAUNCH_BUFFER_SIZE = 2
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_ATTRIBUTE_COOPERATIVE = 2
    KERNEL_NS = 2000            # the least a kernel takes
    WAVE_NS = 5000              # one wave of blocks of a kernel without a length of its own
    BLOCKS_PER_SM = 8

cdef public struct LaunchAttribute:
    int name
    int padding
    unsigned char value[64]

cdef public struct LaunchConfig:
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared_bytes
    void* stream
    LaunchAttribute* attributes
    unsigned int count


cdef void read_parameters(Function* function, void** parameters, void** extra, SimTerms* terms,
                          Work* work) noexcept nogil:
    """Integer values of up to 16 parameters, from an array of pointers or from one packed buffer."""
    cdef const char* buffer = NULL
    cdef const char* at
    cdef int i
    if parameters == NULL and extra != NULL:
        i = 0
        while extra[i] != NULL:
            if <uint64_t>extra[i] == LAUNCH_BUFFER:
                buffer = <const char*>extra[i + 1]
            i += 2
    terms.parameters = 0
    for i in range(min(function.parameters, 16)):
        if parameters != NULL:
            at = <const char*>parameters[i]
        elif buffer != NULL:
            at = buffer + function.offset[i]
        else:
            return
        terms.parameter[i] = 0
        memcpy(&terms.parameter[i], at, min(function.size[i], <uint32_t>8))
        terms.parameters = i + 1
        if function.size[i] == 8:
            drv_touch(&work.effect, terms.parameter[i])


cdef public CUresult drv_price_kernel(Function* function, const unsigned int* grid, const unsigned int* block,
                                      unsigned int shared_bytes, void** parameters, void** extra, Stream* stream,
                                      Work* work) noexcept nogil:
    """Make a launch into a piece of work, or return its error."""
    cdef SimTerms terms
    cdef double value
    cdef uint64_t blocks = <uint64_t>grid[0] * grid[1] * grid[2]
    cdef uint64_t threads = <uint64_t>block[0] * block[1] * block[2]
    if function == NULL or function.mark != MARK_FUNCTION:
        return INVALID_HANDLE
    if blocks == 0 or not 0 < threads <= 1024 or (parameters != NULL and extra != NULL):
        return INVALID_VALUE
    if function.parameters and parameters == NULL and extra == NULL:
        return INVALID_VALUE
    if grid[1] > 65535 or grid[2] > 65535 or shared_bytes > <unsigned int>function.attributes[8]:
        return INVALID_VALUE
    memset(work, 0, sizeof(Work))
    work.kind = OP_KERNEL
    work.function = function
    memcpy(work.grid, grid, 12)
    memcpy(work.block, block, 12)
    work.shared_bytes = shared_bytes
    terms.blocks = blocks
    terms.threads = threads
    terms.sms = stream.gpu.sms
    read_parameters(function, parameters, extra, &terms, work)
    work.sms = <uint32_t>min(terms.sms, terms.blocks)
    work.ns = KERNEL_NS + WAVE_NS * ceil(terms.blocks / (terms.sms * BLOCKS_PER_SM))
    if function.sms != NULL and sim_evaluate(function.sms, &terms, &value):
        work.sms = <uint32_t>min(terms.sms, max(1., value))
    if function.ns != NULL and sim_evaluate(function.ns, &terms, &value):
        work.ns = max(1., value)
    if function.interval != NULL and sim_evaluate(function.interval, &terms, &value) and value > 0:
        work.effect.kind = EFFECT_INTERVAL
        work.effect.address = <uint64_t>value
    if function.fault != NULL and sim_evaluate(function.fault, &terms, &value) and value > 0:
        work.failed = <uint32_t>value
    return SUCCESS


cdef unsigned long hash_launches = 0     # by this process


cdef CUresult hash_pieces(void** parameters, unsigned int blocks) noexcept nogil:
    """At once: the hook launches it while nothing else uses the memory. ``VGPU_SIM_HASHES`` says what fails."""
    global hash_launches
    cdef PieceHash* results = (<PieceHash**>parameters[0])[0]
    cdef const uint64_t** addresses = <const uint64_t**>parameters[1]
    cdef const char* fault = getenv(b"VGPU_SIM_HASHES")
    cdef bint zeros = fault != NULL and strcmp(fault, b"zeros") == 0
    cdef bint same = fault != NULL and strcmp(fault, b"same") == 0
    cdef unsigned int i
    hash_launches += 1
    if fault != NULL and not (zeros or same) and hash_launches > strtoul(fault, NULL, 10):
        return LAUNCH_OUT_OF_RESOURCES
    for i in range(blocks):
        results[i] = piece_hash(addresses[i], PIECE_BYTES / sizeof(uint64_t))
        if zeros:
            results[i].parts = 0
        if same:
            results[i].a = results[i].b = 7
    return SUCCESS


cdef CUresult launch(Function* function, unsigned int* grid, unsigned int* block, unsigned int shared_bytes,
                     void* handle, void** parameters, void** extra) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result = drv_stream(handle, &stream)
    if result == SUCCESS:
        result = drv_price_kernel(function, grid, block, shared_bytes, parameters, extra, stream, &work)
    if result == SUCCESS and function.hashes and parameters != NULL:
        result = hash_pieces(parameters, grid[0])
    return drv_submit(stream, &work) if result == SUCCESS else result


cdef public CUresult cuLaunchKernel(Function* function, unsigned int gx, unsigned int gy, unsigned int gz,
                                    unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared_bytes,
                                    void* stream, void** parameters, void** extra) noexcept nogil:
    cdef unsigned int[3] grid
    cdef unsigned int[3] block
    grid[0] = gx
    grid[1] = gy
    grid[2] = gz
    block[0] = bx
    block[1] = by
    block[2] = bz
    return launch(function, grid, block, shared_bytes, stream, parameters, extra)


cdef public CUresult cuLaunchCooperativeKernel(Function* function, unsigned int gx, unsigned int gy,
                                               unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                                               unsigned int shared_bytes, void* handle,
                                               void** parameters) noexcept nogil:
    cdef Stream* stream
    cdef uint64_t threads = <uint64_t>bx * by * bz
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    # All blocks of a cooperative grid are resident at once.
    if 0 < threads <= 1024 and <uint64_t>gx * gy * gz > <uint64_t>stream.gpu.sms * (2048 / threads):
        return COOPERATIVE_LAUNCH_TOO_LARGE
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, handle, parameters, NULL)


cdef public CUresult cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** parameters,
                                      void** extra) noexcept nogil:
    cdef unsigned int i
    cdef LaunchConfig c
    if config == NULL:
        return INVALID_VALUE
    c = config[0]
    for i in range(c.count):
        if c.attributes[i].name == LAUNCH_ATTRIBUTE_COOPERATIVE and c.attributes[i].value[0]:
            return cuLaunchCooperativeKernel(function, c.grid[0], c.grid[1], c.grid[2], c.block[0], c.block[1],
                                             c.block[2], c.shared_bytes, c.stream, parameters)
    return launch(function, c.grid, c.block, c.shared_bytes, c.stream, parameters, extra)


cdef public CUresult cuLaunchKernelEx_ptsz(const LaunchConfig* config, Function* function, void** parameters,
                                           void** extra) noexcept nogil:
    cdef LaunchConfig own
    if config == NULL:
        return INVALID_VALUE
    own = config[0]
    if own.stream == NULL:
        own.stream = <void*>2
    return cuLaunchKernelEx(&own, function, parameters, extra)


cdef public struct LaunchParams:
    Function* function
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared_bytes
    void* stream
    void** parameters


cdef public CUresult cuLaunchCooperativeKernelMultiDevice(LaunchParams* launches, unsigned int count,
                                                          unsigned int flags) noexcept nogil:
    """One on each device, in a stream of it; that they run at the same time is not modelled."""
    cdef CUresult result = INVALID_VALUE
    cdef Context* before = drv_current()
    cdef Stream* stream
    cdef unsigned int i
    for i in range(count):
        if <uint64_t>launches[i].stream <= 2:
            return INVALID_HANDLE
    for i in range(count):
        cuCtxSetCurrent((<Stream*>launches[i].stream).context)
        result = drv_stream(launches[i].stream, &stream)
        if result == SUCCESS:
            result = cuLaunchCooperativeKernel(
                launches[i].function, launches[i].grid[0], launches[i].grid[1], launches[i].grid[2],
                launches[i].block[0], launches[i].block[1], launches[i].block[2], launches[i].shared_bytes,
                launches[i].stream, launches[i].parameters)
        if result != SUCCESS:
            break
    cuCtxSetCurrent(before)
    return result


cdef CUresult launch_host(void* handle, void* function, void* user, bint callback) noexcept nogil:
    cdef Stream* stream
    cdef Work work
    cdef CUresult result = drv_stream(handle, &stream)
    if result != SUCCESS:
        return result
    if function == NULL:
        return INVALID_VALUE
    memset(&work, 0, sizeof(Work))
    work.kind = OP_EXTERNAL
    work.effect.kind = EFFECT_HOST
    work.effect.function = function
    work.effect.address = <uint64_t>user
    work.effect.flags = callback
    work.effect.value = <uint64_t>handle
    return drv_submit(stream, &work)


cdef public CUresult cuLaunchHostFunc(void* stream, void* function, void* user) noexcept nogil:
    return launch_host(stream, function, user, False)


cdef public CUresult cuStreamAddCallback(void* stream, void* function, void* user, unsigned int flags) noexcept nogil:
    return launch_host(stream, function, user, True)
