"""What an object keeps alive: for what must not grow with use, however it is stored."""

import asyncio
import gc
from types import FunctionType, ModuleType
from typing import TypeVar

T = TypeVar("T")

_EVERYTHING = (type, ModuleType, FunctionType, asyncio.AbstractEventLoop)
"""By these one would reach the whole program."""


def kept(root: object, kind: type[T] = object) -> list[T]:  # type: ignore[assignment]
    """All objects of this kind that can be reached from `root`, each once."""
    found: dict[int, object] = {}
    following = [root]
    while following:
        each = following.pop()
        if id(each) not in found and not isinstance(each, _EVERYTHING):
            found[id(each)] = each
            following += gc.get_referents(each)
    return [each for each in found.values() if isinstance(each, kind)]
