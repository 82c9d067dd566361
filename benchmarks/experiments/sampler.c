/* Where a thread is, every 50 us: for launch_profile.py, which preloads it beside the hook.
 *
 * The program has an int ``sampled_turn``, and it counts while that is not 0. Of each moment is kept the instruction, and the
 * outermost addresses on the stack that are in the hook's code: the places from which the thread came to where it is, and what
 * frames long gone left among them. No unwinding: the driver has no tables for it, and it takes long. At the end SAMPLES_OUT
 * gets a line for each: the instruction's object and its offset there, the offsets of those places in the hook, innermost first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define MOST 400000
#define EVERY_NS 50000
#define DEEPEST 1024 /* words of the stack */
#define PLACES 8
#if defined(__x86_64__)
#define INSTRUCTION(c) (uint64_t)(c)->uc_mcontext.gregs[REG_RIP]
#define STACK(c) (uint64_t *)(c)->uc_mcontext.gregs[REG_RSP]
#else
#define INSTRUCTION(c) (uint64_t)(c)->uc_mcontext.pc
#define STACK(c) (uint64_t *)(c)->uc_mcontext.sp
#endif

static struct {
    uint64_t instruction, places[PLACES]; /* a ring */
    unsigned found;
} *samples;
static volatile unsigned count;
static uint64_t hook_base, hook_from, hook_to;
static uint64_t *stack_end;
static volatile int *turn;

static void sample(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    uint64_t *stack = STACK((ucontext_t *)context);
    unsigned at = count;
    if (!*turn || at == MOST) return;
    samples[at].instruction = INSTRUCTION((ucontext_t *)context);
    unsigned found = 0;
    for (int i = 0; i < DEEPEST && stack + i < stack_end; i++)
        if (stack[i] >= hook_from && stack[i] < hook_to) samples[at].places[found++ % PLACES] = stack[i];
    samples[at].found = found;
    count = at + 1;
}

static int find_hook(struct dl_phdr_info *object, size_t size, void *nothing) {
    (void)size, (void)nothing;
    if (!strstr(object->dlpi_name, "libvgpu_hook")) return 0;
    hook_base = object->dlpi_addr;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        hook_from = hook_base + part->p_vaddr;
        hook_to = hook_from + part->p_memsz;
    }
    return 1;
}

static void tell(void) {
    FILE *out = fopen(getenv("SAMPLES_OUT"), "w");
    if (!out) return;
    for (unsigned i = 0; i < count; i++) {
        Dl_info found = {0};
        dladdr((void *)samples[i].instruction, &found);
        const char *name = found.dli_fname ? found.dli_fname : "?";
        fprintf(out, "%s %lx", strrchr(name, '/') ? strrchr(name, '/') + 1 : name, samples[i].instruction - (uint64_t)found.dli_fbase);
        for (unsigned k = samples[i].found > PLACES ? samples[i].found - PLACES : 0; k < samples[i].found; k++)
            fprintf(out, " %lx", samples[i].places[k % PLACES] - 1 - hook_base); /* in the call */
        fprintf(out, "\n");
    }
    fclose(out);
}

__attribute__((constructor)) static void begin(void) {
    turn = dlsym(RTLD_DEFAULT, "sampled_turn");
    dl_iterate_phdr(find_hook, NULL);
    if (!turn || !hook_to || !getenv("SAMPLES_OUT")) return;
    pthread_attr_t attributes;
    void *stack;
    size_t size;
    samples = calloc(MOST, sizeof *samples);
    if (!samples || pthread_getattr_np(pthread_self(), &attributes)) return;
    pthread_attr_getstack(&attributes, &stack, &size);
    stack_end = (uint64_t *)((char *)stack + size);
    struct sigaction action = {.sa_sigaction = sample, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMAX};
    event._sigev_un._tid = syscall(SYS_gettid);
    struct itimerspec every = {{0, EVERY_NS}, {0, EVERY_NS}};
    timer_t timer;
    sigaction(SIGRTMAX, &action, NULL);
    if (timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &every, NULL) == 0) atexit(tell);
}
