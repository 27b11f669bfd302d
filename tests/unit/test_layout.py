"""Where tests keep what they share, and what it takes to collect them."""

import ast
import pkgutil
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AREAS = {"bench", "engine", "faults", "fleet", "gpu", "mutants", "rpc", "simulation", "unit"}
"""The others are what they share, and what runs with TRL, torchrl and nbclient."""
OURS = ("bench", "genserve", "tests", "tools")
WITH_VLLM = (
    *("unit/engine/vllm", "unit/worker"),
    *(f"engine/test_{each}internals.py" for each in ("", "client_", "lora_", "openai_")),
    "unit/integrations/test_torchrl_conversion.py",
    *("unit/daemon/test_frontend.py", "unit/test_refused_starts.py", "fake_cuda"),
)
"""Tests of code that runs inside vLLM, in the process of the test itself."""


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


@cache
def loaded_by(path: Path) -> tuple[bool, list[Path]]:
    """Whether a module imports vLLM while it is imported itself, neither in a function nor under a condition; and which
    of our files it imports so."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = [place for name in names if name.split(".")[0] in OURS for place in files_of(name)]
    return any(name.split(".")[0] == "vllm" for name in names), files


@cache
def files_of(module: str) -> list[Path]:
    """A module and the packages that it is in."""
    names = module.split(".")
    places = [TESTS.parent.joinpath(*names[:end]) for end in range(1, len(names) + 1)]
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]


def way_to_vllm(path: Path) -> list[str]:
    """The files through which a file imports vLLM, from the first to the last; empty if it does not."""
    known, chains = {path}, [[path]]
    for chain in chains:  # grows while it is walked
        imports_it, files = loaded_by(chain[-1])
        if imports_it:
            return [str(each.relative_to(TESTS.parent)) for each in chain]
        for file in files:
            if file not in known:
                known.add(file)
                chains.append([*chain, file])
    return []


@pytest.mark.slow
def test_collecting_tests_imports_no_vllm() -> None:
    """That takes ten seconds in each process of pytest, also of a run that needs none of it."""
    with_vllm = tuple(TESTS / each for each in WITH_VLLM)
    ways = {path: way_to_vllm(path) for path in sorted(TESTS.rglob("test_*.py"))}
    assert sum(map(bool, ways.values())) > 10, "the search finds nothing"
    assert [way for path, way in ways.items() if way and not any(path.is_relative_to(each) for each in with_vllm)] == []


@pytest.mark.slow
def test_what_a_long_test_is_about_is_there() -> None:
    """CI would never run a test whose subject has moved."""
    found = [
        (path, text.value)
        for path in sorted(TESTS.rglob("test_*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.long"
        for text in ast.walk(call)
        if isinstance(text, ast.Constant) and "/" in str(text.value)
    ]
    assert found, "no test is long: the search finds nothing"
    assert [f"{path.name}: {subject}" for path, subject in found if not (TESTS.parent / subject).exists()] == []


@pytest.mark.slow
def test_no_test_file_is_imported() -> None:
    """What two test files need is in a module beside them, or in tests/support."""
    assert imported(), "no module of tests imports another: the search finds nothing"
    assert [f"{who} imports {what}" for who, what in imported() if what.name.startswith("test_")] == []


@pytest.mark.slow
def test_what_two_directories_of_tests_share_is_in_support() -> None:
    """So that a directory can be read, moved and run without another one."""
    areas = [(who, what) for who, what in imported() if {who.parts[0], what.parts[0]} <= AREAS]
    assert [f"{who} imports {what}" for who, what in areas if who.parts[0] != what.parts[0]] == []


@pytest.mark.slow
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
