"""Declarations of vgpu_native.h: atomics with acquire/release order, futexes, the clock."""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "vgpu_native.h" nogil:
    const char* VGPU_OLD_GLIBC
    uint32_t load32 "vgpu_load32"(const volatile uint32_t* p) noexcept
    uint64_t load64 "vgpu_load64"(const volatile uint64_t* p) noexcept
    int64_t loadi64 "vgpu_loadi64"(const volatile int64_t* p) noexcept
    void store32 "vgpu_store32"(volatile uint32_t* p, uint32_t v) noexcept
    void store64 "vgpu_store64"(volatile uint64_t* p, uint64_t v) noexcept
    void storei64 "vgpu_storei64"(volatile int64_t* p, int64_t v) noexcept
    uint32_t add32 "vgpu_add32"(volatile uint32_t* p, uint32_t v) noexcept
    uint64_t add64 "vgpu_add64"(volatile uint64_t* p, uint64_t v) noexcept
    uint32_t or32 "vgpu_or32"(volatile uint32_t* p, uint32_t v) noexcept
    uint64_t or64 "vgpu_or64"(volatile uint64_t* p, uint64_t v) noexcept
    uint64_t and64 "vgpu_and64"(volatile uint64_t* p, uint64_t v) noexcept
    uint32_t exchange32 "vgpu_exchange32"(volatile uint32_t* p, uint32_t v) noexcept
    uint64_t exchange64 "vgpu_exchange64"(volatile uint64_t* p, uint64_t v) noexcept
    bint cas32 "vgpu_cas32"(volatile uint32_t* p, uint32_t expected, uint32_t desired) noexcept
    bint cas64 "vgpu_cas64"(volatile uint64_t* p, uint64_t expected, uint64_t desired) noexcept
    void fence "vgpu_fence"() noexcept
    bint fence_all "vgpu_fence_all"() noexcept
    void compiler_fence "vgpu_compiler_fence"() noexcept
    void pause "vgpu_pause"() noexcept
    void prefetch "vgpu_fetch"(const volatile void* p) noexcept
    bint rarely "vgpu_rarely"(bint condition) noexcept
    int64_t now_ns "vgpu_now_ns"() noexcept
    int futex_wait "vgpu_futex_wait"(const volatile uint32_t* p, uint32_t expected, int64_t until_ns) noexcept
    void futex_wake "vgpu_futex_wake"(volatile uint32_t* p, int count) noexcept
