/* What two timed events add to the launch between them, beyond its time in a dense queue. Without a vGPU.
 *
 *     cc -O2 -o event_cost benchmarks/experiments/event_cost.c -ldl && ./event_cost [ROUNDS [OTHERS]]
 *
 * A launch's own time is its part of a dense queue: behind 3 ms of work two events around 200 launches, less those around 100.
 * Its sample in a dense queue is two events around one launch in four. Its sample in an empty queue is two events around one
 * launch, 20 us after the one before, less the host's time of the launch, as the hook takes it (cython_ext/hook/gate/track.pyx).
 * "pair" is two events with nothing between them. Prints microseconds: medians over all samples, and their quartiles. OTHERS
 * processes launch kernels of 5 us meanwhile, 10 us apart, and wait after each 200; then the own time has others' time slices in
 * it, and is not used. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdint.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#define SAMPLES 40
#define FEW 100
#define MANY 200
#define PAUSE_NS 20e3
#define BUSY_CYCLES 6000000ull
#define BYTES (64u << 20)

static const char PTX[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry spin(.param .u64 cycles)\n{\n"
    "  .reg .pred %p; .reg .u64 %rd<5>;\n"
    "  ld.param.u64 %rd1, [cycles];\n  mov.u64 %rd2, %clock64;\n"
    "again:\n  mov.u64 %rd3, %clock64;\n  sub.u64 %rd4, %rd3, %rd2;\n  setp.lt.u64 %p, %rd4, %rd1;\n  @%p bra again;\n  ret;\n}\n"
    ".visible .entry add(.param .u64 floats)\n{\n"
    "  .reg .u32 %r<4>; .reg .u64 %rd<4>; .reg .f32 %f<2>;\n"
    "  ld.param.u64 %rd1, [floats];\n  cvta.to.global.u64 %rd1, %rd1;\n"
    "  mov.u32 %r0, %ctaid.x;\n  mov.u32 %r1, %ntid.x;\n  mov.u32 %r2, %tid.x;\n  mad.lo.u32 %r3, %r0, %r1, %r2;\n"
    "  mul.wide.u32 %rd2, %r3, 4;\n  add.u64 %rd3, %rd1, %rd2;\n"
    "  ld.global.f32 %f0, [%rd3];\n  add.f32 %f1, %f0, 0f3F800000;\n  st.global.f32 [%rd3], %f1;\n  ret;\n}\n";

static void *context, *spin, *add, *stream, *events[2 * SAMPLES];
static uint64_t floats;

static int (*event_record)(void *, void *), (*synchronize)(void *), (*elapsed)(float *, void *, void *), (*stream_query)(void *);
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

typedef struct {
    const char *name;
    unsigned blocks, threads;
    uint64_t cycles; /* 0: add */
} Case;

static const Case CASES[] = {
    {"spin 1 block, 2k cycles", 1, 1, 2000},       {"spin 1 block, 8k", 1, 1, 8000},
    {"spin 1 block, 40k", 1, 1, 40000},            {"spin 528 x 256, 2k", 528, 256, 2000},
    {"spin 528 x 256, 8k", 528, 256, 8000},        {"spin 4224 x 256, 2k", 4224, 256, 2000},
    {"add 8 KiB", 8, 256, 0},                      {"add 1 MiB", 1024, 256, 0},
    {"add 8 MiB", 8192, 256, 0},                   {"add 64 MiB", 65536, 256, 0},
};

