/* Memory of devices: cudaMalloc, and the driver's virtual memory, which vLLM's sleep and torch's expandable segments use.
 *
 * An address is given out once: whatever is copied to or from memory that was freed is found. New memory is full of one
 * byte, FAKE_CUDA_POISON. That is 0 for an engine: kernels would write what its steps use as indices. */
#include "fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_POISONED ((size_t)256 << 20) /* more would be resident only because nobody uses it */

struct block {
    uint64_t base, size;
    bool is_live;
    struct physical **mapped; /* by granule, for reserved addresses; NULL: cudaMalloc */
};
/* cuMemCreate's handle: memory that has no address. */
struct physical {
    int file, device, num_users;
    size_t size;
    bool has_contents; /* from the first time that it was mapped: they follow it to its next address */
};

static struct block *blocks[MAX_DEVICES];
static size_t num_blocks[MAX_DEVICES];
static uint64_t next_address[MAX_DEVICES];

bool is_device_address(const void *address) {
    uint64_t at = (uint64_t)address;
    return at >= REGION_BASE && at < REGION_BASE + MAX_DEVICES * REGION_BYTES;
}
char *bytes_at(const void *address) {
    return is_device_address(address) ? (char *)address + SHADOW_OFFSET : (char *)address;
}
static int device_at(const void *address) { return (int)(((uint64_t)address - REGION_BASE) / REGION_BYTES); }

/* The block at or before an address: blocks are in the order of their addresses. */
static struct block *block_of(const void *address) {
    int device = device_at(address);
    size_t low = 0, high = num_blocks[device];
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[device][middle].base <= (uint64_t)address) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return NULL;
    struct block *found = &blocks[device][low - 1];
    return (uint64_t)address < found->base + found->size ? found : NULL;
}

const char *why_not_device_memory(const void *address, size_t size) {
    struct block *block = block_of(address);
    if (block == NULL) return "was never allocated";
    if (!block->is_live) return "was freed";
    uint64_t offset = (uint64_t)address - block->base;
    if (offset + size > block->size) return "ends before this does";
    if (block->mapped != NULL)
        for (uint64_t i = offset / GRANULE; i * GRANULE < offset + size; i++)
            if (block->mapped[i] == NULL) return "is not mapped";
    return NULL;
}

static struct block *new_block(int device, size_t size, size_t alignment) {
    if (num_blocks[device] == 0) {
        void *region = (void *)(REGION_BASE + (uint64_t)device * REGION_BYTES);
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        if (mmap(region, REGION_BYTES, PROT_NONE, flags, -1, 0) != region) return NULL;
        next_address[device] = (uint64_t)region;
    }
    uint64_t base = (next_address[device] + alignment - 1) / alignment * alignment;
    /* A gap behind each block: what is written past its end is in no block. */
    next_address[device] = base + (size + 2 * GRANULE - 1) / GRANULE * GRANULE;
    if (next_address[device] > REGION_BASE + (uint64_t)(device + 1) * REGION_BYTES) return NULL;
    if ((num_blocks[device] & (num_blocks[device] - 1)) == 0) { /* doubles */
        size_t room = num_blocks[device] == 0 ? 1 : 2 * num_blocks[device];
        blocks[device] = realloc(blocks[device], room * sizeof(struct block));
    }
    struct block *block = &blocks[device][num_blocks[device]++];
    *block = (struct block){base, size, true, NULL};
    return block;
}

