/* What the gate adds to one launch: the same empty kernel through the hook and straight into the driver, in turns,
 * in one process. The way past the hook is dlvsym, which nobody intercepts; it measures, it is no back door (a program
 * that wants to bypass a cooperative hook needs no help, and NVML shows it).
 *
 *   cc -O2 -o launch launch.c -ldl && vgpuctl run --sm 100 --mem 1G -- ./launch 200
 *
 * Prints a JSON object: nanoseconds a launch of both, as medians over `rounds` batches, and of the paired differences.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
#define BATCH 500 /* stays below the driver's queue of 1024, so that no launch waits for the GPU */

static const char PTX[] = ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry empty()\n{\n  ret;\n}\n";

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *values, int count) {
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}
static void check(int result, const char *what) {
    if (result != 0) {
        fprintf(stderr, "launch: %s returned %d\n", what, result);
        exit(1);
    }
}
#define CALL(name, ...) check(((int (*)())hooked(#name))(__VA_ARGS__), #name)

static void *library;
static void *hooked(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "launch: no %s\n", name);
        exit(1);
    }
    return found;
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 200;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "launch: %s\n", dlerror());
        return 1;
    }
    void *context, *module, *function, *stream = NULL;
    int device;
    CALL(cuInit, 0);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CALL(cuCtxSetCurrent, context);
    CALL(cuModuleLoadData, &module, PTX);
    CALL(cuModuleGetFunction, &function, module, "empty");
    if (argc < 3) CALL(cuStreamCreate, &stream, 1); /* any second argument: the default stream */
    launch_t gated = (launch_t)hooked("cuLaunchKernel");
    launch_t direct = (launch_t)dlvsym(library, "cuLaunchKernel", "libcuda.so.1");
    if (!direct) { /* unversioned symbols: find the plain dlsym by its version */
        void *(*plain)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
#if defined(__x86_64__)
        if (!plain) plain = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
#else
        if (!plain) plain = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
#endif
        direct = (launch_t)plain(library, "cuLaunchKernel");
    }
    double *with = malloc(rounds * sizeof *with), *without = malloc(rounds * sizeof *without), *difference = malloc(rounds * sizeof *difference);
    for (int round = -5; round < rounds; round++) {
        double took[2];
        for (int turn = 0; turn < 2; turn++) {
            int through = (turn + round) & 1; /* alternate who goes first */
            launch_t launch = through ? gated : direct;
            double start = now_ns();
            for (int i = 0; i < BATCH; i++) check(launch(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
            took[through] = (now_ns() - start) / BATCH;
            CALL(cuStreamSynchronize, stream);
        }
        if (round < 0) continue; /* warm-up */
        with[round] = took[1];
        without[round] = took[0];
        difference[round] = took[1] - took[0];
    }
    printf("{\"hooked\": %s, \"rounds\": %d, \"gated_ns\": %.1f, \"direct_ns\": %.1f, \"added_ns\": %.1f}\n",
           gated == direct ? "false" : "true", rounds, median(with, rounds), median(without, rounds), median(difference, rounds));
    return 0;
}
