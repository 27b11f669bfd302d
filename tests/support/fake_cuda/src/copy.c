/* Copies and fills, and what is checked of them:
 *
 * - memory of a device must be allocated, when the copy is asked for and when it is done;
 * - two streams must not use the same memory at a time, if one writes it;
 * - pinned memory that a copy reads must not change until the host has waited for the copy, and what it writes must not
 *   be touched before it is done: it holds POISON meanwhile, so whoever reads it too early reads that.
 *
 * Pageable memory is as with CUDA: it is read before the call returns, and a copy to it is complete then. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#define POISON 0xa5

void check_order(struct stream *stream, const void *address, size_t size, bool writes); /* stream.c */
void check_sources(const void *address, size_t size);                                   /* stream.c */

static bool overlap(const char *a, size_t a_size, const char *b, size_t b_size) {
    return a < b + b_size && b < a + a_size;
}
static size_t extent(size_t pitch, const struct operation *copy) {
    return copy->height == 0 ? 0 : (copy->height - 1) * pitch + copy->width;
}

bool touches(const struct operation *operation, const void *address, size_t size, bool only_writes) {
    if (operation->to != NULL && overlap(operation->to, extent(operation->to_pitch, operation), address, size)) return true;
    return !only_writes && operation->from != NULL &&
           overlap(operation->from, extent(operation->from_pitch, operation), address, size);
}

/* Over the bytes of a copy, without the gaps between rows. */
static uint64_t sum_of(const char *from, size_t pitch, const struct operation *copy) {
    uint64_t sum = 14695981039346656037u;
    for (size_t row = 0; row < copy->height; row++) {
        const char *at = from + row * pitch;
        size_t left = copy->width;
        for (; left >= 8; left -= 8, at += 8) {
            uint64_t word;
            memcpy(&word, at, 8);
            sum = (sum ^ word) * 1099511628211u;
            sum ^= sum >> 29;
        }
        for (; left > 0; left--) sum = (sum ^ (unsigned char)*at++) * 1099511628211u;
    }
    return sum;
}

static bool is_there(const char *what, const char *address, size_t size, const char *when) {
    if (!is_device_address(address)) return true;
    const char *why = why_not_device_memory(address, size);
    if (why != NULL) complain("%s %zu bytes at %p, %s: that memory %s", what, size, address, when, why);
    return why == NULL;
}

/* That nobody has changed the pinned memory that a copy reads, which may go on until the host has waited for it. */
void check_source(struct operation *copy) {
    if (copy->kind == COPY && copy->from_is_watched && sum_of(copy->from, copy->from_pitch, copy) != copy->from_sum)
        complain("pinned memory at %p changed before the copy of its %zu bytes to %p was done", copy->from,
                 copy->width * copy->height, copy->to);
    copy->from_is_watched = false;
}

void perform(struct operation *operation) {
    if (operation->kind == CALL) operation->call(operation->argument);
    if (operation->kind != COPY && operation->kind != FILL) return;
    size_t written = extent(operation->to_pitch, operation);
    bool may = is_there("a copy to", operation->to, written, "when it is done");
    if (operation->kind == COPY && operation->staged == NULL) {
        may &= is_there("a copy from", operation->from, extent(operation->from_pitch, operation), "when it is done");
    }
    if (operation->kind == COPY && operation->from_is_watched &&
        sum_of(operation->from, operation->from_pitch, operation) != operation->from_sum)
        check_source(operation);
    if (!is_device_address(operation->to)) check_sources(operation->to, written); /* which change in order now */
    if (operation->to_is_watched && sum_of(operation->to, operation->to_pitch, operation) != operation->to_sum)
        complain("pinned memory at %p was written before a copy of %zu bytes to it was done", operation->to,
                 operation->width * operation->height);
    for (size_t row = 0; may && row < operation->height; row++) {
        char *to = bytes_at(operation->to) + row * operation->to_pitch;
        if (operation->kind == FILL) memset(to, operation->value, operation->width);
        else if (operation->staged != NULL) memcpy(to, operation->staged + row * operation->width, operation->width);
        else memmove(to, bytes_at(operation->from) + row * operation->from_pitch, operation->width);
    }
    free(operation->staged);
    operation->staged = NULL;
}

