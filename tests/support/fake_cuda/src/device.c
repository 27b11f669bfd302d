/* Devices: how many, which one a thread uses, and what an H100 says of itself. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

#define NUM_PROCESSORS 132
#define SHARED_BYTES (227 << 10)
#define SHARED_BYTES_OF_PROCESSOR (228 << 10)

static __thread int chosen;

int num_devices(void) {
    static int known;
    if (known == 0) {
        known = (int)setting("FAKE_CUDA_DEVICES", 1);
        if (known > MAX_DEVICES) known = MAX_DEVICES;
    }
    return known;
}
int current_device(void) { return chosen; }
uint64_t device_total_bytes(void) { return setting("FAKE_CUDA_BYTES", (uint64_t)8 << 30); }

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    *count = num_devices();
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = chosen;
    return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
    chosen = device;
    return cudaSuccess;
}

static int attribute(int which) {
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_BYTES;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_BYTES_OF_PROCESSOR;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 64 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrMultiProcessorCount: return NUM_PROCESSORS;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: return 1;
    default: return 0;
    }
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    (void)device;
    *value = attribute((int)which);
    return cudaSuccess;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    (void)device;
    *value = attribute((int)which);
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA H100 80GB HBM3");
    properties->uuid.bytes[0] = (char)(device + 1);
    properties->totalGlobalMem = device_total_bytes();
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = SHARED_BYTES;
    properties->sharedMemPerMultiprocessor = SHARED_BYTES_OF_PROCESSOR;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
    properties->warpSize = 32;
    properties->memPitch = 0x7fffffff;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = 9;
    properties->multiProcessorCount = NUM_PROCESSORS;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->l2CacheSize = 50 << 20;
    properties->unifiedAddressing = properties->concurrentKernels = properties->cooperativeLaunch = 1;
    properties->pciBusID = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *name, int size, int device) {
    snprintf(name, (size_t)size, "0000:%02x:00.0", device);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0; /* custom kernels over peers would do nothing: vLLM has other ways */
    return cudaSuccess;
}

/* The driver's side of the same. */
EXPORT CUresult cuInit(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDriverGetVersion(int *version) {
    cudaDriverGetVersion(version);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EXPORT CUresult cuDeviceGetCount(int *count) {
    *count = num_devices();
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)(device + 1);
    return CUDA_SUCCESS;
}
/* A context is its device's number plus one: NULL is none. */
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(intptr_t)(device + 1);
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, chosen); }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    if (context != NULL) chosen = (int)(intptr_t)context - 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = chosen;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    (void)limit;
    *value = 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    (void)limit, (void)value;
    return CUDA_SUCCESS;
}
