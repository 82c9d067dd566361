/* What the driver's calls cost that the hook makes around a launch under a limit: to see whether the GPU is idle, to mark and to
 * time. Without a vGPU and without anything of ours.
 *
 *     cc -O2 -pthread -o asking benchmarks/experiments/driver_call_cost.c -ldl && ./asking [ROUNDS]
 *
 * Each call is made before each of 50 launches of an empty kernel, and, in turns, not: what the launches then take more is its
 * cost, its effect on the launch included. Three states: "idle", 20 us after the launch before, so that the GPU waits for the
 * host; "close", at once after it; "queued", at once and behind 3 ms of work. Then the same while another thread asks about
 * the stream every 50 us, as the hook's own does near the end of a lease. Prints nanoseconds: the median of the rounds and
 * its 95 % interval. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define BATCH 50
#define PACE_NS 20e3
#define QUEUED 3
#define QUEUED_NS 1e6 /* each */
#define TRIED_BLOCKS (1 << 16)
#define EVENTS 64

static const char PTX[] = ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry empty()\n{\n  ret;\n}\n";

static void *context, *function, *stream, *plain[EVENTS], *timed[EVENTS], *ended, *pending;
static unsigned next_event, queued_blocks;
static volatile int asks, stops;
static unsigned word __attribute__((aligned(64)));
static volatile unsigned shared __attribute__((aligned(64))), other __attribute__((aligned(64)));

static unsigned long long host_word; /* as the GPU sees it */
static unsigned written;
static void *interprocess[EVENTS], *first_timed, *last_timed, *ended_interprocess;

/* The driver's entry points, each with the arguments that are used here. */
static int (*event_query)(void *), (*stream_query)(void *), (*event_record)(void *, void *), (*exchange_mode)(int *);
static int (*current)(void **), (*is_capturing)(void *, int *), (*context_of)(void *, void **), (*synchronize)(void *);
static int (*elapsed)(float *, void *, void *), (*write_value)(void *, unsigned long long, unsigned, unsigned);
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static void nothing(void) {}
static void ask_ended(void) { event_query(ended); }
static void ask_pending(void) { event_query(pending); }
static void ask_stream(void) { stream_query(stream); }
static void record_plain(void) { check(event_record(plain[next_event++ % EVENTS], stream), "cuEventRecord"); }
static void record_timed(void) { check(event_record(timed[next_event++ % EVENTS], stream), "cuEventRecord"); }
static void record_interprocess(void) { check(event_record(interprocess[next_event++ % EVENTS], stream), "cuEventRecord"); }
static void ask_interprocess(void) { event_query(ended_interprocess); }
static void ask_elapsed(void) {
    float ms;
    check(elapsed(&ms, first_timed, last_timed), "cuEventElapsedTime");
}
static void write_word(void) { check(write_value(stream, host_word, ++written, 0), "cuStreamWriteValue32"); }
static void relax(void) {
    int mode = 2; /* relaxed */
    exchange_mode(&mode);
    exchange_mode(&mode);
}
static void ask_current(void) {
    void *answer;
    current(&answer);
}
static void ask_capturing(void) {
    int answer;
    is_capturing(stream, &answer);
}
static void ask_context(void) {
    void *answer;
    context_of(stream, &answer);
}
static void fence(void) { __sync_synchronize(); }
static void lock_twice(void) {
    __sync_fetch_and_add(&word, 1);
    __sync_fetch_and_add(&word, -1u);
}
static void look_at_clock(void) { now_ns(); }
static void write_watched(void) { shared++; }

static const struct {
    const char *name;
    void (*call)(void);
} CALLS[] = {
    {"nothing", nothing},
    {"cuEventQuery, complete", ask_ended},
    {"cuEventQuery, pending where work is queued", ask_pending},
    {"cuStreamQuery", ask_stream},
    {"cuEventRecord", record_plain},
    {"cuEventRecord, timed", record_timed},
    {"cuEventRecord, interprocess", record_interprocess},
    {"cuEventQuery, complete, interprocess", ask_interprocess},
    {"cuEventElapsedTime, complete", ask_elapsed},
    {"cuStreamWriteValue32", write_word},
    {"cuThreadExchangeStreamCaptureMode, twice", relax},
    {"cuCtxGetCurrent", ask_current},
    {"cuStreamIsCapturing", ask_capturing},
    {"cuStreamGetCtx", ask_context},
    {"a full fence", fence},
    {"two locked additions", lock_twice},
    {"a look at the clock", look_at_clock},
    {"a store to a line that another thread reads", write_watched},
};
enum { CALL_COUNT = sizeof CALLS / sizeof *CALLS, IDLE = 0, CLOSE = 1, BEHIND = 2 };
static const char *const STATES[] = {"idle", "close", "queued"};