static cudaError_t refuse(const char *why, const void *to, const void *from) {
    complain("a copy from %p to %p: %s", from, to, why);
    return cudaErrorInvalidValue;
}

static cudaError_t copy(struct operation new, enum cudaMemcpyKind kind, struct stream *stream, bool waits) {
    size_t written = extent(new.to_pitch, &new), read = extent(new.from_pitch, &new);
    if (written == 0 || new.width == 0) return cudaSuccess;
    bool to_device = is_device_address(new.to), from_device = is_device_address(new.from);
    bool to_pinned = !to_device && is_pinned(new.to, written), from_pinned = !from_device && is_pinned(new.from, read);
    if (kind == cudaMemcpyHostToDevice && from_device) return refuse("its source is not on the host", new.to, new.from);
    if (kind == cudaMemcpyDeviceToHost && to_device) return refuse("its target is not on the host", new.to, new.from);
    if (kind == cudaMemcpyHostToDevice && !to_device && !to_pinned)
        return refuse("its target is not on a device", new.to, new.from);
    if (kind == cudaMemcpyDeviceToHost && !from_device && !from_pinned)
        return refuse("its source is not on a device", new.to, new.from);
    if (!is_there("a copy to", new.to, written, "when it is asked for")) return cudaErrorInvalidValue;
    if (!is_there("a copy from", new.from, read, "when it is asked for")) return cudaErrorInvalidValue;
    if (stream->capture != NULL) {
        if (!(to_device || to_pinned) || !(from_device || from_pinned)) return cudaErrorStreamCaptureUnsupported;
        enqueue(stream, new);
        return cudaSuccess;
    }
    check_order(stream, new.to, written, true);
    if (from_device || from_pinned) {
        check_order(stream, new.from, read, false);
    } else {
        new.staged = malloc(new.width * new.height);
        for (size_t row = 0; row < new.height; row++)
            memcpy(new.staged + row * new.width, new.from + row * new.from_pitch, new.width);
        new.from = NULL;
    }
    if (from_pinned && !is_pending(new.from, read, true)) {
        new.from_is_watched = true;
        new.from_sum = sum_of(new.from, new.from_pitch, &new);
    }
    if (to_pinned && !waits && !is_pending(new.to, written, false)) {
        for (size_t row = 0; row < new.height; row++) memset(new.to + row * new.to_pitch, POISON, new.width);
        new.to_is_watched = true;
        new.to_sum = sum_of(new.to, new.to_pitch, &new);
    }
    enqueue(stream, new);
    if (waits || !(to_device || to_pinned)) wait_for(stream);
    return cudaSuccess;
}

static cudaError_t locked_copy(struct operation new, enum cudaMemcpyKind kind, cudaStream_t handle, bool waits) {
    lock();
    cudaError_t error = copy(new, kind, stream_of(handle), waits);
    unlock();
    return fail(error);
}
static struct operation flat(void *to, const void *from, size_t size) {
    return (struct operation){.kind = COPY, .to = to, .from = from, .width = size, .height = 1, .to_pitch = size, .from_pitch = size};
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return locked_copy(flat(to, from, size), kind, stream, false);
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return locked_copy(flat(to, from, size), kind, NULL, true);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                       cudaStream_t stream) {
    (void)to_device, (void)from_device;
    return locked_copy(flat(to, from, size), cudaMemcpyDeviceToDevice, stream, false);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    struct operation new = {.kind = COPY, .to = to, .from = from, .width = width, .height = height,
                            .to_pitch = to_pitch, .from_pitch = from_pitch};
    return locked_copy(new, kind, stream, false);
}

static cudaError_t fill(void *to, int value, size_t size, cudaStream_t handle, bool waits) {
    if (size == 0) return cudaSuccess;
    cudaError_t error = cudaSuccess;
    lock();
    struct stream *stream = stream_of(handle);
    struct operation new = {.kind = FILL, .to = to, .value = value, .width = size, .height = 1, .to_pitch = size};
    if (!is_there("a fill of", to, size, "when it is asked for")) {
        error = cudaErrorInvalidValue;
    } else {
        if (stream->capture == NULL) check_order(stream, to, size, true);
        enqueue(stream, new);
        if (waits && stream->capture == NULL) wait_for(stream);
    }
    unlock();
    return fail(error);
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    return fill(to, value, size, stream, false);
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t size) { return fill(to, value, size, NULL, true); }
