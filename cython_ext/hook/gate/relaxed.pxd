"""The capture mode in which the hook calls the driver for itself: in the default one, an event query of any thread
kills a capture of another."""

from cython_ext.hook.generated.driver cimport real_cuThreadExchangeStreamCaptureMode
from cython_ext.hook.state cimport CAPTURE_RELAXED


cdef inline int relax() noexcept nogil:
    """Before the hook's own driver calls: the thread's capture mode, for ``restore``."""
    cdef int mode = CAPTURE_RELAXED
    real_cuThreadExchangeStreamCaptureMode(&mode)
    return mode


cdef inline void restore(int mode) noexcept nogil:
    real_cuThreadExchangeStreamCaptureMode(&mode)
