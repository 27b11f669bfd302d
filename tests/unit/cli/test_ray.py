"""The flags about Ray, of `genserve up` and `genserve route`. tests/faults/test_up_ray.py has a cluster."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from genserve.cli import main
from genserve.extras import pip_install

COMMANDS = (["up", "--replicas", "1"], ["route"])


@pytest.mark.parametrize("command", COMMANDS, ids=["up", "route"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ray-name", "x"], "--ray-name: needs --ray"),
        (["--ray-timeout", "1s"], "--ray-timeout: needs --ray"),
        (["--ray", "ray://head:10001"], "Ray Client cannot be used"),
        (["--ray", "--ray-name", "a/b"], "--ray-name must be"),
        (["--ray", "--ray-timeout", "0s"], "--ray-timeout must be"),
    ],
)
def test_wrong_flags_are_refused_before_ray_is_asked(
    command: list[str], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the status of wrong usage, in one line."""
    assert main([*command, *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"genserve {command[0]}: error: ") and says in said and said.count("\n") == 1


def test_the_address_of_the_environment_is_checked_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would take it where none is given."""
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert main(["route", "--ray"]) == 2
    assert "--ray ray://head:10001: Ray Client cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=["up", "route"])
def test_missing_ray_is_reported_with_what_installs_it(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the router."""
    real = importlib.util.find_spec

    def find(name: str, *others: Any) -> Any:
        return None if name == "ray" else real(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main([*command, "--ray"]) == 1
    assert capsys.readouterr().err == f"genserve: Ray is not installed: {pip_install('ray')}\n"


@pytest.mark.slow
def test_the_routers_process_imports_no_ray() -> None:
    """Neither with --ray nor without: another process does."""
    program = """
import sys
import genserve.cli.up, genserve.cli.route
import genserve.placement.up, genserve.placement.ray.up
print([name for name in sys.modules if name.partition(".")[0] == "ray"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
