/* Captured graphs: kernels do nothing, and copies are made again at each launch. */
#include "fake.h"

#include <stdlib.h>

static unsigned long long num_graphs;

void leave_capture(struct graph *graph); /* stream.c */

void record_in(struct graph *graph, struct operation operation) {
    struct operation *recorded = malloc(sizeof *recorded);
    *recorded = operation;
    recorded->next = NULL;
    graph->num_nodes++;
    if (graph->last != NULL) graph->last->next = recorded;
    else graph->first = recorded;
    graph->last = recorded;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    (void)mode;
    lock();
    struct graph *graph = calloc(1, sizeof *graph);
    graph->id = ++num_graphs;
    struct stream *stream = stream_of(handle);
    cudaError_t error = handle == NULL || handle == cudaStreamLegacy ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
    if (error == cudaSuccess) stream->capture = graph;
    unlock();
    return fail(error);
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    lock();
    struct stream *stream = stream_of(handle);
    *graph = (cudaGraph_t)stream->capture;
    if (stream->capture != NULL) leave_capture(stream->capture);
    unlock();
    return fail(*graph == NULL ? cudaErrorIllegalState : cudaSuccess);
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    lock();
    *status = stream_of(handle)->capture != NULL ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *num_dependencies) {
    cudaStreamIsCapturing(handle, status);
    struct graph *capture = stream_of(handle)->capture;
    if (id != NULL) *id = capture != NULL ? capture->id : 0;
    if (graph != NULL) *graph = (cudaGraph_t)capture;
    if (dependencies != NULL) *dependencies = NULL;
    if (edges != NULL) *edges = NULL;
    if (num_dependencies != NULL) *num_dependencies = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    static __thread enum cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = own;
    own = *mode;
    *mode = before;
    return cudaSuccess;
}

/* An executable graph is the graph: torch destroys the graph and keeps the executable one, so neither is freed. */
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    lock();
    struct stream *stream = stream_of(handle);
    for (struct operation *each = ((struct graph *)executable)->first; each != NULL; each = each->next)
        enqueue(stream, *each);
    launch(stream);
    unlock();
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)nodes;
    *count = ((struct graph *)graph)->num_nodes;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    (void)graph;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    (void)executable;
    return cudaSuccess;
}
