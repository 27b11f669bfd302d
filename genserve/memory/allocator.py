"""How the C library's allocator treats memory that was freed."""

import ctypes

# mallopt's parameters, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 128 << 20
_LARGEST_KEPT_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> bool:
    """Lets the process keep up to 128 MiB of what it frees; false where the C library is not glibc.

    A chunk of a push is a handful of blocks of its size on its way through gRPC. glibc gives such blocks back to the
    kernel when they are freed, and each of their pages is cleared and mapped again for the next chunk: more than half
    of what receiving costs. It holds for the whole process: a library should not call it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
