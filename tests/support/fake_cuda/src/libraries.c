/* Libraries of NVIDIA that do nothing: their handles exist, matrices stay as they are, and ranks exchange nothing. The
 * functions here answer something; `build` adds those that only return. Written without NVIDIA's headers, because what
 * has no effect needs no arguments. */
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define HANDLE ((void *)&something)
#define DOES_NOTHING(name) \
    EXPORT int name(void) { return 0; } /* success, in every library */

static int something;

DOES_NOTHING(cudaFuncSetAttribute)
DOES_NOTHING(cudaKernelSetAttributeForDevice)
DOES_NOTHING(cudaDeviceEnablePeerAccess)
DOES_NOTHING(cudaProfilerStart)
DOES_NOTHING(cudaProfilerStop)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuTensorMapEncodeTiled)

/* cuBLAS: handles exist, and matrices are left as they are. `build` adds the products. */
EXPORT int cublasCreate_v2(void **handle) {
    *handle = HANDLE;
    return 0;
}
EXPORT int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    return *mode = 0;
}
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { return cublasGetMathMode(handle, mode); }
EXPORT const char *cublasGetStatusString(int status) {
    (void)status;
    return "a status of the fake cuBLAS";
}
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                          int wanted, void *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    memset(results, 0, 88); /* sizeof(cublasLtMatmulHeuristicResult_t) */
    *found = 1;
    return 0;
}

EXPORT int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}
EXPORT const char *ncclGetErrorString(int error) {
    (void)error;
    return "an error of the fake NCCL";
}
EXPORT const char *ncclGetLastError(void *communicator) {
    (void)communicator;
    return "";
}
EXPORT int ncclCommInitRank(void **communicator) {
    *communicator = HANDLE;
    return 0;
}
EXPORT int ncclCommInitRankConfig(void **communicator) { return ncclCommInitRank(communicator); }
EXPORT int ncclCommGetAsyncError(void *communicator, int *error) {
    (void)communicator;
    return *error = 0;
}
