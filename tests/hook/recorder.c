/* A driver that does nothing and writes down, to the file RECORD, what it is asked: one word a call, in order.
 * L launch, P launch that may overlap with its predecessor, R event recorded, Q event queried, S stream queried,
 * D device asked for, X context destroyed. Streams from 0x1000 on are of context 32, the others of 16, the current one.
 * Lower case: the calling thread's capture mode was not RELAXED. */
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static FILE *record;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int capture_mode = 0; /* GLOBAL */

static void note(char what, void *stream) {
    pthread_mutex_lock(&lock);
    if (!record) record = fopen(getenv("RECORD"), "w");
    fprintf(record, "%c%lx\n", capture_mode == 2 ? what : tolower(what), (unsigned long)stream);
    fflush(record);
    pthread_mutex_unlock(&lock);
}

struct config { unsigned shape[7]; void *stream; struct { int id, pad, value[16]; } *attributes; unsigned count; };

int cuInit(unsigned flags) { return (int)flags; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuCtxSetCurrent(void *context) { return context == NULL; }
int cuCtxGetDevice(int *device) { note('D', NULL); *device = 0; return 0; }
int cuStreamGetFlags(void *stream, unsigned *flags) { *flags = stream != NULL; return 0; }
static int capturing;
int cuStreamIsCapturing(void *stream, int *status) { *status = capturing; return stream == NULL; }
int cuStreamGetCtx(void *stream, void **context) { *context = (void *)(stream >= (void *)4096 ? 32L : 16L); return stream == NULL; }
int cuCtxPushCurrent_v2(void *context) { return context == NULL; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)16; return 0; }
int cuCtxDestroy_v2(void *context) { note('X', context); return 0; }
int cuCtxDetach(void *context) { return context == NULL; } /* others have it still */
int cuStreamBeginRecaptureToGraph(void *stream, int mode, void *graph, void *differs, void *data) { return !(capturing = 1); }
int cuStreamEndCapture(void *stream, void **graph) { return capturing = 0; }
/* With HOLD=n and ASKED=m the GPU has finished nothing from launch n on, before it was asked about m events. */
static int launches, asked;
static volatile int still;
void stand_still(int whether) { still = whether; } /* the same, as the program says */
static int busy(void) { return still || (getenv("HOLD") && launches >= atoi(getenv("HOLD")) && asked < atoi(getenv("ASKED"))) ? 600 : 0; }
/* With BUSY there is always more in every stream, though all that is asked about has passed; with BUSY=n from launch n on. */
/* From `hold` on kernel 99 is long: its launch returns after `let_go`, and it ends with `finish`; what is recorded behind
 * it waits. */
static volatile int held, launching, gone, finished;
static __thread int runs_in_own;
static void *runs_in, *waits[1 << 16];
static int runs(void *stream) { return !finished && (stream == (void *)2 ? runs_in_own : runs_in && stream == runs_in); }
void hold(void) { held = 1; }
int is_launching(void) { return launching; }
void let_go(void) { gone = 1; }
void finish(void) { finished = 1; }
static void launch_long(void *stream) {
    launching = 1;
    while (!gone) usleep(100);
    if (stream == (void *)2) runs_in_own = 1;
    else runs_in = stream;
}
static int more(void) { return getenv("BUSY") && launches >= atoi(getenv("BUSY")); }
int cuStreamQuery(void *stream) { note('S', stream); return more() || runs(stream) ? 600 : busy(); }
int cuEventCreate(void **event, unsigned flags) { static long next = 4096; *event = (void *)((next += 16) + (flags > 9)); return 0; }
int cuEventDestroy_v2(void *event) { return event == NULL; }
int cuEventRecord(void *event, void *stream) {
    note('R', stream);
    waits[(unsigned short)((long)event >> 4)] = runs(stream) ? event : NULL;
    return event == NULL;
}
static int waits_for_long(void *event) { return !finished && waits[(unsigned short)((long)event >> 4)] == event; }
int cuEventQuery(void *event) { int result = waits_for_long(event) ? 600 : busy(); asked += result != 0; note('Q', (void *)(long)result); return result; }
/* Everything takes 20 us, or LASTS ns. */
int cuEventElapsedTime(float *ms, void *start, void *end) { *ms = getenv("LASTS") ? atoi(getenv("LASTS")) * 1e-6f : 0.02f; return start == end; }
int cuThreadExchangeStreamCaptureMode(int *mode) { int before = capture_mode; capture_mode = *mode; *mode = before; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **params, void **extra) {
    note('L', stream);
    return 0;
}
int cuPointerGetAttribute(unsigned *value, int which, unsigned long long address) { *value = 2; return 0; }
int cuMemcpyWithAttributesAsync(unsigned long long to, unsigned long long from, size_t size, void *how, void *stream) {
    note('L', stream);
    return 0;
}
int cuMemcpy3DWithAttributesAsync(void *copy, unsigned long long flags, void *stream) { note('L', stream); return 0; }
int cuFabricCpyBatchAsync(size_t count, void *copies, unsigned long long flags, void *stream) { note('L', stream); return 0; }
int cuLaunch(void *f) { note('L', NULL); return 0; }
int cuLaunchGrid(void *f, int width, int height) { note('L', NULL); return 0; }
int cuLaunchGridAsync(void *f, int width, int height, void *stream) { note('L', stream); return 0; }
int cuLaunchKernelEx(struct config *config, void *f, void **params, void **extra) {
    launches++;
    if (held && f == (void *)99) launch_long(config->stream);
    note(config->count && config->attributes[0].id == 6 && config->attributes[0].value[0] ? 'P' : 'L', config->stream);
    return 0;
}
