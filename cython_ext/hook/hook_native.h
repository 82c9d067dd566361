/* What the preload library needs beyond vgpu_native.h: thread-local storage, the loader's old entry points, the dlsym
 * trampoline. The functions of the hook that are shared between its modules are declared in hook.pxd. */
#ifndef VGPU_HOOK_NATIVE_H
#define VGPU_HOOK_NATIVE_H
#include "vgpu_native.h"
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Each thread's record (state.pxd, Thread). Initial-exec: the library is there at program start, so no call to
 * __tls_get_addr stands on the launch path. */
extern __thread void *vgpu_thread __attribute__((tls_model("initial-exec")));

static inline void vgpu_set_thread(void *record) { vgpu_thread = record; }

/* Cancellation (pthread_cancel). A wrapper runs with it disabled, from its first lock to its last unlock: the driver has
 * cancellation points, and a thread that ended in one would leave locks, counts and reservations behind. A cancelled
 * thread ends where the wrapper returns, or, `in_waits`, at the gate's waits, where it holds nothing. Launches that the
 * fast path lets through are not held: all that they have is in the thread's record, which its end clears. */
extern __thread int vgpu_may_cease __attribute__((tls_model("initial-exec")));

static inline int vgpu_hold_cancel(int in_waits) {
    int before, outer = vgpu_may_cease;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    vgpu_may_cease = in_waits && before == PTHREAD_CANCEL_ENABLE;
    return outer << 1 | (before == PTHREAD_CANCEL_ENABLE);
}
static inline void vgpu_let_cancel(int held) {
    vgpu_may_cease = held >> 1;
    if (held & 1) {
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
        pthread_testcancel();
    }
}
/* In a wait of vgpu_may_cease, with no lock held and nothing counted. */
static inline void vgpu_cease_here(void) {
    vgpu_let_cancel(1);
    vgpu_hold_cancel(1);
}

/* glibc 2.34 moved these into libc.so under a new version, which an older libc does not have. */
extern void *vgpu_dlopen(const char *file, int mode);
extern void *vgpu_dlvsym(void *handle, const char *name, const char *version);
extern int vgpu_dladdr(const void *address, Dl_info *info);
__asm__(".symver vgpu_dlopen, dlopen@" VGPU_OLD_GLIBC);
__asm__(".symver vgpu_dlvsym, dlvsym@" VGPU_OLD_GLIBC);
__asm__(".symver vgpu_dladdr, dladdr@" VGPU_OLD_GLIBC);

/* Runs `released(record)` when the calling thread ends, behind the destructors of its thread_local objects; once more if one
 * of the program's own keys calls us later and gets a record again. `key` is made by the first, under the caller's lock. */
typedef struct { pthread_key_t key; int made; } vgpu_thread_key;
static inline void vgpu_make_thread_key(vgpu_thread_key *key, void (*released)(void *)) {
    if (!key->made) key->made = pthread_key_create(&key->key, released) == 0;
}
static inline void vgpu_at_thread_exit(const vgpu_thread_key *key, void *record) {
    if (key->made) pthread_setspecific(key->key, record);
}

extern int vgpu_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
__asm__(".symver vgpu_pthread_create, pthread_create@" VGPU_OLD_GLIBC);

/* A thread with every signal blocked: the application's handlers are not for it. */
static inline int vgpu_spawn(void *(*run)(void *), void *argument) {
    sigset_t all, before;
    pthread_t thread;
    int failed;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    failed = vgpu_pthread_create(&thread, NULL, run, argument);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return !failed;
}
static inline void vgpu_prepare_thread(void) {
    prctl(PR_SET_NAME, "vgpu-hook");
    prctl(PR_SET_TIMERSLACK, 1UL); /* this thread's only; 50 us is the default */
}
static inline int vgpu_at_exit(void (*run)(void)) { return atexit(run); }

/* Where dlsym goes for a name that is not ours. */
extern void *(*vgpu_real_dlsym)(void *handle, const char *name);
extern void *(*vgpu_real_dlvsym)(void *handle, const char *name, const char *version);
#endif
