"""What is found of this machine, and what is made of what a device would tell."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from genserve.doctor.checkup import chosen_ways
from genserve.doctor.children import Children
from genserve.doctor.machine import device, shared_memory
from genserve.doctor.machine import facts as machine
from genserve.doctor.machine.facts import DeviceFacts, TorchFacts
from genserve.errors import InvalidFieldError
from tests.support.refusals import refuses

TOLD = {
    "index": 0,
    "name": "H100",
    "capability": "9.0",
    "total_bytes": 80,
    "free_bytes": 70,
    "pinned_error": "",
    "rates": {"pinned_to_device": 3.0, "pageable_to_device": 2.0, "device_to_device": 9.0},
}


async def torch_facts(program: str, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60) -> TorchFacts:
    """What is found with this program in place of the one that asks torch."""
    real = Children.start

    async def start(self: Children, *command: str, **settings: object) -> asyncio.subprocess.Process:
        asks = command[-1] == device.__name__
        return await real(self, *([sys.executable, "-c", program] if asks else command), **settings)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, Children() as children:
        patched.setattr(Children, "start", start)
        return (await machine.look(children, timeout_s)).torch


@pytest.mark.slow
async def test_this_machine_is_looked_at_whole() -> None:
    """Without a GPU, torch says so and nothing is an error."""
    with Children() as children:
        found = await machine.look(children, 60)
    assert 0 < found.host.available_bytes <= found.host.total_bytes
    assert found.host.memcpy_bytes_per_s > 0
    assert (found.torch.version, found.torch.error) == (torch.__version__, "")
    assert found.device_type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert found.shared_memory is not None
    assert (found.shared_memory.child_reads, found.shared_memory.parent_reads) == ("", "")
    assert json.loads(json.dumps(found.as_dict()))["host"]["cpu"]


@pytest.mark.slow
async def test_memory_that_a_child_cannot_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's words."""
    real = Children.start

    async def start(self: Children, *command: str, **settings: object) -> asyncio.subprocess.Process:
        closed = f"/proc/{os.getpid()}/fd/999999"
        return await real(self, *[closed if word.startswith("/proc/") else word for word in command], **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Children, "start", start)
    with Children() as children:
        found = await shared_memory.look(children)
    assert "No such file" in found.child_reads
    assert found.parent_reads == ""


@pytest.mark.slow
async def test_other_bytes_than_were_written_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one direction and in the other."""
    monkeypatch.setattr(shared_memory, "PATTERN", bytes(1 << 16))
    with Children() as children:
        found = await shared_memory.look(children)
    assert "contains other bytes" in found.child_reads
    assert "contains other bytes" in found.parent_reads


@pytest.mark.slow
async def test_a_torch_that_hangs_or_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may do that to it."""
    assert "within 0.5 s" in (await torch_facts("import time; time.sleep(600)", monkeypatch, 0.5)).error
    assert "no libcudart" in (await torch_facts("raise SystemExit('no libcudart')", monkeypatch)).error


@pytest.mark.slow
async def test_what_a_device_tells_becomes_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its rates could not be measured."""
    facts = DeviceFacts.of(dict(TOLD))
    assert (facts.pinned_to_device, facts.device_to_device, facts.rates_error) == (3.0, 9.0, "")
    failed = DeviceFacts.of({**TOLD, "rates": {"error": "OutOfMemoryError: x"}})
    assert (failed.rates_error, failed.pinned_to_device) == ("OutOfMemoryError: x", 0.0)
    told = {"torch": "2.13", "cuda": "13.0", "driver_cuda": 12080, "error": "", "devices": [TOLD, {**TOLD, "index": 1}]}
    found = await torch_facts(f"print('DEVICE', {json.dumps(told)!r})", monkeypatch)
    assert (found.driver_cuda, [each.index for each in found.devices]) == ("12.8", [0, 1])
    none = json.dumps({"torch": "2.13", "cuda": None, "error": "", "devices": []})
    assert await torch_facts(f"print('DEVICE', {none!r})", monkeypatch) == TorchFacts("2.13")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_pinned_memory_that_does_not_work_is_told_and_not_raised() -> None:
    """As on this machine; rates are measured of whatever torch can copy to."""
    assert "pin" in device.pinned_error(torch.device("cpu"), 1 << 16)
    assert set(device.rates(torch.device("cpu"), 1 << 16)) == set(TOLD["rates"])  # type: ignore[arg-type]
    assert "error" in device.attempt(lambda: device.rates(torch.device("cuda"), 1))
    assert device.driver_cuda() == 0


def test_pinned_memory_that_gives_other_bytes_back_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of a stand-in for CUDA, whose streams do nothing, are made by the CPU."""

    class Nothing:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        wait_stream = record = synchronize = __init__

    cpu, real = torch.device("cpu"), torch.empty
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **kwargs: real(*size, **kwargs))
    assert device.pinned_error(cpu, 1 << 16) == ""
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, other, non_blocking=False: self if non_blocking else copy(self, other)
    )
    assert device.pinned_error(cpu, 1 << 16) == "the bytes that came back differ from those that were copied"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    assert "not page-locked" in device.pinned_error(cpu, 1 << 16)


def test_the_driver_is_read_where_it_tells_its_version(tmp_path: Path) -> None:
    """Of both kinds of modules."""
    version = tmp_path / "driver/nvidia/version"
    version.parent.mkdir(parents=True)
    for words in (
        "NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue",
        "NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  R",
    ):
        version.write_text(f"NVRM version: {words}\nGCC version:\n")
        assert machine.nvidia_driver(tmp_path) in ("550.54.15", "580.95.05")


def test_little_memory_is_not_taken_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process that looks."""
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 1 << 20)
    assert machine.look_at_host().memcpy_bytes_per_s == 0.0


def test_every_value_of_the_flag_is_a_way_but_for_the_one_that_chooses() -> None:
    """From the host is a way of its own on a device alone."""
    assert chosen_ways(None, "cpu") == ("beside", "inplace")
    assert chosen_ways(None, "cuda") == ("beside", "host", "inplace")
    assert chosen_ways("inplace, beside,inplace", "cpu") == ("inplace", "beside")
    with refuses(InvalidFieldError, field="ways", says="'auto'"):
        chosen_ways("auto", "cpu")
