"""Each check of a machine can fail, says what was seen, and what to do."""

import pytest

from genserve.doctor.machine.facts import MachineFacts, TorchFacts
from genserve.doctor.machine.verdicts import machine_verdicts
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.verdict import Level, Verdict
from tests.unit.doctor.conftest import GIB, device, host, machine
from tests.unit.doctor.machine.bad_machines import BAD, CPU_ENGINE


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


@pytest.mark.parametrize(("check", "facts", "flags", "level", "words"), BAD)
def test_what_is_wrong_is_reported_with_what_to_do(
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
