/* NVML: what vLLM and torch ask the driver of each device, without CUDA. Its headers are in no package of ours, so the
 * types are written here. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define MOST_PROCESSES 256

struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

/* A handle is the device's number plus one: NULL is none. */
static int device_of(void *handle) { return (int)(intptr_t)handle - 1; }

EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return 0;
}
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT const char *nvmlErrorString(int error) { return error == NOT_FOUND ? "not found" : "an error of the fake NVML"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)num_devices();
    return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(intptr_t)(index + 1);
    return (int)index < num_devices() ? 0 : NOT_FOUND;
}
/* The names that cudaDeviceGetPCIBusId gives: the device is the bus. */
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *name, void **handle) {
    unsigned domain, bus;
    if (sscanf(name, "%x:%x:", &domain, &bus) != 2) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus, handle);
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return 0;
}
EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    *index = (unsigned)device_of(handle);
    return 0;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9;
    *minor = 0;
    return 0;
}
EXPORT int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    (void)handle;
    snprintf(name, size, "NVIDIA H100 80GB HBM3");
    return 0;
}
EXPORT int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%08x-0000-0000-0000-000000000000", (unsigned)device_of(handle) + 1);
    return 0;
}
EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    snprintf(version, size, "580.0");
    return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    lock();
    memory->total = device_total_bytes();
    memory->used = used_bytes(device_of(handle));
    memory->free = memory->total - memory->used;
    unlock();
    return 0;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    struct memory plain;
    nvmlDeviceGetMemoryInfo(handle, &plain);
    memory->total = plain.total;
    memory->used = plain.used;
    memory->free = plain.free;
    memory->reserved = 0;
    return 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process_info *infos) {
    int pids[MOST_PROCESSES];
    lock();
    int found = processes_of(device_of(handle), pids, MOST_PROCESSES);
    unlock();
    if ((unsigned)found > *count) {
        *count = (unsigned)found;
        return INSUFFICIENT_SIZE;
    }
    for (int i = 0; i < found; i++) infos[i] = (struct process_info){(unsigned)pids[i], 0, 0, 0};
    *count = (unsigned)found;
    return 0;
}
/* torch lists them, with memory in a form of its own, when memory is out. */
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *infos) {
    (void)handle, (void)infos;
    *count = 0;
    return 0;
}

/* No links between devices. */
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetP2PStatus(void *one, void *other, int kind, int *status) {
    (void)one, (void)other, (void)kind;
    *status = 3; /* not supported */
    return 0;
}
