/* A switch between the hook's launches and the driver's own, for one benchmark (parts/gate.py): what one training process
 * loses by the gate can only be told by the process itself, in turns.
 *
 *   cc -O2 -shared -fPIC -o bypass.so bypass.c -ldl
 *   LD_PRELOAD=bypass.so vgpuctl run --sm 100 --mem 20G -- python -m benchmarks.suite.workloads.gate_toggle ...
 *
 * Preloaded before the hook, it hands out launching functions of its own, which go on to the hook's or, while
 * bypass_direct is set, to libcuda's. The hook knows nothing of it and offers nothing for it: preloading is cooperative,
 * and whoever can preload this can as well leave the hook out. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "../../past_hook.h"

volatile int bypass_direct;         /* the switch, set by the program through its own symbol table */
uint64_t bypass_launches[2];        /* through the hook, past it; of threads that never launch at the same time */

typedef int (*address_t)(const char *, void **, int, uint64_t, void *);

static void *(*next_dlsym)(void *, const char *);  /* the hook's, where there is one */
static address_t next_address;

#define LAUNCHES(X)                                                                                                    \
    X(cuLaunchKernel, (void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **p, void **x), (f, a, b, c, d, e, g, h, s, p, x)) \
    X(cuLaunchKernel_ptsz, (void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s, void **p, void **x), (f, a, b, c, d, e, g, h, s, p, x)) \
    X(cuLaunchKernelEx, (void *q, void *f, void **p, void **x), (q, f, p, x))                                          \
    X(cuLaunchKernelEx_ptsz, (void *q, void *f, void **p, void **x), (q, f, p, x))                                     \
    X(cuGraphLaunch, (void *g, void *s), (g, s))                                                                       \
    X(cuGraphLaunch_ptsz, (void *g, void *s), (g, s))

#define DEFINE(name, parameters, arguments)                                                                            \
    static int (*name##_to[2]) parameters;                                                                             \
    static int name##_switched parameters {                                                                            \
        int direct = bypass_direct;                                                                                    \
        bypass_launches[direct]++;                                                                                     \
        return name##_to[direct] arguments;                                                                            \
    }
LAUNCHES(DEFINE)

static struct {
    const char *name;
    void **to;
    void *switched;
} switches[] = {
#define LIST(name, parameters, arguments) {#name, (void **)name##_to, (void *)name##_switched},
    LAUNCHES(LIST)
};

/* Our function of that name, if it is one of those, instead of `found`; NULL if not. */
static void *switched(const char *name, void *found) {
    for (unsigned i = 0; found && i < sizeof switches / sizeof *switches; i++) {
        if (strcmp(name, switches[i].name)) continue;
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        switches[i].to[1] = past_hook(library, name);
        switches[i].to[0] = found;
        return switches[i].to[1] ? switches[i].switched : NULL;
    }
    return NULL;
}

static int address(const char *symbol, void **found, int version, uint64_t flags, void *status) {
    char name[128];
    int result = next_address(symbol, found, version, flags, status);
    if (result || !symbol || !found || !*found || strlen(symbol) > 100) return result;
    if (!strcmp(symbol, "cuGetProcAddress") && version >= 12000) {
        next_address = (address_t)*found;
        *found = (void *)address;
        return result;
    }
    strcpy(name, symbol);
    if (flags & 2) strcat(name, "_ptsz"); /* per-thread default stream */
    void *ours = switched(name, *found);
    if (ours) *found = ours;
    return result;
}

__attribute__((constructor)) static void find(void) {
    next_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
#if defined(__x86_64__)
    if (!next_dlsym) next_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
#else
    if (!next_dlsym) next_dlsym = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
#endif
}

static int wanted(const char *name) {
    if (!strcmp(name, "cuGetProcAddress_v2")) return 1;
    for (unsigned i = 0; i < sizeof switches / sizeof *switches; i++)
        if (!strcmp(name, switches[i].name)) return 1;
    return 0;
}

void *dlsym(void *restrict handle, const char *restrict name) {
    if (!next_dlsym) find(); /* somebody else's constructor came first */
    if (!wanted(name)) return next_dlsym(handle, name); /* a jump at -O2: RTLD_NEXT is about our caller */
    void *found = next_dlsym(handle, name);
    if (found && !strcmp(name, "cuGetProcAddress_v2")) {
        next_address = (address_t)found;
        return (void *)address;
    }
    void *ours = switched(name, found);
    return ours ? ours : found;
}
