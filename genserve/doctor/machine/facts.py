"""The facts of the machine, as measured by `host`, `device` and `shared_memory`."""

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
    return MachineFacts(await asyncio.to_thread(host.look), torch, shared, shared_error)


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
