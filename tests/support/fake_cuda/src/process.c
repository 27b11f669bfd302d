/* What belongs to the whole process: the lock, errors, settings, and the interface for tests. */
#include "fake.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t everything = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static __thread cudaError_t last_error;
static bool is_collecting;
static char collected[1 << 16];

void lock(void) { pthread_mutex_lock(&everything); }
void unlock(void) { pthread_mutex_unlock(&everything); }

uint64_t setting(const char *name, uint64_t otherwise) {
    const char *value = getenv(name);
    return value == NULL || *value == '\0' ? otherwise : strtoull(value, NULL, 0);
}

void complain(const char *format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "fake CUDA: %s (process %d)\n", line, (int)getpid());
    if (!is_collecting) abort();
    size_t length = strlen(collected);
    snprintf(collected + length, sizeof collected - length, "%s\n", line);
}

/* Complaints are collected instead of fatal. Returns whether they were before. */
EXPORT int fake_cuda_collect(int on) {
    lock();
    bool before = is_collecting;
    is_collecting = on != 0;
    unlock();
    return before;
}

/* The complaints since the last call, a line each. */
EXPORT void fake_cuda_take_complaints(char *into, size_t size) {
    lock();
    snprintf(into, size, "%s", collected);
    collected[0] = '\0';
    unlock();
}

cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    default: return "an error of the fake CUDA runtime";
    }
}
EXPORT const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}
