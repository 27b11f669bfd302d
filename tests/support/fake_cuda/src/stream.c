/* Streams and events. What is queued is done when somebody waits for it, in the order of its stream, after all that the
 * stream was told to wait for. Each stream knows how much of each other one happens before its own next operation. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

static struct stream *streams[MAX_STREAMS];
static int num_streams;
static struct stream *defaults[MAX_DEVICES];
static __thread struct stream *own_default[MAX_DEVICES]; /* cudaStreamPerThread */

void perform(struct operation *operation);      /* copy.c */
void check_source(struct operation *operation); /* copy.c */
bool touches(const struct operation *operation, const void *address, size_t size, bool only_writes); /* copy.c */
void record_in(struct graph *graph, struct operation operation);                                      /* graph.c */

static struct stream *new_stream(int device, int priority) {
    if (num_streams == MAX_STREAMS) {
        complain("more than %d streams", MAX_STREAMS);
        abort();
    }
    struct stream *stream = calloc(1, sizeof *stream);
    stream->device = device;
    stream->priority = priority;
    stream->index = num_streams;
    streams[num_streams++] = stream;
    return stream;
}

struct stream *stream_of(cudaStream_t handle) {
    if (handle != NULL && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (struct stream *)handle;
    struct stream **stream = handle == cudaStreamPerThread ? own_default : defaults;
    int device = current_device();
    if (stream[device] == NULL) stream[device] = new_stream(device, 0);
    return stream[device];
}

static void append(struct operation **first, struct operation **last, struct operation *operation) {
    operation->next = NULL;
    if (*last != NULL) (*last)->next = operation;
    else *first = operation;
    *last = operation;
}

void enqueue(struct stream *stream, struct operation operation) {
    if (stream->capture != NULL) {
        record_in(stream->capture, operation);
        return;
    }
    struct operation *queued = malloc(sizeof *queued);
    *queued = operation;
    queued->number = ++stream->num_queued;
    stream->clock[stream->index] = queued->number;
    append(&stream->first, &stream->last, queued);
    stream->num_polls = 0;
}

/* Does what is queued here up to this number. */
static void run_until(struct stream *stream, uint64_t number) {
    while (stream->first != NULL && stream->first->number <= number) {
        struct operation *operation = stream->first;
        stream->first = operation->next;
        if (stream->first == NULL) stream->last = NULL;
        stream->num_done = operation->number;
        if (operation->kind == WAIT) run_until(operation->of, operation->until);
        else perform(operation);
        append(&stream->first_done, &stream->last_done, operation);
    }
}

/* The host waits for all up to this number, and so for what this waited for. */
static void wait_until(struct stream *stream, uint64_t number) {
    run_until(stream, number);
    while (stream->first_done != NULL && stream->first_done->number <= number) {
        struct operation *operation = stream->first_done;
        stream->first_done = operation->next;
        if (stream->first_done == NULL) stream->last_done = NULL;
        if (operation->kind == WAIT) wait_until(operation->of, operation->until);
        check_source(operation);
        free(operation);
    }
}
void wait_for(struct stream *stream) { wait_until(stream, stream->num_queued); }
static void wait_for_device(int device) {
    for (int i = num_streams - 1; i >= 0; i--) /* the newest first: what forgot to wait for an older one is found */
        if (streams[i]->device == device) wait_for(streams[i]);
}
void wait_for_all(void) {
    for (int device = 0; device < num_devices(); device++) wait_for_device(device);
}

bool is_pending(const void *address, size_t size, bool only_writes) {
    for (int i = 0; i < num_streams; i++)
        for (struct operation *each = streams[i]->first; each != NULL; each = each->next)
            if (touches(each, address, size, only_writes)) return true;
    return false;
}

static void complain_of(const struct operation *other, int number, const struct stream *stream, const void *address,
                        size_t size, bool writes) {
    for (; other != NULL; other = other->next)
        if (other->number > stream->clock[number] && touches(other, address, size, !writes))
            complain("two streams use %p at a time: stream %d %s it, while stream %d %s it, and neither waits", address,
                     stream->index, writes ? "writes" : "reads", number,
                     touches(other, address, size, true) ? "writes" : "reads");
}

/* Finds an operation of another stream at this memory, one of the two writing, that nothing puts in order: neither an
 * event nor that the host has waited. */
void check_order(struct stream *stream, const void *address, size_t size, bool writes) {
    for (int i = 0; i < num_streams; i++) {
        if (streams[i] == stream) continue;
        complain_of(streams[i]->first_done, i, stream, address, size, writes);
        complain_of(streams[i]->first, i, stream, address, size, writes);
    }
}

/* Of the copies that are done and read this memory. */
void check_sources(const void *address, size_t size) {
    for (int i = 0; i < num_streams; i++)
        for (struct operation *each = streams[i]->first_done; each != NULL; each = each->next)
            if (each->from_is_watched && touches(each, address, size, false)) check_source(each);
}

void launch(struct stream *stream) {
    if (stream->capture != NULL) stream->capture->num_nodes++;
}

/* Not all at once: who polls sees it unfinished the first time, and finished the second. */
static cudaError_t poll(struct stream *stream, uint64_t number, int *num_polls) {
    if (stream == NULL) return cudaSuccess;
    if (stream->first != NULL && stream->first->number <= number && (*num_polls)++ == 0) return cudaErrorNotReady;
    wait_until(stream, number);
    return cudaSuccess;
}

#define LOCKED(statements) \
    do { lock(); statements; unlock(); return cudaSuccess; } while (0)

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    (void)flags;
    LOCKED(*handle = (cudaStream_t)new_stream(current_device(), priority));
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) { LOCKED(wait_for(stream_of(handle))); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    LOCKED(*priority = stream_of(handle)->priority);
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    cudaError_t error = cudaSuccess;
    lock();
    struct stream *stream = stream_of(handle);
    if (stream->capture != NULL) error = cudaErrorStreamCaptureUnsupported;
    else wait_for(stream);
    unlock();
    return fail(error);
}
EXPORT cudaError_t cudaDeviceSynchronize(void) { LOCKED(wait_for_device(current_device())); }
EXPORT CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }
EXPORT CUresult cuStreamSynchronize(CUstream handle) { return (CUresult)cudaStreamSynchronize(handle); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    lock();
    struct stream *stream = stream_of(handle);
    cudaError_t error = poll(stream, stream->num_queued, &stream->num_polls);
    unlock();
    return error;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void *argument) {
    LOCKED(enqueue(stream_of(handle), (struct operation){.kind = CALL, .call = call, .argument = argument}));
}

