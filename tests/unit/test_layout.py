"""Where tests keep what they share."""

import ast
import pkgutil
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AREAS = {"engine", "faults", "fleet", "gpu", "rpc", "unit"}
"""The others are no tests: what they share, the harness of benchmarks, and what runs with TRL and torchrl."""


@cache
def imported() -> list[tuple[Path, Path]]:
    """Every import of one of tests' modules by another: who imports, and what, as paths below tests/."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "tests":
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("tests.")]
            else:
                continue
            for name in names:
                module = Path(*name.split(".")[1:]).with_suffix(".py")
                if (TESTS / module).is_file():
                    found.append((path.relative_to(TESTS), module))
    return found


def test_no_test_file_is_imported() -> None:
    """What two test files need is in a module beside them, or in tests/support."""
    assert imported(), "no module of tests imports another: the search finds nothing"
    assert [f"{who} imports {what}" for who, what in imported() if what.name.startswith("test_")] == []


def test_what_two_directories_of_tests_share_is_in_support() -> None:
    """So that a directory can be read, moved and run without another one."""
    areas = [(who, what) for who, what in imported() if {who.parts[0], what.parts[0]} <= AREAS]
    assert [f"{who} imports {what}" for who, what in areas if who.parts[0] != what.parts[0]] == []


def test_support_needs_no_directory_of_tests() -> None:
    """It is the ground that they stand on."""
    ground = [(who, what) for who, what in imported() if who.parts[0] == "support"]
    assert [f"{who} imports {what}" for who, what in ground if what.parts[0] in AREAS] == []


def test_every_module_of_the_worker_but_its_contract_is_protected() -> None:
    """The daemon cannot import a new one because somebody forgot to list it."""
    contracts = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (protected,) = (each["protected_modules"] for each in contracts if each["id"] == "worker")
    here = {each.name for each in pkgutil.iter_modules([str(TESTS.parent / "genserve" / "worker")])} - {"contract"}
    assert set(protected) == {f"genserve.worker.{name}" for name in here}


@pytest.mark.parametrize("area", ["engine", "faults"])
def test_no_two_tests_on_one_daemon_name_a_push_alike(area: str) -> None:
    """A daemon that serves many tests remembers what was applied: whether the second of them is refused would depend on
    what runs between the two, and in which process."""
    users: dict[str, set[str]] = {}
    for path in sorted((TESTS / area).glob("test_*.py")):
        for test in ast.parse(path.read_text()).body:
            for node in ast.walk(test):
                if isinstance(node, ast.keyword) and node.arg == "push_id" and isinstance(node.value, ast.Constant):
                    name = getattr(test, "name", "")
                    users.setdefault(str(node.value.value), set()).add(f"{path.name}::{name}")
    assert users, "no test names a push: the search finds nothing"
    assert {push_id: tests for push_id, tests in users.items() if len(tests) > 1} == {}
