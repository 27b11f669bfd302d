"""Limits of the kernel on a process that runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def limited(pid: int, resource: int, soft: int) -> Iterator[None]:
    """Has the kernel refuse a process more than this."""
    process = psutil.Process(pid)
    before = process.rlimit(resource)
    process.rlimit(resource, (soft, before[1]))
    try:
        yield
    finally:
        process.rlimit(resource, before)
