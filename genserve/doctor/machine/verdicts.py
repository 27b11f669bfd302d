"""Verdicts on the facts of a machine, for a daemon on it."""

from collections.abc import Iterator
from typing import Final

from genserve.doctor.machine.facts import DeviceFacts, HostFacts, MachineFacts, TorchFacts
from genserve.doctor.machine.shared_memory import SharedMemoryFacts
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.verdict import Verdict, fail, ok, warn
from genserve.extras import pip_install, pip_install_engine
from genserve.worker.contract.placement import GIB

_LEAST_HOST_BYTES: Final = 3 * GIB  # the daemon's processes, and the built-in model
_LITTLE_HOST_BYTES: Final = 8 * GIB
_LITTLE_SHM_BYTES: Final = 256 << 20
_GB: Final = 1e9  # rates are shown in GB/s
_SLOW_MEMCPY: Final = 2 * _GB
_SLOW_PINNED: Final = 8 * _GB  # the rate of PCIe 3 x16
_SLOW_DEVICE: Final = 100 * _GB
_PINNED_GAIN: Final = 1.2
_SHARING_ADVICE: Final = (
    "Run trainers and daemon as one user in one PID namespace (one container, or `--pid=host`), with /proc mounted "
    "without hidepid; security profiles must allow opening /proc/PID/fd."
)


def machine_verdicts(facts: MachineFacts, flags: ServeFlags) -> Iterator[Verdict]:
    """Yields every check of the machine, for a daemon started with these flags."""
    yield host_memory(facts.host, flags.num_workers)
    yield memcpy(facts.host)
    yield shm(facts.host, flags.num_workers)
    yield sharing(facts.shared_memory, facts.shared_memory_error)
    yield driver(facts.host, facts.torch)
    num_devices = len(facts.devices)
    if num_devices and num_devices < flags.num_workers:
        yield fail(
            "devices",
            f"the flags ask for {flags.num_workers} ranks, and there are {num_devices} devices",
            "Lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size.",
        )
    for device in facts.devices[: flags.num_workers]:
        yield device_memory(device, flags.gpu_memory_utilization)
        yield pinned(device)
        yield device_rates(device)


def host_memory(host: HostFacts, num_ranks: int) -> Verdict:
    """Memory in total and per rank: a push takes memory on every rank."""
    per_rank = host.available_bytes / num_ranks
    ranks = f", {per_rank / GIB:.1f} for each of {num_ranks} ranks" if num_ranks > 1 else ""
    finding = f"{host.available_bytes / GIB:.1f} of {host.total_bytes / GIB:.1f} GiB available{ranks}"
    figures = {"total_bytes": host.total_bytes, "available_bytes": host.available_bytes, "num_ranks": num_ranks}
    if host.available_bytes < _LEAST_HOST_BYTES:
        return fail("host memory", finding, "Free memory, or raise the container's limit.", **figures)
    if per_rank < _LITTLE_HOST_BYTES:
        advice = "A push needs twice the checkpoint's size of host memory: serve small models, or add memory."
        return warn("host memory", finding, advice, **figures)
    return ok("host memory", finding, **figures)


def memcpy(host: HostFacts) -> Verdict:
    """One core copies the bytes of a push at least once."""
    figures = {"bytes_per_s": host.memcpy_bytes_per_s}
    if host.memcpy_bytes_per_s == 0.0:
        return warn("host memcpy", "not measured: too little memory", "Free memory.", **figures)
    finding = f"{host.memcpy_bytes_per_s / _GB:.1f} GB/s on one core"
    if host.memcpy_bytes_per_s < _SLOW_MEMCPY:
        advice = "Pushes will be slow: is the machine busy, or is the memory on another NUMA node?"
        return warn("host memcpy", finding, advice, **figures)
    return ok("host memcpy", finding, **figures)


def shm(host: HostFacts, num_ranks: int) -> Verdict:
    """vLLM's processes and NCCL communicate through /dev/shm. Weights are not stored there."""
    advice = "vLLM's processes communicate through it: start the container with --shm-size=1g, or --ipc=host."
    if host.shm_bytes is None or host.shm_free_bytes is None:
        return fail("/dev/shm", "it does not exist", advice)
    finding = f"{host.shm_free_bytes / GIB:.2f} of {host.shm_bytes / GIB:.2f} GiB free"
    figures = {"size_bytes": host.shm_bytes, "free_bytes": host.shm_free_bytes}
    if host.shm_free_bytes < _LITTLE_SHM_BYTES:
        return (fail if num_ranks > 1 else warn)("/dev/shm", finding, advice, **figures)
    return ok("/dev/shm", finding, **figures)


