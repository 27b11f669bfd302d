"""Facts of a machine and a daemon that are well."""

from dataclasses import replace
from typing import Any

import pytest

from genserve.doctor.machine.facts import DeviceFacts, HostFacts, MachineFacts, TorchFacts
from genserve.doctor.machine.shared_memory import SharedMemoryFacts
from genserve.doctor.trial.findings import MustFail, PushFound, Snapshot, WayFound

GB = 10**9  # of rates
GIB = 1 << 30  # of memory


def device(**changes: Any) -> DeviceFacts:
    """An accelerator of 80 GiB that is well, with changes."""
    return replace(
        DeviceFacts(
            index=0, name="H100", capability="9.0", total_bytes=80 * GIB, free_bytes=79 * GIB, pinned_error="",
            rates_error="", pinned_to_device=50.0 * GB, pageable_to_device=8.0 * GB, device_to_device=1500.0 * GB,
        ),
        **changes,
    )  # fmt: skip


def host(**changes: Any) -> HostFacts:
    """A host that is well, with changes."""
    return replace(
        HostFacts(
            kernel="6.1", python="3.11.7", cpu="EPYC", num_cpus=64, total_bytes=512 * GIB, available_bytes=500 * GIB,
            shm_bytes=64 * GIB, shm_free_bytes=64 * GIB, memcpy_bytes_per_s=12.0 * GB, nvidia_driver="575.1",
            packages={},
        ),
        **changes,
    )  # fmt: skip


def machine(*devices: DeviceFacts, **changes: Any) -> MachineFacts:
    """All of it, with changes."""
    torch = TorchFacts("2.13.0+cu130", "13.0", "13.0", "", devices)
    return replace(MachineFacts(host(), torch, SharedMemoryFacts("", "", "1")), **changes)


def snapshot(name: str, **changes: Any) -> Snapshot:
    """What a daemon says under a checkpoint."""
    digests = {("tp0", "w"): f"{name}1", ("tp0", "v"): f"{name}2"}
    return replace(Snapshot(name, ((ord(name), 2), (3, 4)), True, digests), **changes)


def push(name: str, **changes: Any) -> PushFound:
    """A push under load that went well."""
    steps = {"receive": 0.01, "prepare": 0.05, "pause": 0.002, "commit": 0.001, "resume": 0.001}
    return replace(PushFound(name, steps, 0.004, 8, 0, [0.010] * 50, [0.008] * 50, "", "", True), **changes)


def memory(hidden_bytes: int = 0) -> dict[str, int]:
    """What a daemon says of a model's, as GetServerInfo has it."""
    return {
        "reachable_bytes": 9 * GB + 2_000_000 + hidden_bytes,
        "exchanged_bytes": 3 * GB,
        "kv_cache_bytes": 6 * GB,
        "constant_bytes": 2_000_000,
        "hidden_bytes": hidden_bytes,
    }


def way(**changes: Any) -> WayFound:
    """A daemon started on a, pushed b, a, b, that did all as it should."""
    names = ("b", "a", "b")
    refused = MustFail("MANIFEST_MISMATCH", "w: is [3, 4], must be [4, 4]", snapshot("b"), snapshot("b"))
    found = WayFound(
        "beside",
        "a",
        start_s=12.0,
        info={"weight_update": "beside", "device": "cuda", "model_memory": memory()},
        cold=snapshot("a"),
        pushed=[snapshot(name) for name in names],
        pushes=[push(name) for name in names],
        misshapen=refused,
        late=replace(refused, reason="DEADLINE_EXCEEDED"),
        stopped="",
    )
    return replace(found, **changes)


@pytest.fixture
def cold() -> dict[str, Snapshot]:
    """Cold starts on a and b."""
    return {name: snapshot(name) for name in "ab"}
