/* What the hook adds to one launch, or to cuMemAlloc and cuMemFree: through it and straight into the driver, in turns,
 * in one process. The way past the hook is the driver's own symbol table (past_hook.h).
 *
 *   cc -O2 -rdynamic -o launch launch.c -ldl && vgpuctl run --sm 100 --mem 1G -- ./launch 10000 50 [default|allocate|cold|paced|queued|stores]
 *
 * The first number says how many rounds, the second how many launches, or pairs of calls, each of the two has in a round. Of
 * short rounds most are interrupted by nobody, and the median forgets the others. (The driver's queue has 1024 places, and a
 * launch that waits for the GPU says nothing.)
 * stores: before each launch some stores go to memory that no cache has, and are still under way then.
 * paced: the host does something else before each launch, which finds the GPU idle.
 * queued: each round's launches go behind milliseconds of other work, whose lease has begun, and there is a pause between rounds.
 * cold: as allocate, but the caches forget us inside each call, as a real driver's tens of microseconds in the kernel make
 * them. The simulated one calls mmap and munmap there, which are ours. What forgetting takes is not counted.
 * Prints a JSON object: nanoseconds a launch (or pair of calls) of both, as medians over the rounds, and of the paired differences, these
 * with their 95 % interval and their lower decile; and the mean through the hook, with all waits.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../past_hook.h"

typedef int (*launch_t)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
typedef int (*allocate_t)(unsigned long long *, size_t);
typedef int (*free_t)(unsigned long long);
#define SIZE (2 << 20) /* the driver's own granule: it has to ask the card */
#define PACE_NS 20e3
#define QUEUED 3
#define QUEUED_NS 1e6 /* each */
#define TRIED_BLOCKS (1 << 16)
#define SETTLE_US 500 /* until the lease has begun: what is launched before is queued ahead of it, and costs more */
#define REST_US 12000 /* of a share of 50 % no more is used than a third */
#define EVICTED_BYTES (2 << 20) /* twice a second-level cache, or one; of code half as much */

static const char PTX[] = ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry empty()\n{\n  ret;\n}\n";

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

/* What stays in no first or second-level cache, TLB or branch predictor: data, code and jumps of others. */
static unsigned char *sweep_data, *sweep_code;
static int evicts;
static double evicting_ns;
static void prepare_sweep(void) {
    sweep_data = malloc(EVICTED_BYTES);
    sweep_code = mmap(NULL, EVICTED_BYTES / 2, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!sweep_data || sweep_code == MAP_FAILED) exit(1);
    for (int at = 0; at < EVICTED_BYTES / 2; at += 64) { /* a jump to the next line, the last one returns */
#if defined(__x86_64__)
        static const unsigned char jump[] = {0xe9, 59, 0, 0, 0}, leave[] = {0xc3, 0, 0, 0, 0};
#else
        static const unsigned char jump[] = {0x10, 0, 0, 0x14}, leave[] = {0xc0, 0x03, 0x5f, 0xd6};
#endif
        memcpy(sweep_code + at, at + 64 < EVICTED_BYTES / 2 ? jump : leave, sizeof jump);
    }
    __builtin___clear_cache((char *)sweep_code, (char *)sweep_code + EVICTED_BYTES / 2);
}
static void evict(void) {
    double began = now_ns();
    for (int at = 0; at < EVICTED_BYTES; at += 64) ((volatile unsigned char *)sweep_data)[at]++;
    ((void (*)(void))sweep_code)();
    evicting_ns += now_ns() - began;
}
void *mmap64(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    if (evicts) evict();
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}
int munmap(void *address, size_t size) {
    if (evicts) evict();
    return (int)syscall(SYS_munmap, address, size);
}

#define FAR_BYTES (1UL << 29)
static unsigned char *far;
static void prepare_stores(void) {
    far = malloc(FAR_BYTES);
    if (!far) exit(1);
    memset(far, 1, FAR_BYTES);
}
static void store_far(void) {
    static unsigned long dice = 1;
    for (int i = 0; i < 4; i++) {
        dice = dice * 6364136223846793005UL + 1442695040888963407UL;
        ((volatile unsigned char *)far)[(dice >> 33) % FAR_BYTES] = 2;
    }
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

volatile int sampled_turn; /* benchmarks/experiments/sampler.c looks where we are while launches go through the hook */

static void *library;
static void *hooked(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "launch: no %s\n", name);
        exit(1);
    }
    return found;
}

static void *direct(const char *name) {
    void *found = past_hook(library, name);
    if (!found) {
        fprintf(stderr, "launch: the driver defines no %s\n", name);
        exit(1);
    }
    return found;
}

