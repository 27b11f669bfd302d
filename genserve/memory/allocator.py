"""How a process manages memory: the C library's allocator, and Python's garbage collector."""

import ctypes
import gc

# mallopt's parameters, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 128 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the limit of glibc


def keep_freed_memory() -> bool:
    """Lets the process keep up to 128 MiB of freed memory; False if the C library is not glibc.

    A chunk of a push uses a handful of blocks of its size on its way through gRPC. By default glibc returns such blocks
    to the kernel when they are freed, and their pages are cleared and mapped again for the next chunk: more than half
    of the cost of receiving. The setting applies to the whole process, so a library should not call it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def freeze_objects() -> None:
    """Freezes the objects of the start, which live for ever, so that garbage collections do not traverse them."""
    gc.collect()
    gc.freeze()
