"""How much memory a live model refers to, by what an exchange does with it: figures for people.

Decides nothing: what an exchange would miss is refused by `audit`, from the same walk.
"""

from collections.abc import Collection

import torch
from torch import nn

from genserve.worker.model import reach
from genserve.worker.model.audit import address_of, cache_memory, is_left
from genserve.worker.model.reach import Reached
from genserve.worker.model.tree import NOT_WEIGHTS, holdings, named_modules, parameters_and_buffers

KINDS = ("exchanged", "kv_cache", "constant", "hidden")


def model_memory(live: nn.Module, constants: Collection[str]) -> dict[str, int]:
    """Of torch's memory, by kind (`KINDS`) and in all ("reachable"), in bytes; what several tensors look into counts
    once. `constants`: paths of tensors that an audit has found to be no weights.

    "exchanged" is what an exchange looks at, "constant" what no version changes; "hidden" is the rest, which an audit
    would refuse.
    """
    present = holdings(live)
    places = {(id(place.owner), place.key) for place in present.values()}
    whole = {id(place.value) for place in present.values() if not isinstance(place.value, torch.Tensor | float)}
    exchanged = {id(tensor) for tensor in parameters_and_buffers(named_modules(live))}
    cache = cache_memory(live)

    def kind(reached: Reached, address: int) -> str:
        if address in cache or any(step.key in NOT_WEIGHTS for step in reached.steps):
            return "kv_cache"
        if is_left(reached) or reached.path in constants:
            return "constant"
        is_place = reached.steps[-1].kind == "attribute" and (id(reached.owner), reached.steps[-1].key) in places
        is_within = any(id(owner) in whole for owner in reached.owners)
        return "exchanged" if is_place or is_within or id(reached.tensor) in exchanged else "hidden"

    found: dict[tuple[torch.device, int], tuple[int, str]] = {}
    for reached in reach.tensors(live):
        if reached.tensor.is_meta or (address := address_of(reached.tensor)) is None:
            continue
        key = (reached.tensor.device, address)
        # A reference that an exchange reaches says more of a memory than one that it does not.
        known = found.get(key, (0, "hidden"))[1]
        what = min(known, kind(reached, address), key=KINDS.index)
        found[key] = (reached.tensor.untyped_storage().nbytes(), what)
    sizes = {what: sum(size for size, each in found.values() if each == what) for what in KINDS}
    return {"reachable": sum(sizes.values()), **sizes}
