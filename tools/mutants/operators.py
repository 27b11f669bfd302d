"""One-line bugs: what may be wrong on a line, found in its syntax tree and written back as text.

What no test can notice is left alone: docstrings, annotations, `__all__`, decorators, log lines, strings, imports.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip
# Raised by nothing: who handles this handles nothing.
_NEVER_RAISED = "StopAsyncIteration"
_LOGGERS = ("log", "logger", "logging", "warnings")
# Their arguments may come in any order.
_COMMUTATIVE = ("max", "min", "gather")
# Without these a call waits longer than it should: what a test cannot see in its time.
_PATIENCE = ("timeout", "timeout_s")
# Their names are for people.
_NAMED = ("create_task", "Thread")


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces bytes [start, end) of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file with one bug. `lineno` is the line of the bug, from 1; `before` and `after` are the code there."""

    path: Path
    lineno: int
    operator: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.operator}: {self.before}  ->  {self.after}"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a bug can be put into a file, and how; cheap to have many of."""

    path: Path
    lineno: int
    operator: str
    edits: tuple[Edit, ...]

    def mutant(self) -> Mutant | None:
        """The file with the bug; None where that is no program, or the same one."""
        source, same = _read(self.path)
        mutated = _edited(source, self.edits)
        try:
            tree = ast.parse(mutated)
            compile(tree, str(self.path), "exec")
        except SyntaxError:  # two arguments of one name, an empty `except ()`
            return None
        if ast.dump(tree) == same:
            return None
        return Mutant(self.path, self.lineno, self.operator, *_difference(source.decode(), mutated), mutated)


def sites_of(path: Path) -> list[Site]:
    """Every place for a bug in a file, in no order that means anything."""
    source, _ = _read(path)
    found = _Sites(source).sites(ast.parse(source))
    return list(dict.fromkeys(Site(path, lineno, operator, tuple(edits)) for lineno, operator, edits in found))


def mutants_of(path: Path) -> list[Mutant]:
    """Every bug that there is for a file, each once, in the order of its lines."""
    mutants = [mutant for site in sites_of(path) if (mutant := site.mutant()) is not None]
    return sorted({mutant.source: mutant for mutant in mutants}.values(), key=lambda mutant: mutant.lineno)


@cache
def _read(path: Path) -> tuple[bytes, str]:
    """A file, and its syntax tree as text."""
    source = path.read_bytes()
    return source, ast.dump(ast.parse(source))


def _edited(source: bytes, edits: Sequence[Edit]) -> str:
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        source = source[: edit.start] + edit.text.encode() + source[edit.end :]
    return source.decode()


def _difference(before: str, after: str) -> tuple[str, str]:
    """The lines that differ, each side on one line."""
    old, new = before.splitlines(), after.splitlines()
    start = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    num_equal = 0
    while num_equal < min(len(old), len(new)) - start - 1 and old[-1 - num_equal] == new[-1 - num_equal]:
        num_equal += 1
    sides = (lines[start : len(lines) - num_equal] for lines in (old, new))
    first, second = (" ".join(line.strip() for line in side) for side in sides)
    return first, second


