"""``python -m tests.stray``: a program whose kernel stores where there is no memory; prints the CUresult that it gets.

The same on a simulated GPU, which reads the ``// sim:`` line, and on a real one, which runs the code.
"""

from __future__ import annotations

import ctypes

from vgpu.workload.driver import CudaError, Gpu, Kernel

PTX = """
.version 6.0
.target sm_50
.address_size 64

// sim: stray ns=2000 sms=1 fault=700
.visible .entry stray(.param .u64 where)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [where];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""
NOWHERE = 16


def main() -> int:
    try:
        gpu = Gpu(PTX)
        Kernel(gpu, "stray", 1, 1, (ctypes.c_uint64(NOWHERE),)).launch()
        gpu.synchronize()
    except CudaError as error:
        return error.code
    return 0


if __name__ == "__main__":
    print(main(), flush=True)
