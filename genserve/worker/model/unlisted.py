"""Refuses a push if steps have made something that no table of `step_made` has: it may depend on weights.

Nobody but a reader can tell that it does not. Rules that judged vLLM's source (each step makes it anew, it is made
without tensors) accepted pushes after which contents of the old weights were served: helpers, subclasses, decorators
and tensors of zeros that are written into later looked harmless.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch

from genserve.worker.model.contents import address_of
from genserve.worker.model.step_made import in_no_table
from genserve.worker.model.tree import Holding

_MAX_NAMED: Final = 8


def check(made: Mapping[str, Holding], live: Mapping[str, Holding], *, copied: bool) -> None:
    """Raises ValueError naming numbers and tensors that a push would not renew. `made`: what steps may have made;
    `live`: all holdings of the model; `copied`: an exchange copies contents, so that views of weights change with
    them."""
    unknown = in_no_table(made)
    if unknown and copied:
        memory = _memory_of(place for name, place in live.items() if name not in made)
        unknown = {name: place for name, place in unknown.items() if _address(place) not in memory}
    if unknown:
        names = sorted(unknown)
        raise ValueError(
            f"steps have made {', '.join(names[:_MAX_NAMED])} ({len(names)} in all) since the model was loaded: a push "
            "would not renew it, and it may depend on weights"
        )


def _memory_of(places: Iterable[Holding]) -> frozenset[int]:
    """Where the storages of these tensors begin."""
    return frozenset(address for address in map(_address, places) if address is not None)


def _address(place: Holding) -> int | None:
    return address_of(place.value) if isinstance(place.value, torch.Tensor) else None
