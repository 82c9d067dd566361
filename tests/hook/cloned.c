/* Children that share their parent's memory (clone with CLONE_VM) and launch, as a spawning library's might.
 *
 *     cloned PTX-FILE CHILDREN AT-ONCE BESIDE     BESIDE: threads of the parent that launch meanwhile
 *
 * Prints "children N" once each has ended, then waits for a line. A child has its parent's thread-local storage, but
 * another thread id and process id. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CALL(name, ...) ((int (*)())driver(name))(__VA_ARGS__)
#define CHECK(name, ...) do { int code_ = CALL(name, __VA_ARGS__); if (code_) die(name, code_); } while (0)
#define MOST 16
#define STACK (1 << 18)

static void *library, *context, *function;
static char stacks[MOST][STACK] __attribute__((aligned(64)));
static volatile int over;

static void *driver(const char *name) {
    void *found = dlsym(library, name);
    if (!found) _exit(2);
    return found;
}

static void die(const char *name, int code) {
    fprintf(stderr, "%s: %d\n", name, code);
    _exit(2);
}

static void launch(void) {
    uint64_t target = 0;
    uint32_t iterations = 30;
    void *parameters[] = {&target, &iterations};
    CHECK("cuLaunchKernel", function, 8, 1, 1, 256, 1, 1, 0, (void *)0, parameters, (void **)0);
}

static int child(void *ignored) {
    uint64_t address;
    (void)ignored;
    launch();
    CHECK("cuMemAlloc_v2", &address, (size_t)(3 << 20));
    CHECK("cuMemFree_v2", address);
    launch();
    return 0;
}

static void *beside(void *ignored) {
    (void)ignored;
    CHECK("cuCtxSetCurrent", context);
    while (!over) {
        launch();
        usleep(100);
    }
    return NULL;
}

int main(int argc, char **argv) {
    static char text[1 << 20];
    FILE *file = fopen(argv[1], "r");
    int children = atoi(argv[2]), at_once = atoi(argv[3]), others = atoi(argv[4]), device, done = 0, i;
    pthread_t threads[MOST];
    void *module;
    if (argc < 5 || at_once > MOST || others > MOST || !file || !fread(text, 1, sizeof(text) - 1, file)) return 2;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return 2;
    CHECK("cuInit", 0);
    CHECK("cuDeviceGet", &device, 0);
    CHECK("cuDevicePrimaryCtxRetain", &context, device);
    CHECK("cuCtxSetCurrent", context);
    CHECK("cuModuleLoadData", &module, text);
    CHECK("cuModuleGetFunction", &function, module, "compute");
    puts("ready");
    fflush(stdout);
    for (i = 0; i < others; i++) pthread_create(&threads[i], NULL, beside, NULL);
    while (done < children) {
        pid_t pids[MOST];
        for (i = 0; i < at_once; i++) {
            pids[i] = clone(child, stacks[i] + STACK, CLONE_VM | SIGCHLD, NULL);
            if (pids[i] < 0) return 2;
        }
        for (i = 0; i < at_once; i++) {
            int status;
            if (waitpid(pids[i], &status, 0) != pids[i] || status != 0) return 3;
        }
        done += at_once;
    }
    over = 1;
    for (i = 0; i < others; i++) pthread_join(threads[i], NULL);
    launch();
    CHECK("cuCtxSynchronize");
    printf("children %d\n", done);
    fflush(stdout);
    getchar();
    return 0;
}
