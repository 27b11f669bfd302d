"""What becomes of a number or a tensor that steps have made, and that no table of `step_made` has.

It may be computed from weights. A push that leaves it would then serve a mix of two versions. So it must be one of
these, and the log names all but views once:

- `VIEW`: of the memory of an exchanged tensor, where contents are copied. The push changes it too.
- `FRESH`: by vLLM's source, each step makes it anew before it reads it.
- `PROVEN`: by vLLM's source, it is made without any tensor, and making it again gives the same contents, by digest.
- `RENEWED`: by vLLM's source, a step makes it where it is absent. Where references are exchanged, and no captured code
  has its address, a push takes it away, so that the next step makes it of the new weights (`exchange`).

The push is refused for any other.
"""

import logging
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import torch

from genserve.worker.model import step_source
from genserve.worker.model.contents import address_of, digest
from genserve.worker.model.recomputed import recomputed
from genserve.worker.model.tree import Holding

log = logging.getLogger(__name__)

_MAX_NAMED = 8
_PLAIN = (bool, int, str, type(None))
MISSING: Any = object()
"""Stands for the value of an attribute that an object does not have."""


class Fate(Enum):
    """Why a push may leave it, or what the push does; said to users."""

    VIEW = ""
    FRESH = "each step makes it anew"
    PROVEN = "it is made without weights, and making it again gives the same contents"
    RENEWED = "a push takes it away, and the next step makes it of the new weights"


def fates(places: Mapping[str, Holding], *, copied: bool, memory: Collection[int] = ()) -> dict[str, Fate]:
    """What becomes of each, by name, and a warning for each that was not warned of yet. `copied`: an exchange copies
    contents; `memory`: where the storages of exchanged tensors begin. Raises ValueError naming those that a push may
    neither leave nor renew."""
    found = {name: _fate(place, copied, memory) for name, place in places.items()}
    refused = sorted(name for name, fate in found.items() if fate is None)
    if refused:
        raise ValueError(_refusal(refused, places[refused[0]]))
    known = {name: fate for name, fate in found.items() if fate is not None}
    for name, fate in known.items():
        if fate is not Fate.VIEW:
            _warn(name, places[name], fate)
    return known


def as_loaded(name: str, place: Holding, loaded: Any) -> Any:
    """The value that loading leaves where a step has made `place`, MISSING for none. `loaded`: the same object of a
    model that was just loaded, None without one.

    Raises ValueError if the steps have also left something plain on the object: it may say that the value is there."""
    if loaded is None:
        raise ValueError(_refusal([name], place))
    then = vars(loaded)
    changed = sorted(
        key
        for key, value in list(vars(place.owner).items())
        if key != place.key and isinstance(value, _PLAIN) and then.get(key, MISSING) != value
    )
    if changed:
        raise ValueError(f"{_refusal([name], place)}, and {changed[0]} beside it is not as loading leaves it")
    return then.get(place.key, MISSING)


def _fate(place: Holding, copied: bool, memory: Collection[int]) -> Fate | None:
    owner, key, value = place.owner, place.key, place.value
    if place.table != "__dict__":
        return None
    if isinstance(value, torch.Tensor) and copied and address_of(value) in memory:
        return Fate.VIEW
    if step_source.is_made_every_step(type(owner), key):
        return Fate.FRESH
    if isinstance(value, torch.Tensor) and any(_is_equal(each, value) for each in recomputed(owner, key, value)):
        return Fate.PROVEN
    if not copied and step_source.is_made_where_absent(type(owner), key):
        return Fate.RENEWED
    return None


def _is_equal(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (value.shape, value.dtype) == (tensor.shape, tensor.dtype) and digest(value) == digest(tensor)


def _refusal(names: list[str], first: Holding) -> str:
    made = step_source.makings(type(first.owner), first.key)
    where = f", the first in {type(first.owner).__name__}.{made[0].method}" if made else ""
    return (
        f"steps have made {', '.join(names[:_MAX_NAMED])} ({len(names)} in all{where}) since the model was loaded: a "
        "push would not renew it, and it may depend on weights"
    )


_warned: set[tuple[str, str, Fate]] = set()
"""Classes and attributes that the log has named: a model has one in each layer."""


def _warn(name: str, place: Holding, fate: Fate) -> None:
    owner = type(place.owner).__name__
    if (owner, place.key, fate) not in _warned:
        _warned.add((owner, place.key, fate))
        log.warning("steps of this vLLM make %s (%s), which genserve does not know: %s", name, owner, fate.value)
