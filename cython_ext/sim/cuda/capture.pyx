"""Stream capture (interim: refused)."""

from cython_ext.sim.cuda.driver cimport Context, CUresult, Event, NOT_SUPPORTED, SUCCESS, Stream, Work


cdef public CUresult drv_check_unsafe() noexcept nogil:
    return SUCCESS


cdef public CUresult drv_capture_work(Stream* stream, Work* work) noexcept nogil:
    return NOT_SUPPORTED


cdef public CUresult drv_capture_event(Stream* stream, Event* event) noexcept nogil:
    return NOT_SUPPORTED


cdef public CUresult drv_capture_wait(Stream* stream, Event* event) noexcept nogil:
    return NOT_SUPPORTED


cdef public CUresult drv_break_captures(Context* context) noexcept nogil:
    return SUCCESS


cdef public CUresult cuStreamIsCapturing(void* stream, int* status) noexcept nogil:
    status[0] = 0
    return SUCCESS
