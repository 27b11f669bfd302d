"""What steps make on a live model between the end of a preparation and its commit, which may be minutes.

The exchange was built for what the model had then. To look at a whole model takes too long for a pause. This looks at
those attributes alone that were None, and for objects with more attributes than then: about a millisecond for a model
of 1,000 modules.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from genserve.worker.model import unlisted
from genserve.worker.model.tree import NOT_WEIGHTS, Holding, owners


class MadeSince:
    """A model as it is now."""

    def __init__(self, live: nn.Module) -> None:
        self._then: list[tuple[str, Any, dict[str, Any], int, list[str]]] = []
        for path, owner in owners(live).items():
            attributes = vars(owner)
            absent = [key for key, value in list(attributes.items()) if value is None]
            self._then.append((path, owner, attributes, len(attributes), absent))

    def check(self) -> None:
        """Raises RuntimeError naming what was made since, if it may depend on weights."""
        made = {f"{path}.{key}": Holding(owner, "__dict__", key, value) for path, owner, key, value in self._new()}
        try:
            unlisted.check(made, {}, copied=False)
        except ValueError as error:
            raise RuntimeError(f"the version was prepared before that: push it again: {error}") from error

    def _new(self) -> Iterator[tuple[str, Any, str, Any]]:
        for path, owner, attributes, size, absent in self._then:
            # A step takes away no attribute that it does not make again.
            keys = absent if len(attributes) == size else list(attributes)[size:] + absent
            for key in keys:
                value = attributes.get(key)
                if value is not None and isinstance(value, torch.Tensor | float) and key not in NOT_WEIGHTS:
                    yield path, owner, key, value
