"""Calls of vLLM's loaders: a push like the two before needs none."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def loader_calls(models: Iterable[Any]) -> Iterator[list[str]]:
    """The names of the classes of these models whose loader is called in the block, also in other objects of them."""
    calls: list[str] = []
    loaders = {type(model): type(model).load_weights for model in models}

    def counting(kind: Any) -> Any:
        def load_weights(self: Any, *args: Any, **options: Any) -> Any:
            calls.append(kind.__name__)
            return loaders[kind](self, *args, **options)

        return load_weights

    for kind in loaders:
        kind.load_weights = counting(kind)
    try:
        yield calls
    finally:
        for kind, loader in loaders.items():
            kind.load_weights = loader
