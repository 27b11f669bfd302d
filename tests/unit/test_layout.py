"""Where tests keep what they share, and what it takes to collect them."""

import ast
import pkgutil
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AREAS = {"bench", "engine", "fake_cuda", "faults", "fleet", "gpu", "mutants", "rpc", "simulation", "unit"}
"""The others are what they share, and what runs with TRL, torchrl and nbclient."""
OURS = ("bench", "genserve", "tests", "tools")
WITH_VLLM = (
    *("unit/engine/vllm", "unit/worker"),
    *(f"engine/test_{each}internals.py" for each in ("", "client_", "lora_", "openai_")),
    "unit/integrations/test_torchrl_conversion.py",
    *("unit/daemon/test_frontend.py", "unit/test_refused_starts.py", "fake_cuda"),
)
"""Tests of code that runs inside vLLM, in the process of the test itself."""
BREAKING_STEPS = ("engine/trap.py", "engine/wrong_driver.py", "fake_cuda/test_mutations.py", "simulation/ablations.py")
"""They put something wrong into the middle of our code, to see that tests notice it."""
NAMES_OF_OTHERS = {
    *("_actions", "_exit", "_fields", "_last_mapping", "_last_slot_layout", "_output", "_registry", "_replace"),
    *("_reset_caches", "_should_skip_dynamo", "_sleep", "_transport"),
}
"""Private names of libraries that something of ours has as well."""


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


def is_private(name: str) -> bool:
    """By its underscore; those of Python have two."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(tree: ast.Module) -> set[str]:
    """The private names of a module: of functions, classes, constants and attributes."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Attribute(ctx=ast.Store()):
                names.add(node.attr)
            case ast.Assign() | ast.AnnAssign() if node.col_offset == 0:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return set(filter(is_private, names))


def taken_by(tree: ast.Module) -> set[tuple[int, str]]:
    """The private names that a module takes from elsewhere, with their lines."""
    taken = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                names = []  # a subclass may
            case ast.Attribute():
                names = [node.attr]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in OURS:
                names = [alias.name for alias in node.names]
            case ast.Call(func=ast.Attribute(attr="setattr")):
                texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
                names = [str(text).rpartition(".")[2] for text in texts]
            case _:
                names = []
        taken |= {(getattr(node, "lineno", 0), name) for name in names if is_private(name)}
    return taken


@pytest.mark.slow
def test_tests_use_no_private_name_of_ours() -> None:
    """They would break with every change inside of what they test."""
    root = TESTS.parent
    ours = set().union(*(defined_in(ast.parse(path.read_text())) for path in (root / "genserve").rglob("*.py")))
    found = []
    for path in sorted([*TESTS.rglob("*.py"), *(root / "bench").rglob("*.py")]):
        tree = ast.parse(path.read_text())
        names = ours - NAMES_OF_OTHERS - defined_in(tree)
        found += [(path.relative_to(root), line, name) for line, name in sorted(taken_by(tree)) if name in names]
    breaking = {Path("tests") / each for each in BREAKING_STEPS}
    assert {path for path, *_ in found} >= breaking, "the search finds nothing where something is"
    assert [f"{path}:{line}: {name}" for path, line, name in found if path not in breaking] == []


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