class _Sites:
    """Where a bug can be put into a file, and how."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def sites(self, node: ast.AST) -> Iterator[tuple[int, str, list[Edit]]]:
        """Every bug below a node: its line, what it is called, and the edits that make it."""
        for operator, edits in self._bugs(node):
            yield getattr(node, "lineno", 1), operator, edits
        for child in _code_in(node):
            if not _is_unnoticed(child):
                yield from self.sites(child)

    def _bugs(self, node: ast.AST) -> Iterator[tuple[str, list[Edit]]]:
        match node:
            case ast.Compare(left, ops, comparators):
                for i, op in enumerate(ops):
                    flipped = [*ops[:i], _COMPARISONS[type(op)](), *ops[i + 1 :]]
                    yield "comparison", [self._put(node, ast.Compare(left, flipped, comparators))]
                    if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                        equal = [*ops[:i], ast.Eq(), *ops[i + 1 :]]
                        yield "comparison", [self._put(node, ast.Compare(left, equal, comparators))]
            case ast.BoolOp(op, values):
                yield (
                    "and/or",
                    [self._put(node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))],
                )
            case ast.UnaryOp(ast.Not(), operand):
                yield "not removed", [self._put(node, operand)]
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC and not _is_text(left) and not _is_text(right):
                yield "arithmetic", [self._put(node, ast.BinOp(left, _ARITHMETIC[type(op)](), right))]
            case ast.Constant(bool() as value):
                yield "constant", [self._put(node, ast.Constant(not value))]
            case ast.Constant(int() as value):  # how many seconds, or what share, is a choice: there is no wrong one
                yield "constant", [self._put(node, ast.Constant(value + 1))]
                yield "constant", [self._put(node, ast.Constant(value - 1))]
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                for value in (True, False):
                    if not isinstance(test, ast.Constant) and (value is False or not isinstance(node, ast.While)):
                        yield "condition", [self._put(test, ast.Constant(value))]
            case ast.comprehension(ifs=[*tests]):
                for test in tests:
                    yield "condition", [self._put(test, ast.Constant(True))]
            case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant) or value.value is not None:
                yield "return None", [self._put(value, ast.Constant(None))]
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "statement dropped", [self._put(node, ast.Pass())]
            case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
                if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Yield | ast.Constant):
                    yield "statement dropped", [self._put(node, ast.Pass())]
            case ast.ExceptHandler(type=ast.expr() as kind):
                yield "except", [self._put(kind, ast.Name(_NEVER_RAISED))]
                if isinstance(kind, ast.Tuple):
                    yield from (("except", [self._put(each, ast.Name(_NEVER_RAISED))]) for each in kind.elts)
        if isinstance(node, ast.Call):
            yield from self._arguments(node)

    def _arguments(self, call: ast.Call) -> Iterator[tuple[str, list[Edit]]]:
        if isinstance(call.func, ast.Name) and call.func.id == "suppress":
            for arg in call.args:
                yield "except", [self._put(arg, ast.Name(_NEVER_RAISED))]
            return
        for keyword in call.keywords:
            if keyword.arg in _PATIENCE or (keyword.arg == "name" and _name_of(call.func) in _NAMED):
                continue
            start, end = self._span(keyword)
            after = self._source[end:].lstrip()
            if after.startswith(b","):
                end = len(self._source) - len(after) + 1
            yield "argument dropped", [Edit(start, end, "")]
        if _name_of(call.func) in _COMMUTATIVE:
            return
        for values in (call.args, [keyword.value for keyword in call.keywords]):
            for one, other in pairwise(values):
                if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                    yield "arguments swapped", [self._put(one, other), self._put(other, one)]

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _put(self, old: ast.AST, new: ast.AST) -> Edit:
        text = ast.unparse(ast.fix_missing_locations(new))
        if isinstance(new, ast.BoolOp | ast.BinOp | ast.Compare):
            text = f"({text})"
        return Edit(*self._span(old), text)


def _name_of(function: ast.expr) -> str:
    """The last part of its name."""
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _code_in(node: ast.AST) -> Iterator[ast.AST]:
    """What of a node is run, and can be noticed."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr() | ast.Global() | ast.Nonlocal():
            return
        case ast.AnnAssign(value=value):
            yield from (value,) if value is not None else ()
        case ast.arguments():
            yield from node.defaults
            yield from (each for each in node.kw_defaults if each is not None)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (node.args, *node.body)
        case ast.ClassDef():
            yield from node.body
        case _:
            yield from ast.iter_child_nodes(node)


def _is_unnoticed(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(targets=[ast.Name()], value=ast.BinOp(op=ast.BitOr())):  # a union of types
            return True
        case ast.Expr(value=ast.Call() as call) | (ast.Call() as call):
            root = call.func
            while isinstance(root, ast.Attribute):
                root = root.value
            return isinstance(root, ast.Name) and root.id in _LOGGERS
    return False
