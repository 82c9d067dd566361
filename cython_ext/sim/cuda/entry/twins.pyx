"""The twins of all stream functions for programs compiled with per-thread default streams, but for those of arrays and
batches, which stand there.

In a twin, NULL means the calling thread's own stream instead of the legacy one. ``_ptsz`` twins take a stream,
``_ptds`` twins are synchronous and use the thread's own.
"""

from libc.stdint cimport uint32_t, uint64_t

from cython_ext.sim.cuda.driver cimport CUresult, SUCCESS

cdef enum:
    PER_THREAD = 2

cdef extern CUresult cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyPeerAsync(
        uint64_t target, void* target_context, uint64_t source, void* source_context, size_t size,
        void* stream) noexcept nogil
cdef extern CUresult cuMemcpyHtoDAsync_v2(uint64_t target, void* source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyDtoHAsync_v2(void* target, uint64_t source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemcpy2DAsync_v2(void* c, void* stream) noexcept nogil
cdef extern CUresult cuMemcpy3DAsync_v2(void* c, void* stream) noexcept nogil
cdef extern CUresult cuMemcpy3DPeerAsync(void* c, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyBatchAsync(
        void* targets, void* sources, void* sizes, size_t count, void* attributes, void* indices, size_t kinds,
        void* failed, void* stream) noexcept nogil
cdef extern CUresult cuMemcpyBatchAsync_v2(
        void* targets, void* sources, void* sizes, size_t count, void* attributes, void* indices, size_t kinds,
        void* stream) noexcept nogil
cdef extern CUresult cuMemsetD8Async(uint64_t target, unsigned char value, size_t count, void* stream) noexcept nogil
cdef extern CUresult cuMemsetD16Async(
        uint64_t target, unsigned short value, size_t count, void* stream) noexcept nogil
cdef extern CUresult cuMemsetD32Async(uint64_t target, unsigned int value, size_t count, void* stream) noexcept nogil
cdef extern CUresult cuMemsetD2D8Async(
        uint64_t target, size_t pitch, unsigned char value, size_t width, size_t height, void* stream) noexcept nogil
cdef extern CUresult cuMemsetD2D16Async(
        uint64_t target, size_t pitch, unsigned short value, size_t width, size_t height, void* stream) noexcept nogil
cdef extern CUresult cuMemsetD2D32Async(
        uint64_t target, size_t pitch, unsigned int value, size_t width, size_t height, void* stream) noexcept nogil
cdef extern CUresult cuStreamGetPriority(void* handle, void* priority) noexcept nogil
cdef extern CUresult cuStreamGetId(void* handle, void* number) noexcept nogil
cdef extern CUresult cuStreamGetFlags(void* handle, void* flags) noexcept nogil
cdef extern CUresult cuStreamGetDevice(void* handle, void* device) noexcept nogil
cdef extern CUresult cuStreamGetCtx(void* handle, void* context) noexcept nogil
cdef extern CUresult cuStreamGetCtx_v2(void* handle, void* context, void* green) noexcept nogil
cdef extern CUresult cuStreamWaitEvent(void* handle, void* event, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamAttachMemAsync(
        void* stream, uint64_t address, size_t size, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamQuery(void* handle) noexcept nogil
cdef extern CUresult cuStreamSynchronize(void* handle) noexcept nogil
cdef extern CUresult cuEventRecord(void* event, void* handle) noexcept nogil
cdef extern CUresult cuEventRecordWithFlags(void* event, void* handle, unsigned int flags) noexcept nogil
cdef extern CUresult cuLaunchKernel(
        void* function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
        unsigned int bz, unsigned int shared_bytes, void* stream, void* parameters, void* extra) noexcept nogil
cdef extern CUresult cuLaunchHostFunc(void* stream, void* function, void* user) noexcept nogil
cdef extern CUresult cuStreamWriteValue32_v2(
        void* stream, uint64_t address, uint32_t value, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamWaitValue32_v2(
        void* stream, uint64_t address, uint32_t value, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamWriteValue64_v2(
        void* stream, uint64_t address, uint64_t value, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamWaitValue64_v2(
        void* stream, uint64_t address, uint64_t value, unsigned int flags) noexcept nogil
cdef extern CUresult cuMemPrefetchAsync(uint64_t address, size_t size, int device, void* stream) noexcept nogil
cdef extern CUresult cuMemPrefetchAsync_v2(
        uint64_t address, size_t size, uint64_t where, unsigned int flags, void* stream) noexcept nogil
cdef extern CUresult cuLaunchCooperativeKernel(
        void* function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
        unsigned int bz, unsigned int shared_bytes, void* handle, void* parameters) noexcept nogil
cdef extern CUresult cuStreamBeginCapture(void* stream) noexcept nogil
cdef extern CUresult cuStreamBeginCapture_v2(void* stream, int mode) noexcept nogil
cdef extern CUresult cuStreamBeginCaptureToGraph(
        void* stream, void* graph, void* dependencies, void* edges, size_t count, int mode) noexcept nogil
cdef extern CUresult cuStreamEndCapture(void* handle, void* out) noexcept nogil
cdef extern CUresult cuStreamIsCapturing(void* handle, void* status) noexcept nogil
cdef extern CUresult cuStreamGetCaptureInfo(void* stream, void* status, void* number) noexcept nogil
cdef extern CUresult cuStreamGetCaptureInfo_v2(
        void* handle, void* status, void* number, void* graph, void* dependencies, void* count) noexcept nogil
cdef extern CUresult cuStreamGetCaptureInfo_v3(
        void* stream, void* status, void* number, void* graph, void* dependencies, void* edges,
        void* count) noexcept nogil
cdef extern CUresult cuStreamUpdateCaptureDependencies(
        void* handle, void* dependencies, size_t count, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamUpdateCaptureDependencies_v2(
        void* handle, void* dependencies, void* edges, size_t count, unsigned int flags) noexcept nogil
cdef extern CUresult cuGraphInstantiateWithParams(void* out, void* graph, void* p) noexcept nogil
cdef extern CUresult cuGraphUpload(void* executable, void* stream) noexcept nogil
cdef extern CUresult cuGraphLaunch(void* executable, void* handle) noexcept nogil
cdef extern CUresult cuMemAllocAsync(void* address, size_t size, void* stream) noexcept nogil
cdef extern CUresult cuMemAllocFromPoolAsync(void* address, size_t size, void* pool, void* stream) noexcept nogil
cdef extern CUresult cuMemFreeAsync(uint64_t address, void* handle) noexcept nogil
cdef extern CUresult cuStreamAddCallback(void* stream, void* function, void* user, unsigned int flags) noexcept nogil
cdef extern CUresult cuStreamBatchMemOp_v2(
        void* stream, unsigned int count, void* operations, unsigned int flags) noexcept nogil


cdef void* own(void* stream) noexcept nogil:
    return <void*>PER_THREAD if stream == NULL else stream


cdef CUresult finish(CUresult result) noexcept nogil:
    return cuStreamSynchronize(<void*>PER_THREAD) if result == SUCCESS else result


cdef public CUresult cuMemcpyAsync_ptsz(uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil:
    return cuMemcpyAsync(target, source, size, own(stream))


cdef public CUresult cuMemcpyPeerAsync_ptsz(
        uint64_t target, void* target_context, uint64_t source, void* source_context, size_t size,
        void* stream) noexcept nogil:
    return cuMemcpyPeerAsync(target, target_context, source, source_context, size, own(stream))


cdef public CUresult cuMemcpyHtoDAsync_v2_ptsz(
        uint64_t target, void* source, size_t size, void* stream) noexcept nogil:
    return cuMemcpyHtoDAsync_v2(target, source, size, own(stream))


cdef public CUresult cuMemcpyDtoHAsync_v2_ptsz(
        void* target, uint64_t source, size_t size, void* stream) noexcept nogil:
    return cuMemcpyDtoHAsync_v2(target, source, size, own(stream))


cdef public CUresult cuMemcpyDtoDAsync_v2_ptsz(
        uint64_t target, uint64_t source, size_t size, void* stream) noexcept nogil:
    return cuMemcpyDtoDAsync_v2(target, source, size, own(stream))


cdef public CUresult cuMemcpy2DAsync_v2_ptsz(void* c, void* stream) noexcept nogil:
    return cuMemcpy2DAsync_v2(c, own(stream))


cdef public CUresult cuMemcpy3DAsync_v2_ptsz(void* c, void* stream) noexcept nogil:
    return cuMemcpy3DAsync_v2(c, own(stream))


cdef public CUresult cuMemcpy3DPeerAsync_ptsz(void* c, void* stream) noexcept nogil:
    return cuMemcpy3DPeerAsync(c, own(stream))


cdef public CUresult cuMemcpyBatchAsync_ptsz(
        void* targets, void* sources, void* sizes, size_t count, void* attributes, void* indices, size_t kinds,
        void* failed, void* stream) noexcept nogil:
    return cuMemcpyBatchAsync(targets, sources, sizes, count, attributes, indices, kinds, failed, own(stream))


cdef public CUresult cuMemcpyBatchAsync_v2_ptsz(
        void* targets, void* sources, void* sizes, size_t count, void* attributes, void* indices, size_t kinds,
        void* stream) noexcept nogil:
    return cuMemcpyBatchAsync_v2(targets, sources, sizes, count, attributes, indices, kinds, own(stream))


cdef public CUresult cuMemsetD8Async_ptsz(
        uint64_t target, unsigned char value, size_t count, void* stream) noexcept nogil:
    return cuMemsetD8Async(target, value, count, own(stream))


cdef public CUresult cuMemsetD16Async_ptsz(
        uint64_t target, unsigned short value, size_t count, void* stream) noexcept nogil:
    return cuMemsetD16Async(target, value, count, own(stream))


cdef public CUresult cuMemsetD32Async_ptsz(
        uint64_t target, unsigned int value, size_t count, void* stream) noexcept nogil:
    return cuMemsetD32Async(target, value, count, own(stream))


cdef public CUresult cuMemsetD2D8Async_ptsz(
        uint64_t target, size_t pitch, unsigned char value, size_t width, size_t height, void* stream) noexcept nogil:
    return cuMemsetD2D8Async(target, pitch, value, width, height, own(stream))


cdef public CUresult cuMemsetD2D16Async_ptsz(
        uint64_t target, size_t pitch, unsigned short value, size_t width, size_t height, void* stream) noexcept nogil:
    return cuMemsetD2D16Async(target, pitch, value, width, height, own(stream))


cdef public CUresult cuMemsetD2D32Async_ptsz(
        uint64_t target, size_t pitch, unsigned int value, size_t width, size_t height, void* stream) noexcept nogil:
    return cuMemsetD2D32Async(target, pitch, value, width, height, own(stream))


cdef public CUresult cuStreamGetPriority_ptsz(void* stream, void* priority) noexcept nogil:
    return cuStreamGetPriority(own(stream), priority)


cdef public CUresult cuStreamGetId_ptsz(void* stream, void* number) noexcept nogil:
    return cuStreamGetId(own(stream), number)


cdef public CUresult cuStreamGetFlags_ptsz(void* stream, void* flags) noexcept nogil:
    return cuStreamGetFlags(own(stream), flags)


cdef public CUresult cuStreamGetDevice_ptsz(void* stream, void* device) noexcept nogil:
    return cuStreamGetDevice(own(stream), device)


cdef public CUresult cuStreamGetCtx_ptsz(void* stream, void* context) noexcept nogil:
    return cuStreamGetCtx(own(stream), context)


cdef public CUresult cuStreamGetCtx_v2_ptsz(void* stream, void* context, void* green) noexcept nogil:
    return cuStreamGetCtx_v2(own(stream), context, green)


cdef public CUresult cuStreamWaitEvent_ptsz(void* stream, void* event, unsigned int flags) noexcept nogil:
    return cuStreamWaitEvent(own(stream), event, flags)


cdef public CUresult cuStreamAttachMemAsync_ptsz(
        void* stream, uint64_t address, size_t size, unsigned int flags) noexcept nogil:
    return cuStreamAttachMemAsync(own(stream), address, size, flags)


cdef public CUresult cuStreamQuery_ptsz(void* stream) noexcept nogil:
    return cuStreamQuery(own(stream))


cdef public CUresult cuStreamSynchronize_ptsz(void* stream) noexcept nogil:
    return cuStreamSynchronize(own(stream))


cdef public CUresult cuEventRecord_ptsz(void* event, void* stream) noexcept nogil:
    return cuEventRecord(event, own(stream))


cdef public CUresult cuEventRecordWithFlags_ptsz(void* event, void* stream, unsigned int flags) noexcept nogil:
    return cuEventRecordWithFlags(event, own(stream), flags)


cdef public CUresult cuLaunchKernel_ptsz(
        void* function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
        unsigned int bz, unsigned int shared_bytes, void* stream, void* parameters, void* extra) noexcept nogil:
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, own(stream), parameters, extra)


cdef public CUresult cuLaunchHostFunc_ptsz(void* stream, void* function, void* user) noexcept nogil:
    return cuLaunchHostFunc(own(stream), function, user)


cdef public CUresult cuStreamWriteValue32_v2_ptsz(
        void* stream, uint64_t address, uint32_t value, unsigned int flags) noexcept nogil:
    return cuStreamWriteValue32_v2(own(stream), address, value, flags)


cdef public CUresult cuStreamWaitValue32_v2_ptsz(
        void* stream, uint64_t address, uint32_t value, unsigned int flags) noexcept nogil:
    return cuStreamWaitValue32_v2(own(stream), address, value, flags)


cdef public CUresult cuStreamWriteValue64_v2_ptsz(
        void* stream, uint64_t address, uint64_t value, unsigned int flags) noexcept nogil:
    return cuStreamWriteValue64_v2(own(stream), address, value, flags)


cdef public CUresult cuStreamWaitValue64_v2_ptsz(
        void* stream, uint64_t address, uint64_t value, unsigned int flags) noexcept nogil:
    return cuStreamWaitValue64_v2(own(stream), address, value, flags)


cdef public CUresult cuMemPrefetchAsync_ptsz(uint64_t address, size_t size, int device, void* stream) noexcept nogil:
    return cuMemPrefetchAsync(address, size, device, own(stream))


cdef public CUresult cuMemPrefetchAsync_v2_ptsz(
        uint64_t address, size_t size, uint64_t where, unsigned int flags, void* stream) noexcept nogil:
    return cuMemPrefetchAsync_v2(address, size, where, flags, own(stream))


cdef public CUresult cuLaunchCooperativeKernel_ptsz(
        void* function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
        unsigned int bz, unsigned int shared_bytes, void* stream, void* parameters) noexcept nogil:
    return cuLaunchCooperativeKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, own(stream), parameters)


cdef public CUresult cuStreamBeginCapture_ptsz(void* stream) noexcept nogil:
    return cuStreamBeginCapture(own(stream))


cdef public CUresult cuStreamBeginCapture_v2_ptsz(void* stream, int mode) noexcept nogil:
    return cuStreamBeginCapture_v2(own(stream), mode)


cdef public CUresult cuStreamBeginCaptureToGraph_ptsz(
        void* stream, void* graph, void* dependencies, void* edges, size_t count, int mode) noexcept nogil:
    return cuStreamBeginCaptureToGraph(own(stream), graph, dependencies, edges, count, mode)


cdef public CUresult cuStreamEndCapture_ptsz(void* stream, void* out) noexcept nogil:
    return cuStreamEndCapture(own(stream), out)


cdef public CUresult cuStreamIsCapturing_ptsz(void* stream, void* status) noexcept nogil:
    return cuStreamIsCapturing(own(stream), status)


cdef public CUresult cuStreamGetCaptureInfo_ptsz(void* stream, void* status, void* number) noexcept nogil:
    return cuStreamGetCaptureInfo(own(stream), status, number)


cdef public CUresult cuStreamGetCaptureInfo_v2_ptsz(
        void* stream, void* status, void* number, void* graph, void* dependencies, void* count) noexcept nogil:
    return cuStreamGetCaptureInfo_v2(own(stream), status, number, graph, dependencies, count)


cdef public CUresult cuStreamGetCaptureInfo_v3_ptsz(
        void* stream, void* status, void* number, void* graph, void* dependencies, void* edges,
        void* count) noexcept nogil:
    return cuStreamGetCaptureInfo_v3(own(stream), status, number, graph, dependencies, edges, count)


cdef public CUresult cuStreamUpdateCaptureDependencies_ptsz(
        void* stream, void* dependencies, size_t count, unsigned int flags) noexcept nogil:
    return cuStreamUpdateCaptureDependencies(own(stream), dependencies, count, flags)


cdef public CUresult cuStreamUpdateCaptureDependencies_v2_ptsz(
        void* stream, void* dependencies, void* edges, size_t count, unsigned int flags) noexcept nogil:
    return cuStreamUpdateCaptureDependencies_v2(own(stream), dependencies, edges, count, flags)


cdef public CUresult cuGraphInstantiateWithParams_ptsz(void* out, void* graph, void* p) noexcept nogil:
    return cuGraphInstantiateWithParams(out, graph, p)


cdef public CUresult cuGraphUpload_ptsz(void* executable, void* stream) noexcept nogil:
    return cuGraphUpload(executable, own(stream))


cdef public CUresult cuGraphLaunch_ptsz(void* executable, void* stream) noexcept nogil:
    return cuGraphLaunch(executable, own(stream))


cdef public CUresult cuMemAllocAsync_ptsz(void* address, size_t size, void* stream) noexcept nogil:
    return cuMemAllocAsync(address, size, own(stream))


cdef public CUresult cuMemAllocFromPoolAsync_ptsz(
        void* address, size_t size, void* pool, void* stream) noexcept nogil:
    return cuMemAllocFromPoolAsync(address, size, pool, own(stream))


cdef public CUresult cuMemFreeAsync_ptsz(uint64_t address, void* stream) noexcept nogil:
    return cuMemFreeAsync(address, own(stream))


cdef public CUresult cuStreamAddCallback_ptsz(
        void* stream, void* function, void* user, unsigned int flags) noexcept nogil:
    return cuStreamAddCallback(own(stream), function, user, flags)


cdef public CUresult cuStreamBatchMemOp_v2_ptsz(
        void* stream, unsigned int count, void* operations, unsigned int flags) noexcept nogil:
    return cuStreamBatchMemOp_v2(own(stream), count, operations, flags)


cdef public CUresult cuMemcpy_ptds(uint64_t target, uint64_t source, size_t size) noexcept nogil:
    return finish(cuMemcpyAsync(target, source, size, <void*>PER_THREAD))


cdef public CUresult cuMemcpyPeer_ptds(
        uint64_t target, void* target_context, uint64_t source, void* source_context, size_t size) noexcept nogil:
    return finish(cuMemcpyPeerAsync(target, target_context, source, source_context, size, <void*>PER_THREAD))


cdef public CUresult cuMemcpyHtoD_v2_ptds(uint64_t target, void* source, size_t size) noexcept nogil:
    return finish(cuMemcpyHtoDAsync_v2(target, source, size, <void*>PER_THREAD))


cdef public CUresult cuMemcpyDtoH_v2_ptds(void* target, uint64_t source, size_t size) noexcept nogil:
    return finish(cuMemcpyDtoHAsync_v2(target, source, size, <void*>PER_THREAD))


cdef public CUresult cuMemcpyDtoD_v2_ptds(uint64_t target, uint64_t source, size_t size) noexcept nogil:
    return finish(cuMemcpyDtoDAsync_v2(target, source, size, <void*>PER_THREAD))


cdef public CUresult cuMemcpy2D_v2_ptds(void* c) noexcept nogil:
    return finish(cuMemcpy2DAsync_v2(c, <void*>PER_THREAD))


cdef public CUresult cuMemcpy2DUnaligned_v2_ptds(void* c) noexcept nogil:
    return finish(cuMemcpy2DAsync_v2(c, <void*>PER_THREAD))


cdef public CUresult cuMemcpy3D_v2_ptds(void* c) noexcept nogil:
    return finish(cuMemcpy3DAsync_v2(c, <void*>PER_THREAD))


cdef public CUresult cuMemcpy3DPeer_ptds(void* c) noexcept nogil:
    return finish(cuMemcpy3DPeerAsync(c, <void*>PER_THREAD))


cdef public CUresult cuMemsetD8_v2_ptds(uint64_t target, unsigned char value, size_t count) noexcept nogil:
    return cuMemsetD8Async(target, value, count, <void*>PER_THREAD)


cdef public CUresult cuMemsetD16_v2_ptds(uint64_t target, unsigned short value, size_t count) noexcept nogil:
    return cuMemsetD16Async(target, value, count, <void*>PER_THREAD)


cdef public CUresult cuMemsetD32_v2_ptds(uint64_t target, unsigned int value, size_t count) noexcept nogil:
    return cuMemsetD32Async(target, value, count, <void*>PER_THREAD)


cdef public CUresult cuMemsetD2D8_v2_ptds(
        uint64_t target, size_t pitch, unsigned char value, size_t width, size_t height) noexcept nogil:
    return cuMemsetD2D8Async(target, pitch, value, width, height, <void*>PER_THREAD)


cdef public CUresult cuMemsetD2D16_v2_ptds(
        uint64_t target, size_t pitch, unsigned short value, size_t width, size_t height) noexcept nogil:
    return cuMemsetD2D16Async(target, pitch, value, width, height, <void*>PER_THREAD)


cdef public CUresult cuMemsetD2D32_v2_ptds(
        uint64_t target, size_t pitch, unsigned int value, size_t width, size_t height) noexcept nogil:
    return cuMemsetD2D32Async(target, pitch, value, width, height, <void*>PER_THREAD)