/* ---- Events. */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    (void)flags;
    *handle = (cudaEvent_t)calloc(1, sizeof(struct event));
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    free(handle);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t in, unsigned flags) {
    (void)flags;
    struct event *event = (struct event *)handle;
    lock();
    struct stream *stream = stream_of(in);
    event->stream = stream;
    event->number = stream->num_queued;
    memcpy(event->clock, stream->clock, sizeof event->clock);
    event->capture = stream->capture;
    event->num_polls = 0;
    unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t in) {
    return cudaEventRecordWithFlags(handle, in, 0);
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned flags) {
    (void)flags;
    struct event *event = (struct event *)awaited;
    lock();
    struct stream *stream = stream_of(handle);
    if (event->capture != NULL) {
        stream->capture = event->capture; /* the stream joins the capture */
    } else if (event->stream != NULL && event->stream != stream && stream->capture == NULL) {
        for (int i = 0; i < num_streams; i++)
            if (stream->clock[i] < event->clock[i]) stream->clock[i] = event->clock[i];
        enqueue(stream, (struct operation){.kind = WAIT, .of = event->stream, .until = event->number});
    }
    unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    LOCKED(if (event->stream != NULL) wait_until(event->stream, event->number));
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    lock();
    cudaError_t error = poll(event->stream, event->number, &event->num_polls);
    unlock();
    return error;
}
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    (void)begin, (void)end;
    *milliseconds = 1.0f; /* nothing takes time here */
    return cudaSuccess;
}

/* The streams of a capture that ends. */
void leave_capture(struct graph *graph) {
    for (int i = 0; i < num_streams; i++)
        if (streams[i]->capture == graph) streams[i]->capture = NULL;
}

/* For operators that the host computes at once: does what the stream has before them, and checks the memory. To all
 * others it is an operation of the stream, which they have to wait for. */
EXPORT void fake_cuda_use(cudaStream_t handle, void *address, size_t size, int writes) {
    if (size == 0) return;
    lock();
    struct stream *stream = stream_of(handle);
    const char *why = is_device_address(address) ? why_not_device_memory(address, size) : NULL;
    if (why != NULL) complain("an operator uses %zu bytes at %p: that memory %s", size, address, why);
    if (stream->capture == NULL) {
        check_order(stream, address, size, writes != 0);
        struct operation use = {.kind = USE, .width = size, .height = 1, .to_pitch = size, .from_pitch = size};
        if (writes) use.to = address;
        else use.from = address;
        enqueue(stream, use);
        run_until(stream, stream->num_queued);
    }
    unlock();
}