/* Of an empty kernel that takes QUEUED_NS, far longer than its launch. */
static unsigned blocks_of(launch_t launch, void *function, void *stream) {
    double fastest = 1e12;
    for (int i = 0; i < 20; i++) {
        double began = now_ns();
        check(launch(function, TRIED_BLOCKS, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
        CALL(cuStreamSynchronize, stream);
        if (now_ns() - began < fastest) fastest = now_ns() - began;
    }
    return TRIED_BLOCKS * QUEUED_NS / fastest;
}

int main(int argc, char **argv) {
    const char *what = argc > 3 ? argv[3] : "";
    int cold = !strcmp(what, "cold"), allocates = cold || !strcmp(what, "allocate");
    int in_default_stream = !strcmp(what, "default"), paced = !strcmp(what, "paced");
    int stores = !strcmp(what, "stores"), queued = !strcmp(what, "queued");
    int rounds = argc > 2 ? atoi(argv[1]) : 0, batch = argc > 2 ? atoi(argv[2]) : 0;
    if (rounds < 1 || batch < 1) {
        fprintf(stderr, "launch: ROUNDS BATCH [default|allocate|cold|paced|queued|stores]\n");
        return 2;
    }
    if (cold) prepare_sweep();
    if (stores) prepare_stores();
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
    if (!in_default_stream) CALL(cuStreamCreate, &stream, 1);
    static launch_t launches[2]; /* not on the stack, where they would look like places that have called */
    launches[0] = (launch_t)direct("cuLaunchKernel"), launches[1] = (launch_t)hooked("cuLaunchKernel");
    static allocate_t allocations[2];
    static free_t frees[2];
    allocations[0] = (allocate_t)direct("cuMemAlloc_v2"), allocations[1] = (allocate_t)hooked("cuMemAlloc_v2");
    frees[0] = (free_t)direct("cuMemFree_v2"), frees[1] = (free_t)hooked("cuMemFree_v2");
    unsigned blocks = queued ? blocks_of(launches[0], function, stream) : 0;
    double *with = malloc(rounds * sizeof *with), *without = malloc(rounds * sizeof *without), *difference = malloc(rounds * sizeof *difference);
    for (int round = -5; round < rounds; round++) {
        double took[2];
        for (int turn = 0; turn < 2; turn++) {
            int through = (turn + round) & 1; /* alternate who goes first */
            unsigned long long address;
            for (int i = 0; queued && i < QUEUED; i++)
                check(launches[through](function, blocks, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
            if (queued) usleep(SETTLE_US);
            double start = now_ns(), elsewhere = 0;
            evicting_ns = 0;
            evicts = cold;
            sampled_turn = through;
            for (int i = 0; i < batch; i++) {
                if (paced) {
                    double began = now_ns();
                    while (now_ns() < began + PACE_NS) {
                    }
                    elsewhere += now_ns() - began;
                }
                if (stores) store_far();
                if (allocates) {
                    check(allocations[through](&address, SIZE), "cuMemAlloc");
                    check(frees[through](address), "cuMemFree");
                } else {
                    check(launches[through](function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
                }
            }
            sampled_turn = 0;
            took[through] = (now_ns() - start - elsewhere - evicting_ns) / batch;
            evicts = 0;
            CALL(cuStreamSynchronize, stream);
            if (queued) usleep(REST_US);
        }
        if (round < 0) continue; /* warm-up */
        with[round] = took[1];
        without[round] = took[0];
        difference[round] = took[1] - took[0];
    }
    double added = median(difference, rounds), mean = 0;
    for (int round = 0; round < rounds; round++) mean += with[round] / rounds;
    int tail = 0; /* the 95 % interval of a median is between two of the sorted values, by the sign test: n/2 -+ 0.98 sqrt(n) */
    while (tail * tail < 0.98 * 0.98 * rounds) tail++;
    tail = rounds / 2 > tail ? rounds / 2 - tail : 0;
    printf("{\"hooked\": %s, \"rounds\": %d, \"gated_ns\": %.1f, \"direct_ns\": %.1f, \"added_ns\": %.1f, \"added_low_ns\": %.1f, \"added_high_ns\": %.1f, \"added_least_ns\": %.1f, \"mean_gated_ns\": %.1f}\n",
           launches[0] == launches[1] ? "false" : "true", rounds, median(with, rounds), median(without, rounds), added, difference[tail],
           difference[rounds - 1 - tail], difference[rounds / 10], mean);
    return 0;
}
