"""Finds sleeps in tests that poll nothing: `python -m tests.support.fixed_sleeps [PATH...]`.

On a busy machine such a test looks before anything could happen, and passes, or looks too early, and fails. Instead:
`tests.support.patience` waits for what has to come, and `tests.support.clocks` sets time forward.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_ALLOWED = ("tests/support/", "tests/bench/", "tests/simulation/")
"""Where sleeping is the purpose: stand-ins that take time, tests of what measures it, and what runs in virtual time."""


def fixed_sleeps(path: Path) -> Iterator[int]:
    """The lines of `path` with a sleep outside of a loop that ends when something holds."""
    yield from _in(ast.parse(path.read_bytes()), polls=False)


def _in(node: ast.AST, polls: bool) -> Iterator[int]:
    for child in ast.iter_child_nodes(node):
        if _is_sleep(child) and not polls:
            yield child.lineno
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _in(child, polls=False)
        elif isinstance(child, ast.While | ast.For | ast.AsyncFor):
            yield from _in(child, polls or _looks(child))
        else:
            yield from _in(child, polls)


def _looks(loop: ast.While | ast.For | ast.AsyncFor) -> bool:
    """Whether it ends by what it sees, and not only by a count."""
    if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant):
        return True
    return any(isinstance(each, ast.Break | ast.Return | ast.Yield) for each in ast.walk(loop))


def _is_sleep(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio" | "time"), attr="sleep"), args=[seconds]):
            return not (isinstance(seconds, ast.Constant) and seconds.value == 0)
    return False


def main(arguments: Sequence[str]) -> int:
    """Prints the lines; 1 if there are any."""
    roots = [Path(each) for each in arguments or ("tests",)]
    files = sorted(file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root]))
    checked = [file for file in files if not str(file).startswith(_ALLOWED)]
    found = [f"{file}:{line}" for file in checked for line in fixed_sleeps(file)]
    print("\n".join(found) or f"no fixed sleep in {len(checked)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