def sharing(shared: SharedMemoryFacts | None, error: str) -> Verdict:
    """Workers map the daemon's arena; without it no push can be applied."""
    if shared is None:
        return fail("memory between processes", f"could not be tried: {error}", _SHARING_ADVICE)
    scope = f" (ptrace_scope {shared.ptrace_scope})" if shared.ptrace_scope else ""
    if shared.child_reads:
        finding = f"a child cannot read this process's memory{scope}: {shared.child_reads}"
        return fail("memory between processes", finding, f"No push can be applied here. {_SHARING_ADVICE}")
    if shared.parent_reads:
        finding = f"a child's memory cannot be read{scope}: {shared.parent_reads}"
        return warn("memory between processes", finding, f"Trainers will send bytes instead. {_SHARING_ADVICE}")
    return ok("memory between processes", f"read through /proc/PID/fd in both directions{scope}")


def driver(host: HostFacts, torch: TorchFacts) -> Verdict:
    """The driver, and whether torch can use it."""
    figures = {"driver": host.nvidia_driver, "driver_cuda": torch.driver_cuda, "torch_cuda": torch.cuda}
    if host.has_cpu_engine and (torch.devices or host.nvidia_driver):
        finding = f"there is a GPU (driver {host.nvidia_driver or 'unknown'}), and vLLM's build for CPUs is installed"
        advice = f"The engine will run on the CPU: {pip_install('cuda')} in a separate environment."
        return warn("driver", finding, advice, **figures)
    if host.has_cpu_engine and torch.version:  # an ordinary torch says then that there is no driver, and does no harm
        return ok("driver", f"no GPU: vLLM's build for CPUs, torch {torch.version}", **figures)
    if torch.error:
        advice = "Install a driver as new as torch's CUDA, and start the container with --gpus all."
        return fail("driver", f"torch {torch.version}: {torch.error}", advice, **figures)
    if torch.devices:
        names = ", ".join(sorted({f"{device.name} (sm {device.capability})" for device in torch.devices}))
        runs = (
            f"which supports CUDA up to {torch.driver_cuda}" if torch.driver_cuda else "whose CUDA version is unknown"
        )
        finding = (
            f"{len(torch.devices)} x {names}; driver {host.nvidia_driver or 'unknown'}, {runs}; torch {torch.version}"
        )
        return ok("driver", finding, **figures)
    finding = f"torch {torch.version} is built for the CPU, and vLLM's CPU build is missing"
    return fail("driver", finding, f"{pip_install_engine()}.", **figures)


def device_memory(device: DeviceFacts, utilization: float) -> Verdict:
    """vLLM does not start if other processes hold the memory that its flags ask for."""
    check, wanted = f"device {device.index} memory", utilization * device.total_bytes
    finding = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
    figures = {"free_bytes": device.free_bytes, "total_bytes": device.total_bytes}
    if device.free_bytes < wanted:
        share = device.free_bytes / device.total_bytes
        return fail(
            check,
            f"{finding}, and vLLM takes {wanted / GIB:.1f} at --gpu-memory-utilization {utilization:g}",
            f"Stop the other processes on it, or pass --gpu-memory-utilization below {share:.2f}.",
            **figures,
        )
    return ok(check, finding, **figures)


def pinned(device: DeviceFacts) -> Verdict:
    """Copies to the device use page-locked memory."""
    check = f"device {device.index} pinned memory"
    if device.pinned_error:
        advice = (
            "Weights will be copied through ordinary memory, several times slower; is the container's memory limited?"
        )
        return fail(check, device.pinned_error, advice)
    return ok(check, "copied to the device and back on a separate stream; no error is pending")


def device_rates(device: DeviceFacts) -> Verdict:
    """How fast weights reach the device."""
    check = f"device {device.index} bandwidth"
    if device.rates_error:
        return fail(check, f"could not be measured: {device.rates_error}", "Look for the error in `dmesg`.")
    pinned, pageable, on_device = device.pinned_to_device, device.pageable_to_device, device.device_to_device
    to_device = f"host to device {pinned / _GB:.1f} GB/s pinned, {pageable / _GB:.1f} pageable"
    finding = f"{to_device}; on the device {on_device / _GB:.0f}"
    figures = {
        "pinned_bytes_per_s": pinned,
        "pageable_bytes_per_s": pageable,
        "device_to_device_bytes_per_s": on_device,
    }
    if pinned < _SLOW_PINNED:
        return warn(
            check, finding, "Does the link have all its lanes? `nvidia-smi -q | grep -A3 'Link Width'`", **figures
        )
    if pinned < _PINNED_GAIN * pageable:
        advice = "Pinned memory is not faster here; a virtual machine may be unable to lock pages."
        return warn(check, finding, advice, **figures)
    if on_device < _SLOW_DEVICE:
        return warn(check, finding, "The device's own memory is slow: does another process use it?", **figures)
    return ok(check, finding, **figures)
