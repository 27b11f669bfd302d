/* Kernels: they are registered, loaded and launched, and do nothing. Whatever is asked for and is not
 * in this folder is written by `build`, and ends the process with its name. */
#include "fake.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static cudaError_t launch_in(cudaStream_t handle) {
    lock();
    launch(stream_of(handle));
    unlock();
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    (void)function, (void)grid, (void)block, (void)arguments, (void)shared;
    return launch_in(stream);
}
EXPORT cudaError_t __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) {
    (void)function, (void)arguments;
    return launch_in(configuration->stream);
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)arguments, (void)extra;
    return (CUresult)launch_in(stream);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction function, void **arguments, void **extra) {
    (void)function, (void)arguments, (void)extra;
    return (CUresult)launch_in(configuration->hStream);
}

/* What nvcc puts around kernels. */
EXPORT void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT void __cudaRegisterFunction(void) {}
EXPORT void __cudaRegisterVar(void) {}
EXPORT char __cudaInitModule(void **handle) {
    (void)handle;
    return 0;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    (void)grid, (void)block, (void)shared, (void)stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    grid->x = grid->y = grid->z = block->x = block->y = block->z = 1;
    *shared = 0;
    *stream = NULL;
    return cudaSuccess;
}

/* Handles of modules, functions and libraries: anything but NULL. */
static int something;
#define HANDLE ((void *)&something)
EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *symbol) {
    (void)symbol;
    *kernel = HANDLE;
    return cudaSuccess;
}
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    (void)image;
    *module = HANDLE;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) {
    (void)count, (void)options, (void)values;
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    (void)module, (void)name;
    *function = HANDLE;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule module) {
    (void)module;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    (void)function;
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int size, size_t shared) {
    (void)function, (void)size, (void)shared;
    *count = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int size,
                                                                          size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, function, size, shared);
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int size, size_t shared) {
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, function, size, shared);
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *configuration) {
    (void)function, (void)configuration;
    *count = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the fake CUDA driver";
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

/* Functions of the driver, by name: those of the newest form, as the headers name them. */
static void *driver_function(const char *name) {
    char newest[128];
    snprintf(newest, sizeof newest, "%s_v2", name);
    void *found = dlsym(RTLD_DEFAULT, newest);
    return found != NULL ? found : dlsym(RTLD_DEFAULT, name);
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    (void)version, (void)flags;
    *function = driver_function(name);
    if (result != NULL) *result = *function != NULL ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *result) {
    (void)version, (void)flags;
    *function = driver_function(name);
    if (result != NULL) *result = *function != NULL ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
