"""The workload's kernels, as PTX for any GPU since Maxwell.

The ``// sim:`` comments give the simulated GPU the cost of each kernel. A real driver compiles the code and ignores
them. Their figures are what these very kernels reach on an H200: 28.7 T FMA/s, 3.06 TB/s.
"""

from __future__ import annotations

THREADS = 256
BLOCKS_PER_SM = 8  # 2048 resident threads: an SM is full
FMAS_PER_ITERATION = 32  # per thread

_FMAS = "\n".join(f"    fma.rn.f32 %f{1 + i % 8}, %f{1 + i % 8}, %f9, %f10;" for i in range(FMAS_PER_ITERATION))


def _fma_loop(label: str) -> str:
    """%r1 rounds of independent multiply-adds in eight registers; kept by a store that never happens."""
    start = "\n".join(f"    mov.f32 %f{i}, %f11;" for i in range(1, 9))
    total = "\n".join(f"    add.f32 %f1, %f1, %f{i};" for i in range(2, 9))
    return f"""
    mov.u32 %r2, %tid.x;
    cvt.rn.f32.u32 %f11, %r2;
    mov.f32 %f9, 0f3F7FBE77;
    mov.f32 %f10, 0f3A83126F;
{start}
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra {label}_done;
{label}:
{_FMAS}
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra {label};
{label}_done:
{total}
    setp.eq.f32 %p1, %f1, 0fC97423F0;
    @%p1 st.global.f32 [%rd1], %f1;"""


_REGISTERS = """    .reg .pred %p<4>;
    .reg .f32 %f<12>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<10>;"""

PTX = f"""
.version 7.0
.target sm_52
.address_size 64

// sim: compute ns=1500+ceil(blocks/(sms*8))*p1*300 sms=blocks/8
.visible .entry compute(.param .u64 sink, .param .u32 iterations)
{{
{_REGISTERS}
    ld.param.u64 %rd1, [sink];
    ld.param.u32 %r1, [iterations];
{_fma_loop("compute_loop")}
    ret;
}}

// sim: stream ns=1500+p2*8/3060 sms=blocks/8
.visible .entry stream(.param .u64 source, .param .u64 target, .param .u64 count)
{{
{_REGISTERS}
    ld.param.u64 %rd1, [source];
    ld.param.u64 %rd2, [target];
    ld.param.u64 %rd3, [count];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %rd4, %r1, %r2;
    cvt.u64.u32 %rd5, %r3;
    add.u64 %rd4, %rd4, %rd5;
    mul.wide.u32 %rd5, %r4, %r2;
stream_loop:
    setp.ge.u64 %p1, %rd4, %rd3;
    @%p1 bra stream_done;
    shl.b64 %rd6, %rd4, 2;
    add.u64 %rd7, %rd1, %rd6;
    add.u64 %rd8, %rd2, %rd6;
    ld.global.f32 %f1, [%rd7];
    add.f32 %f1, %f1, 0f3F800000;
    st.global.f32 [%rd8], %f1;
    add.u64 %rd4, %rd4, %rd5;
    bra stream_loop;
stream_done:
    ret;
}}

// sim: tiny ns=1800 sms=1
.visible .entry tiny(.param .u64 sink)
{{
    ret;
}}

// sim: stamped ns=1500+ceil(blocks/(sms*8))*p2*300 sms=blocks/8 interval=p0+p1*16
.visible .entry stamped(.param .u64 stamps, .param .u64 index, .param .u32 iterations)
{{
{_REGISTERS}
    ld.param.u64 %rd1, [stamps];
    ld.param.u64 %rd2, [index];
    ld.param.u32 %r1, [iterations];
    shl.b64 %rd2, %rd2, 4;
    add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %tid.x;
    or.b32 %r3, %r3, %r4;
    setp.eq.u32 %p2, %r3, 0;
    @!%p2 bra stamped_work;
    mov.u64 %rd3, %globaltimer;
    st.global.u64 [%rd1], %rd3;
stamped_work:
{_fma_loop("stamped_loop")}
    // Warps are served oldest first, so block 0 is done long before the last one: every warp reports its end.
    and.b32 %r4, %r4, 31;
    setp.ne.u32 %p2, %r4, 0;
    @%p2 bra stamped_end;
    mov.u64 %rd3, %globaltimer;
    red.global.max.u64 [%rd1+8], %rd3;
stamped_end:
    ret;
}}
"""
