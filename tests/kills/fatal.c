/* A driver in front of the simulated one, that kills its process at one exact moment: before or after the n-th call of one
 * of the driver's functions. The page FATAL_PAGE, a file, is shared with whoever is interested in that: it says whether
 * calls are counted and at which to die, and keeps the counts. FATAL_DRIVER is the driver behind. functions.h has
 * FUNCTION(name) for each of its functions, written by fatal.py.
 *
 * What the functions take is handed on as sixteen words, whatever it is: as many as there may be, in registers and on the
 * stack. No function takes a floating-point number by value. */
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
#define FUNCTION(name) NUMBER_##name,
#include "functions.h"
#undef FUNCTION
    FUNCTIONS
};

static const char *const names[] = {
#define FUNCTION(name) #name,
#include "functions.h"
#undef FUNCTION
};

struct page {
    _Atomic uint32_t armed;  /* calls are counted */
    uint32_t function, call; /* die there; call 0: never */
    uint32_t after;          /* once it has returned */
    _Atomic uint32_t counts[FUNCTIONS];
};

static struct page *page;
static long (*real[FUNCTIONS])();

__attribute__((constructor)) static void begin(void) {
    void *driver = dlopen(getenv("FATAL_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    int file = open(getenv("FATAL_PAGE"), O_RDWR | O_CLOEXEC);
    page = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (driver == NULL || page == MAP_FAILED) abort();
    close(file);
    for (int i = 0; i < FUNCTIONS; i++) real[i] = (long (*)())dlsym(driver, names[i]);
}

static uint32_t counted(int function) {
    return atomic_load(&page->armed) ? atomic_fetch_add(&page->counts[function], 1) + 1 : 0;
}

static void die_at(int function, uint32_t call, uint32_t after) {
    if (call && call == page->call && (uint32_t)function == page->function && after == page->after) kill(getpid(), SIGKILL);
}

#define FUNCTION(name)                                                                                                       \
    long name(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l, long m, long n, \
              long o, long p) {                                                                                              \
        uint32_t call = counted(NUMBER_##name);                                                                              \
        long result;                                                                                                         \
        die_at(NUMBER_##name, call, 0);                                                                                      \
        result = real[NUMBER_##name](a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);                                        \
        die_at(NUMBER_##name, call, 1);                                                                                      \
        return result;                                                                                                       \
    }
#include "functions.h"
