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

    def replay(self, tensors: Tensors, parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]] | None:
        """Loads the tensors into the parameters, each before it takes the next one.

        None if they are those of the plan. Else the tensors that were taken until this was seen: what the parameters
        hold then is not a version."""
        taken: list[tuple[str, torch.Tensor]] = []
        begin = 0
        for name, tensor in tensors:
            i = len(taken)
            taken.append((name, tensor))
            if i == len(self.names) or name != self.names[i]:
                return taken
            recipe = self.recipes[self.followed[i]]
            end = begin + 2 * recipe.num_places
            # The operations are as torch's dispatcher saw them: modes above it have had their say.
            with torch._C.DisableTorchFunction():
                if not recipe.takes(tensor):
                    return taken
                recipe.follow(tensor, parameters, self.places[begin:end])
            begin = end
        return None if len(taken) == len(self.names) else taken
