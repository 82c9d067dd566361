/* A CUDA program for containers without Python: it prints what it has, and may hold memory.
 * probe [MIB]...: cuInit's answer, the number of devices, the total memory in MiB, and the answer to each allocation.
 * With PROBE_WAIT in its arguments it then waits for a line. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*call)();

static call find(void *library, const char *name) {
    call found = (call)dlsym(library, name);
    if (!found) {
        printf("no %s\n", name);
        exit(3);
    }
    return found;
}

int main(int count, char **arguments) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int devices = 0, wait = 0;
    size_t free_bytes = 0, total = 0;
    if (!driver) {
        puts("no driver");
        return 2;
    }
    int answer = find(driver, "cuInit")(0);
    printf("init %d", answer);
    if (answer == 0) {
        find(driver, "cuDeviceGetCount")(&devices);
        answer = find(driver, "cuDevicePrimaryCtxRetain")(&context, 0);
        find(driver, "cuCtxSetCurrent")(context);
        find(driver, "cuMemGetInfo_v2")(&free_bytes, &total);
        printf(" context %d devices %d total %zu", answer, devices, total >> 20);
        for (int i = 1; i < count; i++) {
            unsigned long long address = 0;
            if (!strcmp(arguments[i], "wait")) wait = 1;
            else printf(" allocated %d", find(driver, "cuMemAlloc_v2")(&address, (size_t)atol(arguments[i]) << 20));
        }
    }
    puts("");
    fflush(stdout);
    if (wait) getchar();
    return answer != 0;
}
