// What the GPU itself needs to go from one process's work to another's: the floor of every hand-over without MPS.
//
//     nvcc -O2 -o switch benchmarks/experiments/context_switch.cu && ./switch [ROUNDS]
//     ./switch ahead [ROUNDS]
//
// Process B has a queue behind a word that its stream waits for (cuStreamWaitValue32); process A runs a queue of kernels
// of 50 us, all by %globaltimer. When a given number of A's kernels is still to run, the word is advanced. Printed: from
// A's last end to B's first start, and by how much A was held up. "both at once": the hardware's own time slices.
//
// ahead: a hand-over as the hook makes it (cython_ext/hook/gate/prequeue.pyx). A's last kernels are of 500 us; B is let in at
// a given time after the last one's end (below 0: before it). And A queues its next work behind a word of its own, from
// a given time on, for half a millisecond, as a program that fills a window of 12 ms; or, as a control, it does not.
// Printed for each pair of times: from when B could run (A has ended, B's word has moved) to its first start; how often
// that took more than 1 ms, and all of those; how often B began before A's end. A minute with 130 rounds. Every wait is
// bounded: on the GPU by the process's own word, on the host by PATIENCE_S.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <vector>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef long long i64;
enum { KERNELS = 60, LENGTH_NS = 50000, MOST_ROUNDS = 1000, CASES = 8, PATIENCE_S = 20 };

struct Round {                                   // of ./switch ahead; what is not measured is chosen by main
    int queues_us, lets_in_us;                   // after A's last end; queues_us: NEVER for the control
    int kernels, first_ns;                       // of A; how long its first one takes
    i64 seen_ns[2];                              // when A, B saw that end, on the host's clock
    i64 queues_ns, queued_ns, let_in_ns;         // when A began to queue, and had; when B's word had moved
};

struct Shared {
    alignas(4096) volatile unsigned word[2][1024];   // what A's, B's stream waits for: the first of a page of its own
    alignas(4096) volatile u64 stamps[2][512];       // ./switch ahead: kernel k of A, B started (2k) and ended (2k + 1)
    alignas(4096) volatile unsigned ready[2];    // rounds that A, B have queued
    volatile unsigned done[2];
    volatile unsigned go;
    Round round;
    u64 start[2][KERNELS], end[2][KERNELS];      // of the last round
};

static const int LEFT[CASES] = {0, 0, 1, 2, 4, 8, 16, KERNELS};   // A's kernels still to run when the word moves

static Shared *shared;
static int self = -1;                            // 0: A, 1: B

// Whatever goes wrong: what waits on the GPU for a word runs, so that nobody's end has to wait for it.
static void let_go() { for (int who = 0; shared && who < 2; who++) shared->word[who][0] += 1 << 24; }

static void fail(const char *what, int code) {
    fprintf(stderr, "%c: %s: %d\n", "*AB"[1 + self], what, code);
    let_go();
    exit(1);
}
#define CHECK(call) do { int r_ = (int)(call); if (r_) fail(#call, r_); } while (0)

static i64 now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

__global__ void work(u64 *start, u64 *end, unsigned length_ns) {
    u64 now, begin;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < length_ns);
    if (blockIdx.x == 0 && threadIdx.x == 0) { *start = begin; __threadfence_system(); *(volatile u64 *)end = now; }
}

static void until(volatile unsigned *word, unsigned value) {
    for (i64 end = now_ns() + PATIENCE_S * 1000000000LL; *word < value; sched_yield())
        if (now_ns() > end) fail("waited in vain for round", value);
}

typedef CUresult (*WaitValue)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

static i64 until_noted(volatile u64 *stamp) {    // by a kernel; the time at which it was seen
    for (i64 end = now_ns() + PATIENCE_S * 1000000000LL; *stamp == 0;)
        if (now_ns() > end) fail("waited in vain for a kernel", 0);
    return now_ns();
}

// A process's own stream, and what it needs to have it wait for a page of host memory, as the hook does.
struct Side {
    cudaStream_t stream;
    CUdeviceptr word;
    WaitValue wait;
};

static void *registered(volatile void *page) {
    void *device;
    CHECK(cudaHostRegister((void *)page, 4096, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&device, (void *)page, 0));
    return device;
}

static Side begin(int who) {
    Side side;
    self = who;
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL));
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(0));
    CHECK(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
    side.word = (CUdeviceptr)registered(shared->word[who]);
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&side.wait, 12000, cudaEnableDefault,
                                           &found));
    CHECK(found != cudaDriverEntryPointSuccess);
    return side;
}

