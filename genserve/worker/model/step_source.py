"""How vLLM's source assigns the attributes of an object, for those that no table of `step_made` has.

It reads the methods of the object's classes, and runs none of them. It does not find attributes that other objects set,
or that are set in ways that it does not know: for these it reports no assignment.
"""

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

STEPS = ("forward", "apply", "__call__")
"""Beginnings of the names of methods that run in each step that uses the object."""
_WHOLE_STEPS = frozenset(
    {"forward", "__call__", "apply", *(f"forward_{each}" for each in ("native", "cuda", "hip", "cpu", "xpu", "oot"))}
)
"""Those that are the object's whole part of a step. A method that one of them calls may run only once."""
_NOT_STEPS = frozenset(
    {
        *("__init__", "__post_init__", "__new__", "__setattr__", "__del__", "create_weights", "load_weights"),
        *("weight_loader", "process_weights_after_loading", "register_parameter"),
    }
)
"""Methods of construction and loading: what they make is there before the first step."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment to an attribute of `self` outside of construction and loading. `value` is what is assigned; None if
    it is not an expression of its own, as in `self.a, self.b = f()`.

    `every_step`: each step that uses the object does it before it reads the attribute. `where_absent`: it is done if
    the object lacks the attribute, or if that is None."""

    method: str
    own: str
    """The method's name for `self`."""
    value: ast.expr | None
    every_step: bool
    where_absent: bool

    @property
    def is_reset(self) -> bool:
        """Whether it assigns None."""
        return isinstance(self.value, ast.Constant) and self.value.value is None


def assignments(kind: type, key: str) -> tuple[Assignment, ...]:
    """All such assignments to `key` in the source of a class and those that it derives from, but for None. Empty if
    there are none, or no source."""
    found: list[Assignment] = []
    for each in kind.__mro__:
        found += _of_class(each).get(key, ())
    return tuple(each for each in found if not each.is_reset)


def is_made_every_step(kind: type, key: str) -> bool:
    """Whether each step makes it anew, so that a step after a push reads nothing of before."""
    found = assignments(kind, key)
    return bool(found) and all(each.every_step for each in found)


def classes_of(file: Path) -> Iterator[tuple[str, dict[str, list[Assignment]]]]:
    """The classes of a file by name, each with its attributes that are made outside of construction and loading."""
    for node in ast.walk(_parsed(str(file))):
        if isinstance(node, ast.ClassDef):
            yield node.name, _in_class(node)


@cache
def _of_class(kind: type) -> dict[str, list[Assignment]]:
    try:
        file = inspect.getsourcefile(kind)
        first = inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):  # it has none: a class of C, or one that was made by a call
        return {}
    if file is None:
        return {}
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__ and first in (node.lineno, _first_line(node)):
            return _in_class(node)
    return {}


def _first_line(node: ast.ClassDef) -> int:
    """From which inspect counts: that of the first decorator."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


@cache
def _parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def _in_class(node: ast.ClassDef) -> dict[str, list[Assignment]]:
    found: dict[str, list[Assignment]] = {}
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name not in _NOT_STEPS:
            for key, assignment in _in_method(method):
                found.setdefault(key, []).append(assignment)
    return found


def _in_method(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, Assignment]]:
    arguments = [*method.args.posonlyargs, *method.args.args]
    if not arguments:
        return
    own = arguments[0].arg
    for statement, around, before in _statements(method.body, (), ()):
        for key, value in _assigned(statement, own):
            plain = not around and method.name in _WHOLE_STEPS
            is_first = not any(_reads(each, own, key) or _leaves(each) for each in before)
            every_step = plain and is_first and value is not None and not _reads(value, own, key)
            absent = any(_asks_for_absence(test, own, key) for test in around) or any(
                _leaves_if_present(each, own, key) for each in before
            )
            yield key, Assignment(method.name, own, value, every_step, absent)


def _statements(
    body: Sequence[ast.stmt], around: tuple[ast.expr, ...], before: tuple[ast.stmt, ...]
) -> Iterator[tuple[ast.stmt, tuple[ast.expr, ...], tuple[ast.stmt, ...]]]:
    """Each statement of a method, with the conditions around it and the statements before it on its way. A loop or an
    exception counts as a condition that says nothing."""
    unknown = (ast.Constant(...),)
    for number, each in enumerate(body):
        passed = (*before, *body[:number])
        yield each, around, passed
        match each:
            case ast.If():
                yield from _statements(each.body, (*around, each.test), passed)
                yield from _statements(each.orelse, (*around, *unknown), passed)
            case ast.With() | ast.AsyncWith():
                yield from _statements(each.body, around, passed)
            case ast.For() | ast.AsyncFor() | ast.While():
                yield from _statements([*each.body, *each.orelse], (*around, *unknown), passed)
            case ast.Try():
                handlers = [statement for handler in each.handlers for statement in handler.body]
                inside = [*each.body, *handlers, *each.orelse, *each.finalbody]
                yield from _statements(inside, (*around, *unknown), passed)
            case ast.Match():
                inside = [statement for case in each.cases for statement in case.body]
                yield from _statements(inside, (*around, *unknown), passed)


def _assigned(statement: ast.stmt, own: str) -> Iterator[tuple[str, ast.expr | None]]:
    """Attributes of `own` that this statement itself assigns, with their values."""
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if _is_own(target, own):
                    yield target.attr, value
                elif isinstance(target, ast.Tuple | ast.List):
                    yield from ((each.attr, None) for each in target.elts if _is_own(each, own))
        case ast.AnnAssign(target=target, value=value) if value is not None and _is_own(target, own):
            yield target.attr, value
        case ast.AugAssign(target=target) if _is_own(target, own):
            yield target.attr, None
        case ast.Expr(value=ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), ast.Constant(key), value])):
            if name == own and isinstance(key, str):
                yield key, value


def _is_own(node: ast.AST, own: str) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own


def _reads(node: ast.AST, own: str, key: str) -> bool:
    """Whether it mentions the attribute, also by its name alone, but for an assignment to it."""
    return any(
        (_is_own(each, own) and each.attr == key and isinstance(each.ctx, ast.Load))
        or (isinstance(each, ast.Constant) and each.value == key)
        for each in ast.walk(node)
    )


def _leaves(node: ast.AST) -> bool:
    """Whether it may end the method."""
    return any(isinstance(each, ast.Return | ast.Raise | ast.Yield | ast.YieldFrom) for each in ast.walk(node))


def _asks_for_absence(test: ast.expr, own: str, key: str) -> bool:
    """Whether a condition holds where the attribute is absent or None, or asks for that and for something else."""
    match test:
        case ast.BoolOp(values=values):
            return any(_asks_for_absence(each, own, key) for each in values)
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(None)]):
            return _gets(left, own, key)
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Call(func=ast.Name("hasattr"), args=[ast.Name(name), ast.Constant(k)])
        ):
            return name == own and k == key
    return False


def _gets(node: ast.expr, own: str, key: str) -> bool:
    """self.key, or getattr(self, "key", None)."""
    match node:
        case ast.Attribute(value=ast.Name(name), attr=attr):
            return name == own and attr == key
        case ast.Call(func=ast.Name("getattr"), args=[ast.Name(name), ast.Constant(k), ast.Constant(None)]):
            return name == own and k == key
    return False


def _leaves_if_present(statement: ast.stmt, own: str, key: str) -> bool:
    """`if self.key is not None: return ...`"""
    match statement:
        case ast.If(test=ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(None)]), body=body):
            return _gets(left, own, key) and isinstance(body[-1], ast.Return)
    return False
