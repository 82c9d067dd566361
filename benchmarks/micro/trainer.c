/* A training loop as a host sees it: a forward pass of short kernels that the host can hardly launch fast enough, a
 * backward pass of longer ones in which it regains its lead, two steps in flight. Counts finished steps.
 *
 *   cc -O2 -o trainer trainer.c -ldl && vgpuctl run --sm 30 --mem 1G -- ./trainer PTX_FILE SECONDS START_NS
 *
 * START_NS: CLOCK_MONOTONIC at which to begin; prints READY before it waits. Prints a JSON object at the end.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LAUNCHES 500 /* of each pass */
#define FORWARD_HOST_NS 20000 /* between two launches */
#define BACKWARD_HOST_NS 14000
#define IN_FLIGHT 2

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}
static void check(int result, const char *what) {
    if (result != 0) {
        fprintf(stderr, "trainer: %s returned %d\n", what, result);
        exit(1);
    }
}
static void *library;
static void *found(const char *name) {
    void *address = dlsym(library, name);
    if (!address) {
        fprintf(stderr, "trainer: no %s\n", name);
        exit(1);
    }
    return address;
}
#define CALL(name, ...) check(((int (*)())found(#name))(__VA_ARGS__), #name)

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: trainer PTX_FILE SECONDS START_NS\n");
        return 2;
    }
    FILE *file = fopen(argv[1], "r");
    char *code = calloc(1, 1 << 20);
    if (!file || !fread(code, 1, (1 << 20) - 1, file)) {
        perror(argv[1]);
        return 1;
    }
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "trainer: %s\n", dlerror());
        return 1;
    }
    void *context, *module, *function, *stream, *done[IN_FLIGHT];
    uint64_t sink;
    int device, sms;
    CALL(cuInit, 0);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CALL(cuCtxSetCurrent, context);
    CALL(cuDeviceGetAttribute, &sms, 16, device);
    CALL(cuModuleLoadData, &module, code);
    CALL(cuModuleGetFunction, &function, module, "compute");
    CALL(cuMemAlloc_v2, &sink, (size_t)4096);
    CALL(cuStreamCreate, &stream, 1);
    for (int i = 0; i < IN_FLIGHT; i++) CALL(cuEventCreate, &done[i], 2);
    int (*launch)() = (int (*)())found("cuLaunchKernel");
    int (*wait)() = (int (*)())found("cuEventSynchronize");
    uint32_t iterations = 10, random = 1;
    void *parameters[] = {&sink, &iterations};
    int64_t start = 0, end = 0;
    int steps = 0;
    for (int step = -5;; step++) { /* five to warm up */
        if (step == 0) {
            CALL(cuStreamSynchronize, stream);
            printf("READY\n");
            fflush(stdout);
            start = atoll(argv[3]) ? atoll(argv[3]) : now_ns();
            while (now_ns() < start) {
                struct timespec rest = {0, 1000000};
                nanosleep(&rest, NULL);
            }
            end = start + (int64_t)(atof(argv[2]) * 1e9);
        }
        void *event = done[(step + 5) % IN_FLIGHT];
        if (step >= IN_FLIGHT) {
            check(wait(event), "cuEventSynchronize");
            if (now_ns() >= end) break;
            steps++;
        }
        int64_t next = now_ns();
        for (int i = 0; i < 2 * LAUNCHES; i++) {
            int forward = i < LAUNCHES;
            /* one kernel and one grid stand for many layers: early ones take four times as long as late ones */
            iterations = 4 + 12 * (forward ? LAUNCHES - 1 - i : i - LAUNCHES) / (LAUNCHES - 1);
            random = random * 1664525u + 1013904223u;
            iterations += (random >> 16) % 3 - 1;
            unsigned waves = forward ? 2 + i % 9 : 4 + i % 17; /* 18 and 36 us on average, 1.5 us + 3 us a wave */
            next += forward ? FORWARD_HOST_NS : BACKWARD_HOST_NS;
            while (now_ns() < next) {
            }
            check(launch(function, waves * 8 * sms, 1, 1, 256, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
            if (now_ns() > next) next = now_ns(); /* a launch that had to wait is not caught up with */
        }
        CALL(cuEventRecord, event, stream);
    }
    printf("{\"steps\": %d, \"per_second\": %.3f}\n", steps, steps / ((end - start) / 1e9));
    CALL(cuStreamSynchronize, stream);
    return 0;
}