static void *asker(void *nobody) {
    (void)nobody;
    check(((int (*)(void *))found("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    while (!stops) {
        if (asks) stream_query(stream);
        usleep(asks ? 1 : 1000); /* a timer's slack of 50 us besides */
    }
    return NULL;
}
static void *reader(void *nobody) {
    (void)nobody;
    while (!stops) other = shared;
    return NULL;
}

static void launch_one(unsigned blocks) {
    check(launch(function, blocks, 1, 1, 1, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
}

/* Nanoseconds of the batch, without the host's pauses. */
static double batch(int state, void (*call)(void)) {
    double elsewhere = 0;
    for (int i = 0; state == BEHIND && i < QUEUED; i++) launch_one(queued_blocks);
    if (state == BEHIND) check(event_record(pending, stream), "cuEventRecord");
    double start = now_ns();
    for (int i = 0; i < BATCH; i++) {
        if (state == IDLE) {
            double began = now_ns();
            while (now_ns() < began + PACE_NS) {
            }
            elsewhere += now_ns() - began;
        }
        call();
        launch_one(1);
    }
    double took = now_ns() - start - elsewhere;
    check(synchronize(stream), "cuStreamSynchronize");
    return took;
}

static void measure(int state, int call, int rounds) {
    double *difference = malloc(rounds * sizeof *difference);
    if (!difference) exit(1);
    for (int round = -3; round < rounds; round++) {
        double took[2];
        for (int turn = 0; turn < 2; turn++) {
            int with = (turn + round) & 1; /* alternate who goes first */
            took[with] = batch(state, with ? CALLS[call].call : nothing);
        }
        if (round >= 0) difference[round] = (took[1] - took[0]) / BATCH;
    }
    qsort(difference, rounds, sizeof *difference, compare);
    int tail = 0; /* by the sign test: n/2 -+ 0.98 sqrt(n) */
    while (tail * tail < 0.98 * 0.98 * rounds) tail++;
    tail = rounds / 2 > tail ? rounds / 2 - tail : 0;
    printf("%-46s%8s%10.0f%10.0f%10.0f\n", CALLS[call].name, STATES[state], difference[rounds / 2], difference[tail], difference[rounds - 1 - tail]);
    fflush(stdout);
    free(difference);
}

/* Of an empty kernel that takes QUEUED_NS, far longer than its launch. */
static unsigned blocks_of(void) {
    double fastest = 1e12;
    for (int i = 0; i < 20; i++) {
        double began = now_ns();
        launch_one(TRIED_BLOCKS);
        check(synchronize(stream), "cuStreamSynchronize");
        if (now_ns() - began < fastest) fastest = now_ns() - began;
    }
    return TRIED_BLOCKS * QUEUED_NS / fastest;
}

int main(int argc, char **argv) {
    int device, rounds = argc > 1 ? atoi(argv[1]) : 100;
    void *module;
    pthread_t threads[2];
    if (rounds < 1) {
        fprintf(stderr, "asking: [ROUNDS]\n");
        return 2;
    }
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "asking: %s\n", dlerror());
        return 1;
    }
    event_query = found("cuEventQuery");
    stream_query = found("cuStreamQuery");
    event_record = found("cuEventRecord");
    exchange_mode = found("cuThreadExchangeStreamCaptureMode");
    current = found("cuCtxGetCurrent");
    is_capturing = found("cuStreamIsCapturing");
    context_of = found("cuStreamGetCtx");
    synchronize = found("cuStreamSynchronize");
    launch = found("cuLaunchKernel");
    int (*create)(void **, unsigned) = found("cuEventCreate");
    check(((int (*)(unsigned))found("cuInit"))(0), "cuInit");
    check(((int (*)(int *, int))found("cuDeviceGet"))(&device, 0), "cuDeviceGet");
    check(((int (*)(void **, int))found("cuDevicePrimaryCtxRetain"))(&context, device), "cuDevicePrimaryCtxRetain");
    check(((int (*)(void *))found("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    check(((int (*)(void **, const void *))found("cuModuleLoadData"))(&module, PTX), "cuModuleLoadData");
    check(((int (*)(void **, void *, const char *))found("cuModuleGetFunction"))(&function, module, "empty"), "cuModuleGetFunction");
    check(((int (*)(void **, unsigned))found("cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    for (int i = 0; i < EVENTS; i++) {
        check(create(&plain[i], 2), "cuEventCreate"); /* no timing */
        check(create(&timed[i], 0), "cuEventCreate");
        check(create(&interprocess[i], 4 | 2), "cuEventCreate");
    }
    elapsed = found("cuEventElapsedTime");
    write_value = found("cuStreamWriteValue32_v2");
    void *host;
    check(((int (*)(void **, size_t, unsigned))found("cuMemHostAlloc"))(&host, 4096, 1 | 2), "cuMemHostAlloc");
    check(((int (*)(unsigned long long *, void *, unsigned))found("cuMemHostGetDevicePointer_v2"))(&host_word, host, 0), "cuMemHostGetDevicePointer");
    check(create(&ended_interprocess, 4 | 2), "cuEventCreate");
    check(create(&first_timed, 0), "cuEventCreate");
    check(create(&last_timed, 0), "cuEventCreate");
    check(event_record(first_timed, stream), "cuEventRecord");
    check(event_record(last_timed, stream), "cuEventRecord");
    check(event_record(ended_interprocess, stream), "cuEventRecord");
    check(create(&ended, 2), "cuEventCreate");
    check(create(&pending, 2), "cuEventCreate");
    check(event_record(ended, stream), "cuEventRecord");
    queued_blocks = blocks_of();
    pthread_create(&threads[0], NULL, asker, NULL);
    pthread_create(&threads[1], NULL, reader, NULL);
    printf("%-46s%8s%10s%10s%10s\n", "ns more for each launch", "GPU", "median", "95 % from", "to");
    for (asks = 0; asks < 2; asks++) {
        if (asks) printf("while another thread asks about the stream\n");
        for (int state = IDLE; state <= BEHIND; state++)
            for (int call = 0; call < CALL_COUNT; call++) measure(state, call, rounds);
    }
    stops = 1;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    return 0;
}
