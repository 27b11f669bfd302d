/* A CUDA runtime and driver without a device, for tests: what its parts know of each other.
 *
 * Memory of a "device" is host memory that only this library can reach: a device address is one of a region without
 * access, so code that reads it without CUDA ends with SIGSEGV, as on a GPU. The bytes are SHADOW_OFFSET behind it.
 *
 * Work in streams is done as late as CUDA allows: when somebody waits for it. So whoever forgets to wait sees old
 * contents. What is an error on every GPU, but rarely seen there, ends the process with a message (see `complain`).
 */
#ifndef GENSERVE_FAKE_CUDA_H
#define GENSERVE_FAKE_CUDA_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 8
#define MAX_STREAMS 1024
#define EXPORT __attribute__((visibility("default")))

/* One lock for everything: tests are about order, not about speed. */
void lock(void);
void unlock(void);

/* Errors. `complain` writes a line that begins with "fake CUDA:" to stderr and aborts, or notes the line where
 * fake_cuda_collect(1) asked for it. `fail` sets what cudaGetLastError returns in this thread. */
void complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
cudaError_t fail(cudaError_t error);
uint64_t setting(const char *name, uint64_t otherwise);

/* Devices. */
int num_devices(void);
int current_device(void);
uint64_t device_total_bytes(void);

/* Memory of devices. All functions are called with the lock held. */
#define REGION_BYTES ((uint64_t)1 << 40)
#define REGION_BASE ((uint64_t)0x100000000000)
#define SHADOW_OFFSET ((uint64_t)0x100000000000)
#define GRANULE ((uint64_t)2 << 20)

bool is_device_address(const void *address);
char *bytes_at(const void *address);            /* where the library itself reads and writes them */
const char *why_not_device_memory(const void *address, size_t size); /* NULL if all of it is allocated */
bool may_allocate(int device, size_t size, const char *what); /* limit, ordered failure, and the ban of a pause */
void account(int device, int64_t size);
uint64_t used_bytes(int device);
void note_pinning(void);                        /* of host memory, which the ban forbids too */
int processes_of(int device, int *pids, int most); /* those that use its memory, for NVML; how many */

/* Pinned host memory. */
bool is_pinned(const void *address, size_t size);

/* Streams. An operation is at most one copy, and is done in the order of its stream. */
struct graph;
struct event;
struct stream {
    int device;
    int index;                    /* of its clock in the clocks of others */
    int priority;
    uint64_t num_queued, num_done;
    uint64_t clock[MAX_STREAMS];  /* how much of each stream happens before what is queued next here */
    struct operation *first, *last;           /* queued */
    struct operation *first_done, *last_done; /* done, but nobody has waited for it: on a GPU it may still go on */
    struct graph *capture;                    /* what is queued here is recorded instead */
    int num_polls;
};
struct event {
    struct stream *stream;        /* where it was recorded last; NULL: never */
    uint64_t number;              /* of the last operation before it */
    uint64_t clock[MAX_STREAMS];
    struct graph *capture;
    int num_polls;
};
enum kind { COPY, FILL, USE, WAIT, CALL };
struct operation {
    enum kind kind;
    struct operation *next;
    uint64_t number;
    char *to;                     /* COPY, FILL, USE: rows of `width` bytes, `to_pitch` apart; NULL: writes nothing */
    const char *from;             /* COPY, USE; NULL: reads nothing that others may write */
    size_t width, height, to_pitch, from_pitch;
    int value;                    /* FILL */
    char *staged;                 /* COPY from pageable memory: what CUDA has read before it returned */
    bool from_is_watched, to_is_watched; /* pinned memory that nobody may touch meanwhile */
    uint64_t from_sum, to_sum;
    struct stream *of;            /* WAIT */
    uint64_t until;
    void (*call)(void *);         /* CALL */
    void *argument;
};
struct graph {
    struct operation *first, *last;
    size_t num_nodes;
    unsigned long long id;
};

struct stream *stream_of(cudaStream_t handle);
void enqueue(struct stream *stream, struct operation operation);
void launch(struct stream *stream);             /* a kernel, which does nothing */
void wait_for(struct stream *stream);           /* the host waits: all that is queued is done, and known to be */
void wait_for_all(void);
bool is_pending(const void *address, size_t size, bool only_writes);

#endif
