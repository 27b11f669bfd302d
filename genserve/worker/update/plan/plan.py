"""A load that was recorded: its tensors in their order, and what is done with each."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from genserve.worker.update.plan.recipe import Recipe

Tensors = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The `names` of the tensors; of each the number of its `recipes` in `followed`; and in `places`, one after
    another, where in the parameters: the number of one, and an offset.

    It takes some 150 bytes for a tensor, most of them for its name."""

    names: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    followed: "array[int]"
    places: "array[int]"

    def replay(self, tensors: Tensors, parameters: Sequence[torch.Tensor]) -> bool:
        """Loads the tensors into the parameters, each before it takes the next one.

        Returns whether they are those of the plan. If not, what the parameters hold then is not a version."""
        i = begin = 0
        for name, tensor in tensors:
            if i == len(self.names) or name != self.names[i]:
                return False
            recipe = self.recipes[self.followed[i]]
            end = begin + 2 * recipe.num_places
            # The operations are as torch's dispatcher saw them: modes above it have had their say.
            with torch._C.DisableTorchFunction():
                if not recipe.takes(tensor):
                    return False
                recipe.follow(tensor, parameters, self.places[begin:end])
            i, begin = i + 1, end
        return i == len(self.names)
