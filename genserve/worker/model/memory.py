"""How much memory a live model refers to, by what an exchange does with it: figures for people.

Decides nothing: what an exchange would miss is refused by `audit`, from the same walk.
"""

from collections.abc import Collection

import torch
from torch import nn

from genserve.worker.model import references
from genserve.worker.model.audit import cache_memory, passes_weight_free
from genserve.worker.model.contents import address_of
from genserve.worker.model.references import Reference
from genserve.worker.model.tree import NOT_WEIGHTS, holdings, named_modules, parameters_and_buffers

KINDS = ("exchanged", "kv_cache", "constant", "hidden")


def model_memory(live: nn.Module, constants: Collection[str]) -> dict[str, int]:
    """Of torch's memory, by kind (`KINDS`) and in all ("reachable"), in bytes; what several tensors look into counts
    once. `constants`: paths of tensors that an audit has found not to be weights.

    "exchanged" is the memory that an exchange replaces, "constant" what no version changes; "hidden" is the rest, which
    an audit would refuse.
    """
    present = holdings(live)
    places = {(id(place.owner), place.key) for place in present.values()}
    whole = {id(place.value) for place in present.values() if not isinstance(place.value, torch.Tensor | float)}
    exchanged = {id(tensor) for tensor in parameters_and_buffers(named_modules(live))}
    cache = cache_memory(live)

    def kind(reference: Reference, address: int) -> str:
        if address in cache or any(step.key in NOT_WEIGHTS for step in reference.steps):
            return "kv_cache"
        if passes_weight_free(reference) or reference.path in constants:
            return "constant"
        is_place = reference.steps[-1].kind == "attribute" and (id(reference.owner), reference.steps[-1].key) in places
        is_within = any(id(owner) in whole for owner in reference.owners)
        return "exchanged" if is_place or is_within or id(reference.tensor) in exchanged else "hidden"

    found: dict[tuple[torch.device, int], tuple[int, str]] = {}
    for reference in references.to_tensors(live):
        if reference.tensor.is_meta or (address := address_of(reference.tensor)) is None:
            continue
        key = (reference.tensor.device, address)
        # A reference that an exchange reaches has precedence over one that it does not reach.
        known = found.get(key, (0, "hidden"))[1]
        what = min(known, kind(reference, address), key=KINDS.index)
        found[key] = (reference.tensor.untyped_storage().nbytes(), what)
    sizes = {what: sum(size for size, each in found.values() if each == what) for what in KINDS}
    return {"reachable": sum(sizes.values()), **sizes}