static void process(int who, int rounds) {
    Side side = begin(who);
    cudaStream_t stream = side.stream;
    u64 *times, *device;
    CHECK(cudaHostAlloc(&times, 2 * KERNELS * sizeof(u64), cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&device, times, 0));
    work<<<132, 64, 0, stream>>>(device, device + KERNELS, 1000);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(stream));
    unsigned round = 0;
    for (int which = 0; which < CASES; which++)
        for (int i = 0; i < rounds; i++) {
            round++;
            until(&shared->go, round);
            std::fill(times, times + 2 * KERNELS, 0);
            if (who == 1) CHECK(side.wait(stream, side.word, round, CU_STREAM_WAIT_VALUE_GEQ));
            else until(&shared->ready[1], round);
            for (int k = 0; k < KERNELS; k++)
                work<<<132, 64, 0, stream>>>(device + k, device + KERNELS + k, LENGTH_NS);
            CHECK(cudaGetLastError());
            shared->ready[who] = round;
            if (who == 0) {
                volatile u64 *ends = times + KERNELS;
                int left = LEFT[which];
                if (left < KERNELS) until_noted(&ends[KERNELS - 1 - left]);
                // the first case leaves the GPU idle for a moment, so that A is out of the way
                if (which == 0) { timespec t = {0, 2000000}; nanosleep(&t, nullptr); }
                shared->word[1][0] = round;
            }
            CHECK(cudaStreamSynchronize(stream));
            for (int k = 0; k < KERNELS; k++) {
                shared->start[who][k] = times[k];
                shared->end[who][k] = times[KERNELS + k];
            }
            __sync_synchronize();
            shared->done[who] = round;
        }
    exit(0);
}

// --- ahead

enum { NEVER = INT_MAX, CONTROLS = 6 };
enum { LONG_NS = 500000, PAUSE_NS = 1200, LEAST = 5, MORE = 5 };                // A's kernels
enum { NEXT = 24, NEXT_NS = 30000, PACE_NS = 20000 };                           // of both, queued ahead
static const int QUEUES[] = {NEVER, -1000, -800, -600, -400, -300, -200, -150, -100, -50,
                             0, 50, 100, 150, 200, 300, 400, 600};
static const int LETS_IN[] = {-100, 0, 100};
enum { QUEUE_TIMES = sizeof QUEUES / sizeof *QUEUES, LET_IN_TIMES = sizeof LETS_IN / sizeof *LETS_IN };

static volatile u64 *ended(int last) { return &shared->stamps[0][2 * (shared->round.kernels - last) + 1]; }   // A's

static i64 end_seen() {
    i64 *seen_ns = &shared->round.seen_ns[self];
    if (*seen_ns == 0) *seen_ns = until_noted(ended(1));
    return *seen_ns;
}

// Until that time after A's last end, or before it: then by the end of its fourth last kernel.
static i64 until_end(int after_us) {
    i64 at = after_us < 0 ? until_noted(ended(4)) + 3 * (LONG_NS + PAUSE_NS) : end_seen();
    while (now_ns() < at + after_us * 1000LL) {}
    return now_ns();
}

// What hook and program submit where a launch has to wait: an event behind what runs, the wait, kernels with an event
// each, one every so often.
static void queue_behind(const Side *side, unsigned round, u64 *device, cudaEvent_t *events, int pace_ns) {
    i64 next = now_ns();
    CHECK(cudaEventRecord(events[0], side->stream));
    CHECK(side->wait(side->stream, side->word, round, CU_STREAM_WAIT_VALUE_GEQ));
    for (int k = 0; k < NEXT; k++, next += pace_ns) {
        while (now_ns() < next) {}
        work<<<132, 64, 0, side->stream>>>(device + 2 * k, device + 2 * k + 1, NEXT_NS);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(events[1 + k], side->stream));
    }
}

static void handing_over(int who, unsigned rounds) {
    Side side = begin(who);
    u64 *device = (u64 *)registered(shared->stamps[who]);
    cudaEvent_t events[1 + NEXT];
    CHECK(cudaEventCreateWithFlags(&events[0], cudaEventDisableTiming));
    for (int k = 1; k <= NEXT; k++) CHECK(cudaEventCreate(&events[k]));
    work<<<132, 64, 0, side.stream>>>(device, device + 1, 1000);
    CHECK(cudaGetLastError());
    CHECK(cudaStreamSynchronize(side.stream));
    for (unsigned round = 1; round <= rounds; round++) {
        until(&shared->go, round);
        Round *my = &shared->round;
        memset((void *)shared->stamps[who], 0, 4096);
        if (who == 1) {
            queue_behind(&side, round, device, events, 0);
            shared->ready[1] = round;
            until(&shared->ready[0], round);
            until_end(my->lets_in_us);
            shared->word[1][0] = round;
            my->let_in_ns = now_ns();
            end_seen();
        } else {
            until(&shared->ready[1], round);
            for (int k = 0; k < my->kernels; k++) {
                work<<<132, 64, 0, side.stream>>>(device + 2 * k, device + 2 * k + 1, k ? LONG_NS : my->first_ns);
                CHECK(cudaGetLastError());
                CHECK(cudaEventRecord(events[NEXT], side.stream));
            }
            shared->ready[0] = round;
            if (my->queues_us != NEVER) {
                my->queues_ns = until_end(my->queues_us);
                queue_behind(&side, round, device + 2 * my->kernels, events, PACE_NS);
                my->queued_ns = now_ns();
            }
            end_seen();
            until(&shared->done[1], round);      // A's next turn comes when B's is over
            shared->word[0][0] = round;
        }
        CHECK(cudaStreamSynchronize(side.stream));
        __sync_synchronize();
        shared->done[who] = round;
    }
    exit(0);
}

