/* Pinned memory of the host. A limit, FAKE_CUDA_PINNED_BYTES, is where the driver refuses more. */
#include "fake.h"

#include <string.h>
#include <sys/mman.h>

#define MAX_RANGES 65536

static struct range {
    char *base;
    size_t size;
    bool is_ours; /* allocated here, not registered */
} ranges[MAX_RANGES];
static int num_ranges;
static size_t pinned_bytes;

bool is_pinned(const void *address, size_t size) {
    const char *at = address;
    for (int i = 0; i < num_ranges; i++)
        if (at >= ranges[i].base && at + size <= ranges[i].base + ranges[i].size) return true;
    return false;
}

static cudaError_t add(char *base, size_t size, bool is_ours) {
    if (num_ranges == MAX_RANGES) return cudaErrorMemoryAllocation;
    ranges[num_ranges++] = (struct range){base, size, is_ours};
    pinned_bytes += size;
    return cudaSuccess;
}

static bool may_pin(size_t size) {
    note_pinning();
    return pinned_bytes + size <= setting("FAKE_CUDA_PINNED_BYTES", (uint64_t)1 << 62);
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    (void)flags;
    cudaError_t error = cudaErrorMemoryAllocation;
    lock();
    if (may_pin(size)) {
        void *base = mmap(NULL, size > 0 ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base != MAP_FAILED) {
            *address = base;
            error = add(base, size, true);
        }
    }
    unlock();
    return fail(error);
}
EXPORT cudaError_t cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
EXPORT cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    (void)flags;
    lock();
    cudaError_t error = may_pin(size) ? add(address, size, false) : cudaErrorMemoryAllocation;
    unlock();
    return fail(error);
}

static cudaError_t end(void *address) {
    cudaError_t error = cudaErrorInvalidValue;
    lock();
    for (int i = 0; i < num_ranges; i++) {
        if (ranges[i].base != address) continue;
        if (is_pending(address, ranges[i].size, false)) {
            complain("pinned memory at %p is freed while a copy in a stream uses it", address);
            wait_for_all();
        }
        /* Not given back: what reads it later ends with SIGSEGV, instead of reading somebody else's. */
        if (ranges[i].is_ours) mmap(address, ranges[i].size, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        pinned_bytes -= ranges[i].size;
        ranges[i] = ranges[--num_ranges];
        error = cudaSuccess;
        break;
    }
    unlock();
    return fail(error);
}
EXPORT cudaError_t cudaFreeHost(void *address) { return address == NULL ? cudaSuccess : end(address); }
EXPORT cudaError_t cudaHostUnregister(void *address) { return end(address); }

EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    (void)flags;
    *device = host;
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    lock();
    if (is_device_address(address)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = (int)(((uint64_t)address - REGION_BASE) / REGION_BYTES);
        attributes->devicePointer = (void *)address;
    } else if (is_pinned(address, 1)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->devicePointer = attributes->hostPointer = (void *)address;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -1;
    }
    unlock();
    return cudaSuccess;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return is_device_address((void *)address) || is_pinned((void *)address, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = is_device_address((void *)address) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = (int)(((uint64_t)address - REGION_BASE) / REGION_BYTES);
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
