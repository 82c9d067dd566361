/* The first process of a container: keeps COUNT programs alive, each of which allocates, uses and frees device memory
 * until a signal ends it. churn COUNT */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HELD = 8, MOST_MIB = 64 };
typedef int (*call)();

static void work(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver) _exit(2);
    call init = (call)dlsym(driver, "cuInit"), retain = (call)dlsym(driver, "cuDevicePrimaryCtxRetain");
    call use = (call)dlsym(driver, "cuCtxSetCurrent"), allocate = (call)dlsym(driver, "cuMemAlloc_v2");
    call fill = (call)dlsym(driver, "cuMemsetD8_v2"), release = (call)dlsym(driver, "cuMemFree_v2");
    if (init(0) || retain(&context, 0) || use(context)) _exit(3);
    srand(getpid());
    unsigned long long held[HELD] = {0};
    for (unsigned i = 0;; i = rand() % HELD) {
        if (held[i] && release(held[i])) _exit(4);
        size_t bytes = (size_t)(1 + rand() % MOST_MIB) << 20;
        if (allocate(&held[i], bytes)) held[i] = 0; /* the vGPU is full */
        else if (fill(held[i], 0, bytes)) _exit(5);
    }
}

int main(int count, char **arguments) {
    int programs = count > 1 ? atoi(arguments[1]) : 1, alive = 0, status;
    for (;;) {
        for (; alive < programs; alive++)
            if (fork() == 0) work();
        if (wait(&status) > 0) alive--;
        if (WIFEXITED(status)) { /* a program ends by a signal alone */
            printf("program ended with %d\n", WEXITSTATUS(status));
            fflush(stdout);
            usleep(100000);
        }
    }
}