static double part(std::vector<double> &v, double p) {
    if (v.empty()) return 0;
    std::sort(v.begin(), v.end());
    return v[std::min(v.size() - 1, (size_t)(p * v.size()))];
}

static bool both_done(unsigned round) {          // false: one has failed. After the last round they end, and well
    int status;
    shared->go = round;
    for (int who = 0; who < 2; who++)
        for (; shared->done[who] < round; sched_yield())
            if (waitpid(-1, &status, WNOHANG) > 0 && status != 0) { let_go(); return false; }
    return true;
}

static unsigned dice() {                         // the same every time
    static unsigned state = 1;
    return (state = state * 1664525u + 1013904223u) >> 8;
}

struct Found { std::vector<double> gap, queues, queued, let_in; int over, early; };

static void tell(const char *when, const char *let_in, Found *of) {
    double p50 = part(of->gap, .5), p90 = part(of->gap, .9), p99 = part(of->gap, .99), longest = part(of->gap, 1);
    printf("%-16s %-16s %6zu %7.0f %6.0f %6.0f %7.0f %9d %9d   %7.0f %6.0f %6.0f\n", when, let_in, of->gap.size(), p50,
           p90, p99, longest, of->over, of->early, part(of->queues, .5), part(of->queued, .5), part(of->let_in, .5));
    fflush(stdout);
}

static void add(Found *to, const Found *more) {
    to->gap.insert(to->gap.end(), more->gap.begin(), more->gap.end());
    to->queues.insert(to->queues.end(), more->queues.begin(), more->queues.end());
    to->queued.insert(to->queued.end(), more->queued.begin(), more->queued.end());
    to->let_in.insert(to->let_in.end(), more->let_in.begin(), more->let_in.end());
    to->over += more->over;
    to->early += more->early;
}

// Every pair of times once, the controls several times, in another order each time: what the host does meets all alike.
static int ahead(int rounds) {
    static Found found[QUEUE_TIMES][LET_IN_TIMES];
    std::vector<int> order;
    for (int i = 0; i < QUEUE_TIMES * LET_IN_TIMES; i++)
        order.insert(order.end(), QUEUES[i / LET_IN_TIMES] == NEVER ? CONTROLS : 1, i);
    for (int who = 0; who < 2; who++) if (fork() == 0) handing_over(who, rounds * order.size());
    unsigned round = 0;
    printf("each over 1 ms: A queues, B is let in, asked and done, us after A's last end; gap; how long A had run\n");
    for (int i = 0; i < rounds; i++) {
        for (size_t k = order.size() - 1; k > 0; k--) std::swap(order[k], order[dice() % (k + 1)]);
        for (int one : order) {
            Round *my = &shared->round;
            Found *cell = &found[one / LET_IN_TIMES][one % LET_IN_TIMES];
            memset(my, 0, sizeof *my);
            my->queues_us = QUEUES[one / LET_IN_TIMES];
            my->lets_in_us = LETS_IN[one % LET_IN_TIMES];
            my->kernels = LEAST + dice() % MORE;
            my->first_ns = 1000 + dice() % LONG_NS;      // so that A's time slices end anywhere
            __sync_synchronize();
            if (!both_done(++round)) return 1;
            i64 end = shared->stamps[0][2 * my->kernels - 1], start = shared->stamps[1][0];
            i64 seen = std::min(my->seen_ns[0], my->seen_ns[1]);
            double let_in = (my->let_in_ns - seen) / 1e3, queues = (my->queues_ns - seen) / 1e3;
            double gap = (start - end) / 1e3 - std::max(0., let_in);     // what the host is late with is not the GPU's
            double ran = (end - (i64)shared->stamps[0][0]) / 1e3;
            if (start < end) cell->early++;
            else cell->gap.push_back(gap);
            cell->let_in.push_back(let_in);
            if (my->queues_us != NEVER) {
                cell->queues.push_back(queues);
                cell->queued.push_back((my->queued_ns - seen) / 1e3);
            }
            if (start < end || gap <= 1000) continue;
            cell->over++;
            if (my->queues_us == NEVER) printf("    nothing     ");
            else printf("    %5d %6.0f", my->queues_us, queues);
            printf("     %5d %6.0f   %6.0f %6.0f\n", my->lets_in_us, let_in, gap, ran);
        }
    }
    printf("\n%-16s %-16s %6s %7s %6s %6s %7s %9s %9s   %s\n", "A queues at us", "B is let in at", "gaps", "p50 us",
           "p90", "p99", "longest", "over 1 ms", "before A", "p50 of what was done: A queues, has queued, B is let in");
    Found with = {}, without = {};
    for (int r = 0; r < LET_IN_TIMES; r++)
        for (int d = 0; d < QUEUE_TIMES; d++) {
            char when[32], let_in[32];
            snprintf(when, sizeof when, QUEUES[d] == NEVER ? "nothing" : "%d", QUEUES[d]);
            snprintf(let_in, sizeof let_in, "%d", LETS_IN[r]);
            add(QUEUES[d] == NEVER ? &without : &with, &found[d][r]);
            tell(when, let_in, &found[d][r]);
        }
    tell("nothing", "all", &without);
    tell("all", "all", &with);
    while (wait(nullptr) > 0) {}
    return 0;
}