static bool place(uint64_t base, size_t size, int file) {
    int flags = MAP_FIXED | MAP_NORESERVE | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    return mmap((void *)(base + SHADOW_OFFSET), size, PROT_READ | PROT_WRITE, flags, file, 0) != MAP_FAILED;
}
static void remove_bytes(uint64_t base, size_t size) {
    mmap((void *)(base + SHADOW_OFFSET), size, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static void poison(uint64_t base, size_t size) {
    int value = (int)setting("FAKE_CUDA_POISON", 0);
    if (value != 0) memset((void *)(base + SHADOW_OFFSET), value, size < MOST_POISONED ? size : MOST_POISONED);
}

static cudaError_t allocate(void **address, size_t size, const char *what) {
    int device = current_device();
    cudaError_t error = cudaErrorMemoryAllocation;
    size = (size + 511) / 512 * 512;
    lock();
    if (may_allocate(device, size, what)) {
        struct block *block = new_block(device, size, GRANULE);
        if (block != NULL && place(block->base, size, -1)) {
            poison(block->base, size);
            account(device, (int64_t)size);
            *address = (void *)block->base;
            error = cudaSuccess;
        }
    }
    unlock();
    return fail(error);
}

EXPORT cudaError_t cudaMalloc(void **address, size_t size) {
    *address = NULL;
    return size == 0 ? cudaSuccess : allocate(address, size, "cudaMalloc");
}
EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) {
    (void)stream;
    return allocate(address, size, "cudaMallocAsync");
}

EXPORT cudaError_t cudaFree(void *address) {
    if (address == NULL) return cudaSuccess;
    cudaError_t error = cudaErrorInvalidValue;
    lock();
    struct block *block = is_device_address(address) ? block_of(address) : NULL;
    if (block != NULL && block->is_live && block->base == (uint64_t)address && block->mapped == NULL) {
        wait_for_all(); /* as CUDA does: it waits for the device */
        block->is_live = false;
        remove_bytes(block->base, block->size);
        account(device_at(address), -(int64_t)block->size);
        error = cudaSuccess;
    } else {
        complain("cudaFree(%p): no such allocation, or freed before", address);
    }
    unlock();
    return fail(error);
}
EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    (void)stream;
    return cudaFree(address);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    lock();
    uint64_t used = used_bytes(current_device());
    unlock();
    *total = device_total_bytes();
    *free_bytes = used < *total ? *total - used : 0;
    return cudaSuccess;
}

/* ---- The driver's virtual memory. */

EXPORT CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags flags) {
    (void)properties, (void)flags;
    *size = GRANULE;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                                    unsigned long long flags) {
    (void)hint, (void)flags;
    if (size == 0 || size % GRANULE != 0) return CUDA_ERROR_INVALID_VALUE;
    lock();
    struct block *block = new_block(current_device(), size, alignment > GRANULE ? alignment : GRANULE);
    if (block != NULL) {
        block->mapped = calloc(size / GRANULE, sizeof *block->mapped);
        *address = block->base;
    }
    unlock();
    return block != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    (void)size;
    lock();
    struct block *block = block_of((void *)address);
    if (block != NULL) block->is_live = false;
    unlock();
    return block != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    (void)flags;
    int device = properties->location.id;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    int file = may_allocate(device, size, "cuMemCreate") ? memfd_create("fake-cuda", MFD_CLOEXEC) : -1;
    if (file >= 0 && ftruncate(file, (off_t)size) == 0) {
        struct physical *memory = malloc(sizeof *memory);
        *memory = (struct physical){file, device, 1, size, false};
        account(device, (int64_t)size);
        *handle = (CUmemGenericAllocationHandle)memory;
        result = CUDA_SUCCESS;
    }
    unlock();
    return result;
}
static void let_go(struct physical *memory) {
    if (--memory->num_users > 0) return;
    close(memory->file);
    account(memory->device, -(int64_t)memory->size);
    free(memory);
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    lock();
    let_go((struct physical *)handle);
    unlock();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    (void)flags;
    struct physical *memory = (struct physical *)handle;
    if (offset != 0 || size != memory->size) return CUDA_ERROR_INVALID_VALUE;
    lock();
    struct block *block = block_of((void *)address);
    bool is_placed = block != NULL && block->mapped != NULL && place(address, size, memory->file);
    if (is_placed) {
        if (!memory->has_contents) poison(address, size);
        memory->has_contents = true;
        memory->num_users++;
        for (uint64_t i = 0; i < size / GRANULE; i++) block->mapped[(address - block->base) / GRANULE + i] = memory;
    }
    unlock();
    return is_placed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    lock();
    if (is_pending((void *)address, size, false)) complain("cuMemUnmap of memory that a stream still uses");
    struct block *block = block_of((void *)address);
    struct physical *last = NULL;
    for (uint64_t i = 0; block != NULL && i < size / GRANULE; i++) {
        struct physical **place_of = &block->mapped[(address - block->base) / GRANULE + i];
        if (*place_of != NULL && *place_of != last) let_go(last = *place_of);
        *place_of = NULL;
    }
    remove_bytes(address, size);
    unlock();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    (void)address, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    lock();
    struct block *block = is_device_address((void *)address) ? block_of((void *)address) : NULL;
    bool is_found = block != NULL && block->is_live;
    if (is_found && base != NULL) *base = block->base;
    if (is_found && size != NULL) *size = block->size;
    unlock();
    return is_found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
/* For another process, as a file. */
EXPORT CUresult cuMemExportToShareableHandle(void *file, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    (void)flags;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    *(int *)file = dup(((struct physical *)handle)->file);
    return CUDA_SUCCESS;
}
