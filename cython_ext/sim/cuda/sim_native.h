/* What Cython cannot say: thread-local storage, exported symbols, signal masks in one call. */
#ifndef SIM_NATIVE_H
#define SIM_NATIVE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>

/* From here on symbols are visible; the version script keeps all but the driver's interface local. */
#pragma GCC visibility push(default)

typedef struct {
    void *stack[64]; /* current contexts, the last one on top */
    int depth;
    int capture_mode;
    struct {
        void *context;
        void *stream;
        uint32_t id;
    } own[8]; /* this thread's per-thread default streams */
    uint32_t own_next;
    uint32_t id;
} SimThread;

extern __thread SimThread sim_thread;

/* Sleep to an absolute CLOCK_MONOTONIC time without the default 50 us of timer slack: a simulated GPU that is
 * noticed late is a slow GPU. */
static inline void sim_sleep_until(int64_t at_ns) {
    struct timespec t = {at_ns / 1000000000, at_ns % 1000000000};
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0);
    if (slack > 0) prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
}

static inline int sim_start_thread(void *(*run)(void *)) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, old;
    int result;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 256 * 1024);
    result = pthread_create(&thread, &attributes, run, 0);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &old, 0);
    return result;
}
#endif
