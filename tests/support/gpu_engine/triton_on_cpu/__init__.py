"""A backend of Triton's for CPUs, as far as vLLM's build for CPUs asks for one before it uses Triton's kernels.

Triton finds it by the entry point beside this package. It compiles nothing: with TRITON_INTERPRET=1 Triton interprets
kernels, and asks no backend for anything.
"""
