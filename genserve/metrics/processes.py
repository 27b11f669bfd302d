"""The series that several processes count together: the daemon and its front ends.

With front ends, prometheus_client keeps the counters of each process in files that all of them map, so that the daemon
reads those of a front end without asking it, also when it has died. This is how vLLM counts for several API servers.
Without front ends, counters are ordinary numbers, which are cheaper.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import prometheus_client.values
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import MultiProcessValue

from genserve.process.leftovers import prefix

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client, in this process, keeps its files. vLLM looks at it too."""
_DAEMON = "daemon"


def count_into(directory: str, name: str) -> None:
    """From now on, this process counts in files of its own in the directory. A process of the same `name`, which must
    have ended, is continued. Call before any series are made."""
    os.environ[DIRECTORY_VARIABLE] = directory
    # As prometheus_client's documentation says for processes that are named in another way than by their id. It reads
    # the variable when it is imported, which may have been before the fork.
    prometheus_client.values.ValueClass = MultiProcessValue(process_identifier=lambda: name)  # type: ignore[no-untyped-call]


@contextmanager
def shared_directory() -> Iterator[str]:
    """A directory for the counters of the daemon and of its front ends. This process counts there from now on."""
    directory = tempfile.mkdtemp(prefix=prefix("metrics"))
    try:
        count_into(directory, _DAEMON)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def registry_of(directory: str) -> CollectorRegistry:
    """All series of the processes that count in the directory."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry
