"""What torch knows of the accelerators, and how fast memory is copied. `python -m` of this file prints it as JSON.

It runs in a separate process: torch takes seconds to import, a CUDA context takes memory that the daemon needs, and a
driver that hangs can be abandoned.
"""

import ctypes
import json
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from genserve.worker.contract.placement import RING_BYTES

_COPIED_BYTES: Final = 256 << 20
_ROUNDS: Final = 3


def look() -> dict[str, Any]:
    """torch's build, and `look_at_cuda` of each usable device."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": [], "error": ""}
    if torch.version.cuda is None:
        return found
    try:
        torch.cuda.init()  # raises the reason, which is_available does not
        found["driver_cuda"] = driver_cuda()
        for index in range(torch.cuda.device_count()):
            found["devices"].append(look_at_cuda(torch.device("cuda", index)))
    except Exception as error:
        found["error"] = _one_line(error)
    return found


def driver_cuda() -> int:
    """The newest CUDA version that the driver supports, as CUDA writes it: 13000 is 13.0. 0 if unknown."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def look_at_cuda(device: torch.device) -> dict[str, Any]:
    """Memory in bytes, rates in bytes per second, and errors of page-locked memory."""
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    found: dict[str, Any] = {
        "index": device.index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
    }
    with torch.cuda.device(device):
        found["pinned_error"] = pinned_error(device)
        found["rates"] = attempt(lambda: rates(device, _COPIED_BYTES))
    return found


def attempt(measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """The measured rates, or {"error": the reason}."""
    try:
        return dict(measure())
    except Exception as error:
        return {"error": _one_line(error)}


def pinned_error(device: torch.device, size_bytes: int = RING_BYTES) -> str:
    """Copies to the device and back through page-locked memory on a separate stream, as a worker does. Returns "" if
    the bytes came back and no CUDA error is pending."""
    try:
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        if not host.is_pinned():
            return "torch allocated memory that is not page-locked"
        host.copy_(torch.arange(256, dtype=torch.uint8).repeat(size_bytes // 256))
        target = torch.zeros(size_bytes, dtype=torch.uint8, device=device)  # freed memory may contain the same bytes
        stream, done = torch.cuda.Stream(device), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))  # the zeros are written on that stream
        with torch.cuda.stream(stream):
            target.copy_(host, non_blocking=True)
            done.record(stream)
        done.synchronize()
        came_back = torch.equal(target.cpu(), host)
        target.add_(1)  # a launch raises a pending error
        torch.cuda.synchronize(device)
        return "" if came_back else "the bytes that came back differ from those that were copied"
    except Exception as error:
        return _one_line(error)


def rates(device: torch.device, size_bytes: int) -> dict[str, float]:
    """Bytes per second from page-locked and from ordinary memory to the device, and on the device."""
    source, target = (torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.ones(size_bytes, dtype=torch.uint8)
    found = {
        "pageable_to_device": _rate(device, size_bytes, lambda: target.copy_(pageable)),
        "device_to_device": _rate(device, size_bytes, lambda: target.copy_(source)),
    }
    pinned = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found["pinned_to_device"] = _rate(device, size_bytes, lambda: target.copy_(pinned, non_blocking=True))
    return found


def _rate(device: torch.device, size_bytes: int, copy: Callable[[], Any]) -> float:
    def seconds() -> float:
        _synchronize(device)
        began_s = time.perf_counter()
        copy()
        _synchronize(device)
        return time.perf_counter() - began_s

    seconds()  # warms up
    return size_bytes / min(seconds() for _ in range(_ROUNDS))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    print("DEVICE " + json.dumps(look()), flush=True)
