"""Gives genserve's modules another source than their file's: one with a bug, or one that says which lines run."""

import ast
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

# The name under which a probed module finds what to call before each statement. `builtins` carries it.
PROBE = "_line_runs"


class _Loader(SourceFileLoader):
    """Compiles what `transform` makes of the source; no bytecode is read or written."""

    def __init__(self, fullname: str, path: str, transform: Callable[[bytes], ast.Module]) -> None:
        super().__init__(fullname, path)
        self._transform = transform

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._transform(self.get_data(self.path)), self.path, "exec", dont_inherit=True)


class Sources(MetaPathFinder):
    """Finds modules of genserve: those whose file is in `transforms` with a source of their own."""

    def __init__(self, transforms: dict[Path, Callable[[bytes], ast.Module]]) -> None:
        self._transforms = transforms

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("genserve."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or (transform := self._transforms.get(Path(spec.origin))) is None:
            return None
        spec.loader = _Loader(fullname, spec.origin, transform)
        return spec

    def install(self) -> None:
        """Raises RuntimeError when one of the modules is here already: it would run as it is in its file."""
        present = {Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
        if early := present & self._transforms.keys():
            raise RuntimeError(f"imported too early: {', '.join(sorted(map(str, early)))}")
        sys.meta_path.insert(0, self)


def probed(source: bytes, file_index: int) -> ast.Module:
    """The module, which before each statement calls PROBE with (file_index, line)."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt):
                setattr(node, name, list(_with_probes(statements, file_index)))
    return ast.fix_missing_locations(tree)


def _with_probes(statements: list[ast.stmt], file_index: int) -> "list[ast.stmt]":
    found: list[ast.stmt] = []
    for index, statement in enumerate(statements):
        is_first = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        is_docstring = index == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_first and not is_docstring:
            where = ast.Tuple([ast.Constant(file_index), ast.Constant(statement.lineno)], ast.Load())
            call = ast.Expr(ast.Call(ast.Name(PROBE, ast.Load()), [where], []))
            found.append(ast.copy_location(call, statement))
        found.append(statement)
    return found
