"""Result codes of NVML, and the check that every call makes of its device handle."""

from cython_ext.sim.state cimport SimGpu

ctypedef public int NvmlResult

cdef enum NvmlResultValue:
    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    LIBRARY_NOT_FOUND = 12
    VERSION_MISMATCH = 25
    UNKNOWN = 999


cdef extern NvmlResult sim_check(SimGpu* gpu) noexcept nogil
cdef extern NvmlResult sim_look(SimGpu* gpu) noexcept nogil
