/* Threads that launch, allocate, free, copy and synchronise, and are cancelled at random moments.
 *
 *     cancelled PTX-FILE ROUNDS DEED        DEED: launch, memory, both, or wait
 *
 * With "wait" only the cancelled threads launch, and the last word comes before the program's own launch. Prints "cancelled N" once every thread has ended by its cancellation, then waits for a line and ends. The driver is
 * opened by name, so that a preloaded hook and the bare driver run the same program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CALL(name, ...) ((int (*)())driver(name))(__VA_ARGS__)
#define CHECK(name, ...) do { int code_ = CALL(name, __VA_ARGS__); if (code_) die(name, code_); } while (0)

static void *library, *context, *function;
static const char *deed;
static uint64_t held; /* what the thread had allocated and not freed yet */

static void *driver(const char *name) {
    void *found = dlsym(library, name);
    if (!found) { fprintf(stderr, "%s: not there\n", name); exit(2); }
    return found;
}

static void die(const char *name, int code) {
    fprintf(stderr, "%s: %d\n", name, code);
    exit(2);
}

static void launch(void) {
    uint64_t target = 0;
    uint32_t iterations = 30;
    void *parameters[] = {&target, &iterations};
    CHECK("cuLaunchKernel", function, 8, 1, 1, 256, 1, 1, 0, (void *)0, parameters, (void **)0);
}

static void allocate(void) {
    CHECK("cuMemAlloc_v2", &held, (size_t)(3 << 20));
    CHECK("cuMemsetD8_v2", held, 0, (size_t)(3 << 20));
    CHECK("cuMemFree_v2", held);
    held = 0;
}

static void *work(void *ignored) {
    (void)ignored;
    CHECK("cuCtxSetCurrent", context);
    for (unsigned i = 0;; i++) {
        if (deed[0] != 'm') launch();
        if (deed[0] == 'm' || deed[0] == 'b') allocate();
        if (i % 16 == 15) CHECK("cuCtxSynchronize");
    }
    return NULL;
}

int main(int argc, char **argv) {
    static char text[1 << 20];
    FILE *file = fopen(argv[1], "r");
    int rounds = atoi(argv[2]), device, i;
    void *module, *result;
    deed = argc > 3 ? argv[3] : "both";
    if (!file || !fread(text, 1, sizeof(text) - 1, file)) return 2;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return 2;
    srand(1);
    CHECK("cuInit", 0);
    CHECK("cuDeviceGet", &device, 0);
    CHECK("cuDevicePrimaryCtxRetain", &context, device);
    CHECK("cuCtxSetCurrent", context);
    CHECK("cuModuleLoadData", &module, text);
    CHECK("cuModuleGetFunction", &function, module, "compute");
    puts("ready");
    fflush(stdout);
    for (i = 0; i < rounds; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL)) return 2;
        usleep(deed[0] == 'w' ? 20000 : rand() % 4000);
        pthread_cancel(thread);
        pthread_join(thread, &result);
        if (result != PTHREAD_CANCELED) return 3;
        if (held) CALL("cuMemFree_v2", held); /* it may have been freed just before */
        held = 0;
    }
    if (deed[0] == 'w') {
        printf("cancelled %d\n", rounds);
        fflush(stdout);
    }
    launch();
    allocate();
    CHECK("cuCtxSynchronize");
    if (deed[0] != 'w') {
        printf("cancelled %d\n", rounds);
        fflush(stdout);
    }
    getchar();
    return 0;
}