static void make_shared() {                      // a memfd, as the hook's page is
    int fd = memfd_create("switch", MFD_CLOEXEC);
    CHECK(fd < 0);
    CHECK(ftruncate(fd, sizeof(Shared)));
    void *at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at == MAP_FAILED);
    shared = (Shared *)at;
}

int main(int argc, char **argv) {
    bool queueing_ahead = argc > 1 && strcmp(argv[1], "ahead") == 0;
    const char *asked = argc > 1 + queueing_ahead ? argv[1 + queueing_ahead] : queueing_ahead ? "130" : "200";
    int rounds = std::min(atoi(asked), (int)MOST_ROUNDS);
    make_shared();
    if (queueing_ahead) return ahead(rounds);
    for (int who = 0; who < 2; who++) if (fork() == 0) process(who, rounds);
    unsigned round = 0;
    printf("%-34s %28s %28s %10s\n", "word moves", "gap us p10/50/90/99", "A late us p10/50/90/99", "switches");
    for (int which = 0; which < CASES; which++) {
        std::vector<double> gap, late, slices, switching;
        double switches = 0;
        for (int i = 0; i < rounds; i++) {
            if (!both_done(++round)) return 1;
            u64 *sa = shared->start[0], *ea = shared->end[0], *sb = shared->start[1];
            struct Run { u64 start, end; int who; };
            std::vector<Run> order;
            for (int who = 0; who < 2; who++)
                for (int k = 0; k < KERNELS; k++) order.push_back({shared->start[who][k], shared->end[who][k], who});
            std::sort(order.begin(), order.end(), [](const Run &a, const Run &b) { return a.start < b.start; });
            u64 since = order[0].start;
            for (size_t k = 1; k < order.size(); k++) if (order[k].who != order[k - 1].who) {
                switches++;
                switching.push_back(((double)order[k].start - (double)order[k - 1].end) / 1e3);
                slices.push_back((order[k - 1].end - since) / 1e3);
                since = order[k].start;
            }
            gap.push_back(((double)sb[0] - (double)ea[KERNELS - 1]) / 1e3);
            double pace = (double)(ea[KERNELS / 2 - 1] - sa[0]) / (KERNELS / 2);
            late.push_back(((double)(ea[KERNELS - 1] - sa[0]) - pace * KERNELS) / 1e3);
        }
        char name[64];
        if (which == 0) snprintf(name, sizeof name, "2 ms after A's last end");
        else if (LEFT[which] == KERNELS) snprintf(name, sizeof name, "both at once");
        else snprintf(name, sizeof name, "%d us before A's end", LEFT[which] * LENGTH_NS / 1000);
        printf("%-34s %6.0f %6.0f %6.0f %6.0f  %6.0f %6.0f %6.0f %6.0f %8.1f   slice us %.0f %.0f   gap at a switch %.0f %.0f %.0f\n", name,
               part(gap, .1), part(gap, .5), part(gap, .9), part(gap, .99), part(late, .1), part(late, .5), part(late, .9),
               part(late, .99), switches / rounds, part(slices, .5), part(slices, .9), part(switching, .1), part(switching, .5), part(switching, .9));
        fflush(stdout);
    }
    while (wait(nullptr) > 0) {}
    return 0;
}
