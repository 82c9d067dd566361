/* Stands in front of every native source (setup.py, -include), so that a wheel built on a new distribution loads on glibc 2.28:
 * what moved into libc.so in 2.34 is bound to its older version, which old and new libraries have. A name that a source does
 * not use costs nothing. */
#ifndef VGPU_OLD_GLIBC_H
#define VGPU_OLD_GLIBC_H
#if defined(__x86_64__)
#define VGPU_OLD_GLIBC "GLIBC_2.2.5"
#define VGPU_GLIBC_2_12 "GLIBC_2.12"
#define VGPU_GLIBC_2_3_3 "GLIBC_2.3.3"
#elif defined(__aarch64__) /* which glibc knows since then */
#define VGPU_OLD_GLIBC "GLIBC_2.17"
#define VGPU_GLIBC_2_12 VGPU_OLD_GLIBC
#define VGPU_GLIBC_2_3_3 VGPU_OLD_GLIBC
#else
#error "st-vgpu supports x86-64 and aarch64"
#endif
__asm__(".symver pthread_create, pthread_create@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_join, pthread_join@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_setcancelstate, pthread_setcancelstate@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_testcancel, pthread_testcancel@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_key_create, pthread_key_create@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_setspecific, pthread_setspecific@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_sigmask, pthread_sigmask@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_attr_setstacksize, pthread_attr_setstacksize@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_mutexattr_init, pthread_mutexattr_init@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_mutexattr_destroy, pthread_mutexattr_destroy@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_mutexattr_setpshared, pthread_mutexattr_setpshared@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_mutex_timedlock, pthread_mutex_timedlock@" VGPU_OLD_GLIBC);
__asm__(".symver pthread_setname_np, pthread_setname_np@" VGPU_GLIBC_2_12);
__asm__(".symver pthread_mutexattr_setrobust, pthread_mutexattr_setrobust@" VGPU_GLIBC_2_12);
__asm__(".symver pthread_mutex_consistent, pthread_mutex_consistent@" VGPU_GLIBC_2_12);
__asm__(".symver dladdr1, dladdr1@" VGPU_GLIBC_2_3_3);
#endif
