"""A CUDA runtime without a device, under the real torch and vLLM for CUDA: `scripts/test --fake-cuda`.

What is real: torch's allocator, pools, streams, events and pinned memory; vLLM's CUDA platform, loaders, worker, KV
cache and graph capture; all of genserve. What is checked more strictly than a GPU does it: src/fake.h.

What it cannot show: kernels do nothing, unless torch has the operator for the CPU too (site/genserve_fake_cuda.py). So
steps do not compute, weights that kernels pack or quantise are wrong in the same way live and pushed, and no time is
measured. Nor pushes to several ranks: their workers write to memory that the runtime has not made.
"""
