/* What experiments in C share: the driver's library by name, its errors, and the clock. */
#ifndef EXPERIMENTS_DRIVER_H
#define EXPERIMENTS_DRIVER_H

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void *library;

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static void check(int result, const char *what) {
    if (result != 0) {
        fprintf(stderr, "%s: %s returned %d\n", program_invocation_short_name, what, result);
        exit(1);
    }
}
static void *found(const char *name) {
    void *address = dlsym(library, name);
    if (!address) {
        fprintf(stderr, "%s: no %s\n", program_invocation_short_name, name);
        exit(1);
    }
    return address;
}
/* For qsort, of doubles. */
static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

#endif