static void launch_one(const Case *one) {
    uint64_t argument = one->cycles ? one->cycles : floats;
    void *arguments[] = {&argument};
    check(launch(one->cycles ? spin : add, one->blocks, 1, 1, one->threads, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
}
static void busy(void) {
    static const Case LONG = {"", 1, 1, BUSY_CYCLES};
    launch_one(&LONG);
}
static void record(int event) { check(event_record(events[event], stream), "cuEventRecord"); }
static double between_ns(int first, int last) {
    float ms;
    check(elapsed(&ms, events[first], events[last]), "cuEventElapsedTime");
    return ms * 1e6;
}

static double dense_ns(const Case *one, int count) {
    busy();
    record(0);
    for (int i = 0; i < count; i++) launch_one(one);
    record(1);
    check(synchronize(stream), "cuStreamSynchronize");
    return between_ns(0, 1);
}
static void dense_samples(const Case *one, double *into) {
    busy();
    for (int i = 0; i < SAMPLES; i++) {
        for (int k = 0; one && k < 3; k++) launch_one(one);
        record(2 * i);
        if (one) launch_one(one);
        record(2 * i + 1);
        if (!one) launch_one(&CASES[1]);
    }
    check(synchronize(stream), "cuStreamSynchronize");
    for (int i = 0; i < SAMPLES; i++) into[i] = between_ns(2 * i, 2 * i + 1);
}
static void empty_samples(const Case *one, double *into) {
    double host[SAMPLES];
    for (int i = 0; i < SAMPLES; i++) {
        double from = now_ns();
        while (now_ns() < from + PAUSE_NS) {
        }
        while (stream_query(stream) != 0) {
        }
        record(2 * i);
        double began = now_ns();
        if (one) launch_one(one);
        host[i] = now_ns() - began;
        record(2 * i + 1);
        check(synchronize(stream), "cuStreamSynchronize");
    }
    for (int i = 0; i < SAMPLES; i++) {
        double ns = between_ns(2 * i, 2 * i + 1);
        into[i] = ns - host[i] > ns / 4 ? ns - host[i] : ns / 4;
    }
}

static void print(const double *values, int count) {
    printf("%9.2f (%.2f to %.2f)", values[count / 2] / 1e3, values[count / 4] / 1e3, values[3 * count / 4] / 1e3);
}
static void measure(const Case *one, int rounds) {
    double *own = malloc(rounds * sizeof *own), *dense = malloc(rounds * SAMPLES * sizeof *dense), *empty = malloc(rounds * SAMPLES * sizeof *empty);
    if (!own || !dense || !empty) exit(1);
    for (int round = -1; round < rounds; round++) {
        int at = round < 0 ? 0 : round;
        if (one) own[at] = (dense_ns(one, MANY) - dense_ns(one, FEW)) / (MANY - FEW);
        dense_samples(one, dense + at * SAMPLES);
        empty_samples(one, empty + at * SAMPLES);
    }
    qsort(dense, rounds * SAMPLES, sizeof *dense, compare);
    qsort(empty, rounds * SAMPLES, sizeof *empty, compare);
    if (one) qsort(own, rounds, sizeof *own, compare);
    double truth = one ? own[rounds / 2] : 0;
    printf("%-26s", one ? one->name : "pair");
    if (one) print(own, rounds);
    else printf("%9s", "-");
    print(dense, rounds * SAMPLES);
    print(empty, rounds * SAMPLES);
    printf("   added: dense %6.2f, empty %6.2f\n", (dense[rounds * SAMPLES / 2] - truth) / 1e3, (empty[rounds * SAMPLES / 2] - truth) / 1e3);
    fflush(stdout);
    free(own), free(dense), free(empty);
}

static void accompany(void) {
    for (;;) {
        for (int i = 0; i < MANY; i++) {
            double from = now_ns();
            launch_one(&CASES[1]);
            while (now_ns() < from + 10e3) {
            }
        }
        check(synchronize(stream), "cuStreamSynchronize");
    }
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 20, others = argc > 2 ? atoi(argv[2]) : 0, device, companion = 0;
    void *module;
    uint64_t at;
    for (int i = 0; i < others && !companion; i++) companion = fork() == 0;
    if (companion) prctl(PR_SET_PDEATHSIG, SIGKILL);
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "event_cost: %s\n", dlerror());
        return 1;
    }
    check(((int (*)(unsigned))found("cuInit"))(0), "cuInit");
    check(((int (*)(int *, int))found("cuDeviceGet"))(&device, 0), "cuDeviceGet");
    check(((int (*)(void **, int))found("cuDevicePrimaryCtxRetain"))(&context, device), "cuDevicePrimaryCtxRetain");
    check(((int (*)(void *))found("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    check(((int (*)(void **, const void *))found("cuModuleLoadData"))(&module, PTX), "cuModuleLoadData");
    check(((int (*)(void **, void *, const char *))found("cuModuleGetFunction"))(&spin, module, "spin"), "cuModuleGetFunction");
    check(((int (*)(void **, void *, const char *))found("cuModuleGetFunction"))(&add, module, "add"), "cuModuleGetFunction");
    check(((int (*)(void **, unsigned))found("cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    check(((int (*)(uint64_t *, size_t))found("cuMemAlloc_v2"))(&at, BYTES), "cuMemAlloc");
    floats = at;
    for (int i = 0; i < 2 * SAMPLES; i++) check(((int (*)(void **, unsigned))found("cuEventCreate"))(&events[i], 0), "cuEventCreate");
    event_record = found("cuEventRecord"), synchronize = found("cuStreamSynchronize"), elapsed = found("cuEventElapsedTime");
    stream_query = found("cuStreamQuery"), launch = found("cuLaunchKernel");
    if (companion) accompany();
    if (others) sleep(2);
    printf("%-26s%24s%24s%24s\n", "launch; us", "own time", "sample, dense queue", "sample, empty queue");
    measure(NULL, rounds);
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) measure(&CASES[i], rounds);
    return 0;
}
