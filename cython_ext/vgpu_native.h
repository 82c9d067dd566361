/* The little that Cython cannot say itself: atomics, futexes, thread-local storage.
 * Everything else native is Cython. Included by pages, gate, hook, dispatcher and the simulated GPU alike. */
#ifndef VGPU_NATIVE_H
#define VGPU_NATIVE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <linux/futex.h>
#include "old_glibc.h"

#define VGPU_LOAD(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define VGPU_LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define VGPU_STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define VGPU_STORE_RELAXED(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define VGPU_ADD(p, v) __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)
#define VGPU_EXCHANGE(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define VGPU_OR(p, v) __atomic_fetch_or((p), (v), __ATOMIC_ACQ_REL)

static inline uint32_t vgpu_load32(const volatile uint32_t *p) { return VGPU_LOAD(p); }
static inline uint64_t vgpu_load64(const volatile uint64_t *p) { return VGPU_LOAD(p); }
static inline int64_t vgpu_loadi64(const volatile int64_t *p) { return VGPU_LOAD(p); }
static inline void vgpu_store32(volatile uint32_t *p, uint32_t v) { VGPU_STORE(p, v); }
static inline void vgpu_store64(volatile uint64_t *p, uint64_t v) { VGPU_STORE(p, v); }
static inline void vgpu_storei64(volatile int64_t *p, int64_t v) { VGPU_STORE(p, v); }
static inline uint32_t vgpu_add32(volatile uint32_t *p, uint32_t v) { return VGPU_ADD(p, v); }
static inline uint64_t vgpu_add64(volatile uint64_t *p, uint64_t v) { return VGPU_ADD(p, v); }
static inline uint32_t vgpu_or32(volatile uint32_t *p, uint32_t v) { return VGPU_OR(p, v); }
static inline uint64_t vgpu_or64(volatile uint64_t *p, uint64_t v) { return VGPU_OR(p, v); }
static inline uint64_t vgpu_and64(volatile uint64_t *p, uint64_t v) { return __atomic_fetch_and(p, v, __ATOMIC_ACQ_REL); }
static inline uint32_t vgpu_exchange32(volatile uint32_t *p, uint32_t v) { return VGPU_EXCHANGE(p, v); }
static inline uint64_t vgpu_exchange64(volatile uint64_t *p, uint64_t v) { return VGPU_EXCHANGE(p, v); }
static inline int vgpu_cas32(volatile uint32_t *p, uint32_t expected, uint32_t desired) {
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}
static inline int vgpu_cas64(volatile uint64_t *p, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE);
}
static inline void vgpu_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
/* The rare side of a pair whose frequent side has a compiler fence alone: when it returns, every thread of this process has
 * executed a full fence since the call. 0: the kernel, or a sandbox, has no such thing, and both sides need fences of their
 * own. membarrier(2), private and expedited: an interrupt for each processor that runs one of our threads. */
static inline int vgpu_fence_all(void) {
    enum { EXPEDITED = 1 << 3, REGISTER = 1 << 4 };
    int saved = errno;
    int done = syscall(SYS_membarrier, EXPEDITED, 0) == 0
        || (syscall(SYS_membarrier, REGISTER, 0) == 0 && syscall(SYS_membarrier, EXPEDITED, 0) == 0);
    errno = saved;
    return done;
}
/* What is used in a moment, and may be in no cache: several such lines come at once, not one after another. */
static inline void vgpu_fetch(const volatile void *p) { __builtin_prefetch((const void *)p, 1, 3); }
/* A condition that hardly ever holds: what it leads to is kept away from what is run. */
static inline int vgpu_rarely(int condition) { return __builtin_expect(condition != 0, 0); }
/* Only the compiler may reorder what a thread does and its own death; the processor does not. */
static inline void vgpu_compiler_fence(void) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
static inline void vgpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* CLOCK_MONOTONIC in ns: the one clock of leases and books. */
static inline int64_t vgpu_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Wait until *p != expected, a wake, a signal, or the absolute CLOCK_MONOTONIC time (INT64_MAX: none).
 * 0 or an errno value (EAGAIN, EINTR, ETIMEDOUT). Works on read-only shared mappings; errno is left alone. */
static inline int vgpu_futex_wait(const volatile uint32_t *p, uint32_t expected, int64_t until_ns) {
    struct timespec t, *tp = NULL;
    int saved = errno, result = 0;
    if (until_ns != INT64_MAX) {
        if (until_ns < 0) until_ns = 0;
        t.tv_sec = until_ns / 1000000000;
        t.tv_nsec = until_ns % 1000000000;
        tp = &t;
    }
    if (syscall(SYS_futex, p, FUTEX_WAIT_BITSET, expected, tp, NULL, FUTEX_BITSET_MATCH_ANY) != 0) result = errno;
    errno = saved;
    return result;
}
static inline void vgpu_futex_wake(volatile uint32_t *p, int count) {
    int saved = errno;
    syscall(SYS_futex, p, FUTEX_WAKE, count, NULL, NULL, 0);
    errno = saved;
}

/* This thread's robust list, which the C library registers for every thread, and its TID: two system calls per thread, once.
 * NULL where the kernel or a sandbox keeps no robust lists. */
typedef struct {
    struct robust_list_head *head;
    struct robust_list *interrupted;
    struct robust_list *behind;
    uint32_t tid;
} vgpu_robust_thread;
static __thread vgpu_robust_thread vgpu_robust_this __attribute__((unused));

__attribute__((noinline, cold, unused)) static vgpu_robust_thread *vgpu_robust_meet(void) {
    vgpu_robust_thread *self = &vgpu_robust_this;
    int saved = errno;
    size_t size;
    if (syscall(SYS_get_robust_list, 0, &self->head, &size) != 0) self->head = NULL;
    if (self->head != NULL) self->tid = (uint32_t)syscall(SYS_gettid);
    errno = saved;
    return self->head != NULL ? self : NULL;
}
static inline vgpu_robust_thread *vgpu_robust_self(void) {
    return __builtin_expect(vgpu_robust_this.tid != 0, 1) ? &vgpu_robust_this : vgpu_robust_meet();
}
static inline void vgpu_robust_forget(void) { vgpu_robust_this.tid = 0; }
#endif
