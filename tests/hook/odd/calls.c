/* Calls the driver's functions with null pointers, sizes of nothing and wrong handles, one case after another from the
 * FIRST on, and prints of each: its number, the result, which words of its results were written. A case that ends the
 * process is its last; the caller goes on behind it with another one. cases.h has CASES, written by odd/cases.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long word;
struct test { const char *name, *kinds; int fresh; };
static const struct test cases[] = {
#include "cases.h"
};
enum { COUNT = sizeof cases / sizeof *cases, WORDS = 512, MOST = 16 };
static word buffers[MOST][WORDS];
static int now;

static void died(int number) {
    char line[64];
    int size = snprintf(line, sizeof line, "%d signal %d\n", now, number);
    if (write(1, line, size) < 0) _exit(1);
    _exit(0);
}
static int call(void *f, const word *a) {
    return ((int (*)(word, word, word, word, word, word, word, word, word, word, word, word, word, word))f)(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]);
}
static int named(void *driver, const char *name, word a, word b, word c) {
    word all[MOST] = {a, b, c};
    return call(dlsym(driver, name), all);
}
int main(int argc, char **argv) {
    void *driver = dlopen(argv[1], RTLD_NOW), *nvml = dlopen(argv[2], RTLD_NOW);
    word context = 0, stream = 0, event = 0, memory = 0, device = 0;
    if (!driver || named(driver, "cuInit", 0, 0, 0)) return 2;
    named(driver, "cuDevicePrimaryCtxRetain", (word)&context, 0, 0);
    named(driver, "cuCtxSetCurrent", context, 0, 0);
    named(driver, "cuStreamCreate", (word)&stream, 1, 0);
    named(driver, "cuEventCreate", (word)&event, 0, 0);
    named(driver, "cuMemAlloc_v2", (word)&memory, 4 << 20, 0);
    if (nvml) {
        void *init = dlsym(nvml, "nvmlInit_v2"), *get = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
        word none[MOST] = {0}, first[MOST] = {0, (word)&device};
        if (init) call(init, none);
        if (get) call(get, first);
    }
    signal(SIGSEGV, died), signal(SIGBUS, died), signal(SIGFPE, died), signal(SIGABRT, died), signal(SIGALRM, died);
    for (now = atoi(argv[3]); now < COUNT; now++) {
        const struct test *t = &cases[now];
        void *f = dlsym(strncmp(t->name, "nvml", 4) ? driver : nvml, t->name);
        word a[MOST] = {0}, written[MOST] = {0};
        int i, k, result;
        if (!f) { printf("%d none\n", now); continue; }
        memset(buffers, 0, sizeof buffers);
        for (i = 0; t->kinds[i]; i++) {
            switch (t->kinds[i]) {
            case 's': a[i] = stream; break;
            case 'c': a[i] = context; break;
            case 'e': a[i] = event; break;
            case 'm': a[i] = memory; break;
            case 'd': a[i] = device; break;
            case 'n': a[i] = 64; break;                   /* a size */
            case '1': a[i] = 1; break;
            case 'x': a[i] = ~0ull; break;                /* as large as can be */
            case 'o': a[i] = (word)buffers[i]; break;     /* a pointer, or a handle that is none */
            }                                             /* else 0 */
        }
        alarm(20);
        result = call(f, a);
        alarm(0);
        for (i = 0; t->kinds[i]; i++)
            for (k = 0; k < 64; k++)
                if (buffers[i][k]) written[i] |= 1ull << k;
        printf("%d %d", now, result);
        for (i = 0; t->kinds[i]; i++) printf(" %llx", written[i]);
        printf("\n");
        fflush(stdout);
        if (t->fresh) break;
    }
    fflush(stdout);
    _exit(0);
}
