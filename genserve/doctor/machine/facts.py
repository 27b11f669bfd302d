"""What the machine is, as found by `host`, `device` and `shared_memory`."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import asdict, dataclass, field
from typing import Any

from genserve.doctor.children import Children
from genserve.doctor.machine import host, shared_memory
from genserve.doctor.machine.host import HostFacts
from genserve.doctor.machine.shared_memory import SharedMemoryFacts

_END_TIMEOUT_S = 10.0
_PREFIX = b"DEVICE "


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """An accelerator: bytes and bytes a second. `pinned_error` and `rates_error` are "" when nothing went wrong."""

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
    def of(cls, told: dict[str, Any]) -> "DeviceFacts":
        """From what `device.look_at_cuda` told."""
        rates = told["rates"]
        names = ("pinned_to_device", "pageable_to_device", "device_to_device")
        found = {name: value for name, value in told.items() if name != "rates"}
        return cls(**found, rates_error=rates.get("error", ""), **{name: rates.get(name, 0.0) for name in names})


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch's build. `cuda` is "" for one without CUDA; `driver_cuda` is the newest CUDA that the driver runs; `error`
    says why no device can be used, or why torch could not even be asked."""

    version: str = ""
    cuda: str = ""
    driver_cuda: str = ""
    error: str = ""
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All of it. `shared_memory_error` says why sharing memory could not be tried."""

    host: HostFacts
    torch: TorchFacts
    shared_memory: SharedMemoryFacts | None
    shared_memory_error: str = field(default="")

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Those that the engine can run on."""
        return () if self.host.has_cpu_engine else self.torch.devices

    @property
    def device_type(self) -> str:
        """What the engine runs on: "cuda" or "cpu"."""
        return "cuda" if self.devices else "cpu"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def look(children: Children, timeout_s: float) -> MachineFacts:
    """One thing after the other, as rates are measured. Raises OSError where the kernel does not tell of memory."""
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
    return MachineFacts(await asyncio.to_thread(host.look), torch, shared, shared_error)


async def _look_at_torch(children: Children, timeout_s: float) -> TorchFacts:
    process = await children.start(sys.executable, "-m", "genserve.doctor.machine.device", stderr=PIPE, env=os.environ)
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        return TorchFacts(error=f"torch did not say what devices there are within {timeout_s:g} s")
    finally:
        await children.stop(process, _END_TIMEOUT_S)
    told = next((line for line in stdout.splitlines() if line.startswith(_PREFIX)), None)
    if told is None:
        last = stderr.decode(errors="replace").strip().splitlines()[-1:]
        return TorchFacts(error=f"torch could not be asked: {''.join(last) or f'status {process.returncode}'}")
    return _torch_facts(json.loads(told.removeprefix(_PREFIX)))


def _torch_facts(told: dict[str, Any]) -> TorchFacts:
    number = told.get("driver_cuda", 0)
    return TorchFacts(
        version=told["torch"],
        cuda=told["cuda"] or "",
        driver_cuda=f"{number // 1000}.{number % 1000 // 10}" if number else "",
        error=told["error"],
        devices=tuple(DeviceFacts.of(device) for device in told["devices"]),
    )
