"""Computes a tensor that steps have made again, by vLLM's source, to show that no weight went into it.

It evaluates only expressions without a tensor among their inputs: torch's constructors, over numbers, types and
devices. No weight can be in their results.
"""

import ast
import math
import sys
from typing import Any, Final

import torch

from genserve.worker.model.step_source import Assignment, assignments

_CONSTRUCTORS: Final = frozenset({"arange", "eye", "full", "linspace", "ones", "tensor", "zeros"})
_METHODS: Final = frozenset(
    {
        *("contiguous", "expand", "flatten", "float", "int", "long", "repeat", "reshape", "squeeze", "t", "to"),
        *("transpose", "unsqueeze", "view"),
    }
)
_BUILTINS: Final = {"bool": bool, "float": float, "int": int, "max": max, "min": min}
_UNKNOWN: Final = object()
"""Stands for a name without a value. It is no plain value, so `_plain` refuses it."""
# A number of type float may be a scale that loading has set, and so a weight.
_PLAIN: Final = (bool, int, str, torch.dtype, torch.device, type(None))


class _NotEvaluatedError(Exception):
    """An expression has an input that may depend on weights, or is of a form that is not evaluated."""


def recomputed(owner: Any, key: str, like: torch.Tensor) -> list[torch.Tensor]:
    """The results of all assignments to attribute `key` in the source of `owner`, on the CPU; `like` gives the dtype.
    Empty if there are none, or if one of them may have a weight among its inputs."""
    found = []
    for assignment in assignments(type(owner), key):
        try:
            value = _Evaluation(owner, assignment, like).of(assignment.value)
        except (_NotEvaluatedError, TypeError, ValueError, RuntimeError, AttributeError):  # others: torch's
            return []
        if not isinstance(value, torch.Tensor):
            return []
        found.append(value)
    return found


class _Evaluation:
    """Evaluates an expression of a method, in which only what is allowed here has a meaning."""

    def __init__(self, owner: Any, assignment: Assignment, like: torch.Tensor) -> None:
        self._owner = owner
        self._own = assignment.own
        self._like = like
        kinds = [kind for kind in type(owner).__mro__ if assignment.method in vars(kind)]
        self._globals = vars(sys.modules[kinds[0].__module__]) if kinds else {}

    def of(self, node: ast.expr | None) -> Any:
        """Its value. Raises _NotEvaluatedError."""
        match node:
            case ast.Constant(value):
                return value
            case ast.Tuple(elts) | ast.List(elts):
                return [self.of(each) for each in elts]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.of(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self._operation(op, self.of(left), self.of(right))
            case ast.Name(name):
                return self._plain(self._globals.get(name, _UNKNOWN))
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call(func=func, args=arguments, keywords=keywords):
                if any(isinstance(each, ast.Starred) for each in arguments) or any(
                    each.arg is None for each in keywords
                ):
                    raise _NotEvaluatedError
                given = {str(each.arg): self.of(each.value) for each in keywords}
                return self._function(func)(*[self.of(each) for each in arguments], **given)
        raise _NotEvaluatedError

    def _attribute(self, node: ast.Attribute) -> Any:
        # Of whatever object: the dtype of a step's argument is that of the tensor, and the result is on the CPU.
        if node.attr == "device":
            return torch.device("cpu")
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name) if isinstance(
                getattr(torch, name, None), torch.dtype
            ):
                return getattr(torch, name)
            case ast.Attribute(value=ast.Name("math"), attr=name):
                return self._plain(getattr(math, name), float)
            case ast.Attribute(value=ast.Name(own), attr=name) if own == self._own and name != "dtype":
                return self._plain(vars(self._owner).get(name, _UNKNOWN))
        if node.attr == "dtype":
            return self._like.dtype
        raise _NotEvaluatedError

    def _function(self, node: ast.expr) -> Any:
        match node:
            case ast.Attribute(value=ast.Name("torch"), attr=name) if name in _CONSTRUCTORS:
                return getattr(torch, name)
            case ast.Attribute(value=ast.Name("math"), attr=name):
                return getattr(math, name)
            case ast.Attribute(value=value, attr=name) if name in _METHODS:
                made = self.of(value)
                if isinstance(made, torch.Tensor):
                    return getattr(made, name)
            case ast.Name(name) if name in _BUILTINS and name not in self._globals:
                return _BUILTINS[name]
        raise _NotEvaluatedError

    def _operation(self, op: ast.operator, left: Any, right: Any) -> Any:
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return left // right
            case ast.Pow():
                return left**right
        raise _NotEvaluatedError

    def _plain(self, value: Any, *further: type) -> Any:
        if not isinstance(value, (*_PLAIN, *further)):
            raise _NotEvaluatedError
        return value
