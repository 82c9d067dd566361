// What the GPU itself needs to go from one process's work to another's: the floor of every hand-over without MPS.
//
//     nvcc -O2 -o switch benchmarks/gpu/switch.cu && ./switch [ROUNDS]
//
// Process B has a queue behind a word that its stream waits for (cuStreamWaitValue32); process A runs a queue of kernels
// of 50 us, all by %globaltimer. When a given number of A's kernels is still to run, the word is advanced. Printed: from
// A's last end to B's first start, and by how much A was held up. "both at once": the hardware's own time slices.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long u64;
enum { KERNELS = 60, LENGTH_NS = 50000, MOST_ROUNDS = 1000, CASES = 8 };

struct Shared {
    alignas(4096) volatile unsigned word;        // what B's stream waits for
    alignas(4096) volatile unsigned ready[2];    // rounds that A, B have queued
    volatile unsigned done[2];
    volatile unsigned go;
    u64 start[2][KERNELS], end[2][KERNELS];      // of the last round
};

static const int LEFT[CASES] = {0, 0, 1, 2, 4, 8, 16, KERNELS};   // A's kernels still to run when the word moves

#define CHECK(call) do { int r_ = (int)(call); if (r_) { fprintf(stderr, "%s: %d\n", #call, r_); exit(1); } } while (0)

__global__ void work(u64 *start, u64 *end, unsigned length_ns) {
    u64 now, begin;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < length_ns);
    if (blockIdx.x == 0 && threadIdx.x == 0) { *start = begin; __threadfence_system(); *(volatile u64 *)end = now; }
}

static void until(volatile unsigned *word, unsigned value) { while (*word < value) sched_yield(); }

static void process(Shared *all, int who, int rounds) {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(0));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaHostRegister((void *)&all->word, 4096, cudaHostRegisterMapped | cudaHostRegisterPortable));
    void *word;
    CHECK(cudaHostGetDevicePointer(&word, (void *)&all->word, 0));
    u64 *times, *device;
    CHECK(cudaHostAlloc(&times, 2 * KERNELS * sizeof(u64), cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&device, times, 0));
    work<<<132, 64, 0, stream>>>(device, device + KERNELS, 1000);
    CHECK(cudaStreamSynchronize(stream));
    CUresult (*wait_for_word)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", (void **)&wait_for_word, 12000, cudaEnableDefault, &found));
    unsigned round = 0;
    for (int which = 0; which < CASES; which++)
        for (int i = 0; i < rounds; i++) {
            round++;
            until(&all->go, round);
            std::fill(times, times + 2 * KERNELS, 0);
            if (who == 1) CHECK(wait_for_word((CUstream)stream, (CUdeviceptr)word, round, CU_STREAM_WAIT_VALUE_GEQ));
            else until(&all->ready[1], round);
            for (int k = 0; k < KERNELS; k++)
                work<<<132, 64, 0, stream>>>(device + k, device + KERNELS + k, LENGTH_NS);
            all->ready[who] = round;
            if (who == 0) {
                volatile u64 *ends = times + KERNELS;
                int left = LEFT[which];
                if (left < KERNELS) while (ends[KERNELS - 1 - left] == 0) {}
                // the first case leaves the GPU idle for a moment, so that A is out of the way
                if (which == 0) { timespec t = {0, 2000000}; nanosleep(&t, nullptr); }
                all->word = round;
            }
            CHECK(cudaStreamSynchronize(stream));
            for (int k = 0; k < KERNELS; k++) { all->start[who][k] = times[k]; all->end[who][k] = times[KERNELS + k]; }
            __sync_synchronize();
            all->done[who] = round;
        }
    exit(0);
}

static double part(std::vector<double> &v, double p) {
    if (v.empty()) return 0;
    std::sort(v.begin(), v.end());
    return v[std::min(v.size() - 1, (size_t)(p * v.size()))];
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? std::min(atoi(argv[1]), (int)MOST_ROUNDS) : 200;
    Shared *all = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int who = 0; who < 2; who++) if (fork() == 0) process(all, who, rounds);
    unsigned round = 0;
    printf("%-34s %28s %28s %10s\n", "word moves", "gap us p10/50/90/99", "A late us p10/50/90/99", "switches");
    for (int which = 0; which < CASES; which++) {
        std::vector<double> gap, late, slices, switching;
        double switches = 0;
        for (int i = 0; i < rounds; i++) {
            round++;
            all->go = round;
            for (int who = 0; who < 2; who++)
                while (all->done[who] < round) { if (waitpid(-1, nullptr, WNOHANG) > 0) return 1; sched_yield(); }
            u64 *sa = all->start[0], *ea = all->end[0], *sb = all->start[1];
            struct Run { u64 start, end; int who; };
            std::vector<Run> order;
            for (int who = 0; who < 2; who++)
                for (int k = 0; k < KERNELS; k++) order.push_back({all->start[who][k], all->end[who][k], who});
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
