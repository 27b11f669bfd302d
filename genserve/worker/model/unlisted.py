"""Whether a push may leave a number or a tensor that steps have made, and that no table of `step_made` has.

It may be computed from weights. A push that leaves it would then serve a mix of two versions. So it must be one of
these, and the log names it once, unless it is a view:

- A view of the memory of an exchanged tensor, where contents are copied: the push changes it too.
- By vLLM's source, each step makes it anew before it reads it.
- By vLLM's source, it is made without any tensor, and making it again gives the same contents, by digest.

The push is refused for any other.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch

from genserve.worker.model import step_source
from genserve.worker.model.contents import address_of, digest
from genserve.worker.model.recomputed import recomputed
from genserve.worker.model.step_made import in_no_table
from genserve.worker.model.tree import Holding

log = logging.getLogger(__name__)

_MAX_NAMED: Final = 8
_VIEW: Final = "it is a view of a weight"
_warned: set[tuple[str, str]] = set()  # by class and attribute: a model has one in each layer


def check(made: Mapping[str, Holding], live: Mapping[str, Holding], *, copied: bool) -> None:
    """Logs a warning for each that a push may leave as it is, once. `made`: what steps may have made; `live`: all
    holdings of the model; `copied`: an exchange copies contents. Raises ValueError naming the others."""
    places = in_no_table(made)
    if not places:
        return
    memory = _memory_of(place for name, place in live.items() if name not in made) if copied else frozenset[int]()
    reasons = {name: _reason(place, memory) for name, place in places.items()}
    refused = sorted(name for name, reason in reasons.items() if reason is None)
    if refused:
        raise ValueError(_refusal(refused, places[refused[0]]))
    for name, reason in reasons.items():
        said = (type(places[name].owner).__name__, places[name].key)
        if reason != _VIEW and said not in _warned:
            _warned.add(said)
            log.warning("steps of this vLLM make %s (%s), which genserve does not know: %s", name, said[0], reason)


def _reason(place: Holding, memory: Collection[int]) -> str | None:
    """Why a push may leave it as it is; None if it may not."""
    owner, key, value = place.owner, place.key, place.value
    if place.table != "__dict__":
        return None
    if isinstance(value, torch.Tensor) and address_of(value) in memory:
        return _VIEW
    if step_source.is_made_every_step(type(owner), key):
        return "each step makes it anew"
    if isinstance(value, torch.Tensor) and any(_is_equal(each, value) for each in recomputed(owner, key, value)):
        return "it is made without weights, and making it again gives the same contents"
    return None


def _is_equal(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (value.shape, value.dtype) == (tensor.shape, tensor.dtype) and digest(value) == digest(tensor)


def _refusal(names: list[str], first: Holding) -> str:
    found = step_source.assignments(type(first.owner), first.key)
    where = f", the first in {type(first.owner).__name__}.{found[0].method}" if found else ""
    return (
        f"steps have made {', '.join(names[:_MAX_NAMED])} ({len(names)} in all{where}) since the model was loaded: a "
        "push would not renew it, and it may depend on weights"
    )


def _memory_of(places: Iterable[Holding]) -> frozenset[int]:
    """Where the storages of these tensors begin."""
    addresses = (address_of(place.value) for place in places if isinstance(place.value, torch.Tensor))
    return frozenset(address for address in addresses if address is not None)
