"""Finds weights that a push would miss, before the first push.

An exchange replaces the holdings of `tree`. A model may keep tensors in other places, such as in a dataclass on a
layer. They would stay those of the old version, and the engine would serve a mix of two versions without an error. So
every tensor that the live model refers to must belong to one of these kinds:

- It is exchanged: it is a holding, a second reference to a parameter or buffer, part of a closure that is exchanged
  whole, or, where contents are copied, a view of the memory of an exchanged tensor.
- It is the KV cache.
- No version can change it: it is empty; or vLLM's steps leave it on layers (`step_made`); or the model's
  construction made it, before anything was loaded, and the bare structure in which pushes are built has one of the same
  type in the same place. Loading could still write such a tensor, so `Constants` checks this in the structure whenever
  a version is prepared.

Every other tensor is refused. `model_memory` has figures for people, from the same walk.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from genserve.worker.model import references, step_made
from genserve.worker.model.contents import address_of, digest
from genserve.worker.model.references import Reference
from genserve.worker.model.tree import (
    NOT_WEIGHTS,
    Holding,
    holdings,
    modules_by_name,
    named_modules,
    owners,
    parameters_and_buffers,
)

_MAX_NAMED = 8


def audit(
    live: nn.Module,
    structure: nn.Module,
    *,
    copied: bool,
    known: "Constants | None" = None,
    loaded: Collection[str] | None = None,
) -> "Constants":
    """What loading does not write although `live` refers to it, by its place in `structure`, which is the same model
    without weights. `copied`: an exchange copies contents, and so does not move what is exchanged. `known`: what an
    earlier audit has found; it is the answer if nothing has changed. `loaded`: names of the holdings that `live` had
    when it had been loaded; what it has in addition, steps have made.

    Raises ValueError naming the tensors that are neither exchanged nor constant.
    """
    bare = BareModel.of(structure) if known is None else known.bare
    made = list(step_made.from_weights(owners(live))) if known is None else []
    if made:
        raise ValueError(f"weights cannot be pushed into this model: {made[0]} ({len(made)} in all), and keeps it")
    present = holdings(live)
    if loaded is not None:
        step_made.check_listed({name: present[name] for name in present.keys() - loaded}, present, copied=copied)
    missed = hidden(live, bare, copied=copied, present=present)
    found = [reference for reference in missed if not passes_weight_free(reference)]
    constants = [reference for reference in found if _is_constructed(reference, bare)]
    constructed = {id(reference) for reference in constants}
    paths = sorted({reference.path for reference in found if id(reference) not in constructed})
    if paths:
        raise ValueError(
            f"weights cannot be pushed into this model: a push would leave {', '.join(paths[:_MAX_NAMED])} "
            f"({len(paths)} in all) as loaded at the start, and a mix of two versions would be served"
        )
    if known is not None and known.paths == {reference.path for reference in constants}:
        return known
    return Constants(structure, bare, constants)


def hidden(
    live: nn.Module,
    bare: "BareModel | None" = None,
    *,
    copied: bool,
    present: Mapping[str, Holding] | None = None,
) -> Iterator[Reference]:
    """The references to tensors that an exchange does not replace, except for the KV cache and what has no contents.
    Without the `bare` structure every closure counts as one that is exchanged if it is a holding. `present`: the
    holdings of `live`, if they are known."""
    present = holdings(live) if present is None else present
    # What is not a tensor is exchanged whole, if loading has made it; a closure that was there before stays.
    built = frozenset[str]() if bare is None else bare.built
    exchanged_whole = {
        id(place.value)
        for name, place in present.items()
        if not isinstance(place.value, torch.Tensor | float) and (name not in built or not callable(place.value))
    }
    places = {(id(place.owner), place.key) for place in present.values()}
    exchanged = {id(tensor) for tensor in parameters_and_buffers(named_modules(live))}
    memory: set[int] | None = None
    for reference in references.to_tensors(
        live, not_entered=exchanged_whole, skipped_names=NOT_WEIGHTS, left_out=exchanged
    ):
        tensor = reference.tensor
        if tensor.is_meta or tensor.numel() == 0:
            continue
        if (id(reference.owner), reference.steps[-1].key) in places and reference.steps[-1].kind == "attribute":
            if bare is not None and _replaces_a_weight(reference, bare):
                yield reference
            continue
        if memory is None:
            memory = cache_memory(live) | (_memory_of(present) if copied else set())
        if (address := address_of(tensor)) is None or address not in memory:
            yield reference


@dataclass(frozen=True, slots=True)
class BareModel:
    """The structure as it is between pushes: its modules by name, and the names of what it holds (`tree.holdings`)."""

    modules: Mapping[str, nn.Module]
    built: frozenset[str]

    @staticmethod
    def of(structure: nn.Module) -> "BareModel":
        """Of this one."""
        return BareModel(modules_by_name(structure), frozenset(holdings(structure)))


class Constants:
    """Tensors of the bare structure that are not exchanged, because construction made them and nothing writes them."""

    def __init__(self, structure: nn.Module, bare: BareModel, places: Sequence[Reference]) -> None:
        self.bare = bare
        self._structure = structure
        self._contents = list(zip(places, self._digests(places), strict=True))

    @property
    def paths(self) -> frozenset[str]:
        """The paths of these tensors."""
        return frozenset(place.path for place, _ in self._contents)

    def within(self, modules: Collection[str]) -> "Constants":
        """The constants of these modules only."""
        part = Constants(self._structure, self.bare, ())
        part._contents = [(place, before) for place, before in self._contents if place.module in modules]
        return part

    def check(self) -> None:
        """Raises ValueError naming those that preparing a version has written."""
        now = self._digests([place for place, _ in self._contents])
        written = sorted(
            {place.path for (place, before), after in zip(self._contents, now, strict=True) if after != before}
        )
        if written:
            raise ValueError(f"{', '.join(written[:_MAX_NAMED])} was written by loading and cannot be exchanged")

    def _digests(self, places: Sequence[Reference]) -> list[str]:
        """Digests of the contents, "" for a value that is not a tensor. Layers share some, such as scratch memory: each
        is read once."""
        modules = modules_by_name(self._structure) if places else {}
        tensors = [references.follow(modules, place) for place in places]
        read = {id(tensor): digest(tensor) for tensor in _distinct(tensors)}
        return [read.get(id(tensor), "") for tensor in tensors]


def _distinct(tensors: Sequence[Any]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}.values())


def _replaces_a_weight(reference: Reference, bare: BareModel) -> bool:
    """Whether a step replaced a reference to a weight by a copy: loading makes no such copy, so none is exchanged.
    Attention on the CPU does so with its sinks, for their type."""
    if isinstance(reference.owner, nn.Module) or not reference.tensor.is_inference():
        return False
    return isinstance(references.follow(bare.modules, reference), nn.Parameter)


def passes_weight_free(reference: Reference) -> bool:
    """Whether an attribute on the way to the tensor holds what steps make and no weight changes (`step_made`)."""
    return any(
        step_made.is_weight_free(owner, step.key, reference.tensor)
        for owner, step in zip(reference.owners, reference.steps, strict=True)
        if step.kind == "attribute"
    )


def _is_constructed(reference: Reference, bare: BareModel) -> bool:
    """Whether construction made it. A parameter is always a weight."""
    before = references.follow(bare.modules, reference)
    if not isinstance(before, torch.Tensor):
        return False
    if isinstance(before, nn.Parameter) or isinstance(reference.tensor, nn.Parameter):
        return False
    # Scratch memory grows when a step needs more: after steps it may have another shape.
    same_shape = before.shape == reference.tensor.shape or reference.tensor.is_inference()
    return bool(same_shape and before.dtype == reference.tensor.dtype)


def _memory_of(present: Mapping[str, Holding]) -> set[int]:
    """Where the storages of all exchanged tensors begin."""
    addresses = (address_of(place.value) for place in present.values() if isinstance(place.value, torch.Tensor))
    return {address for address in addresses if address is not None}


def cache_memory(live: nn.Module) -> set[int]:
    """Where the storages of the KV cache begin: attention keeps views of it."""
    found: set[int] = set()
    for _, module in named_modules(live):
        queue: list[Any] = [vars(module).get(key) for key in NOT_WEIGHTS]
        for value in queue:  # grows while it is walked
            if isinstance(value, torch.Tensor):
                found |= {address for address in [address_of(value)] if address is not None}
            elif isinstance(value, list | tuple):
                queue.extend(value)
    return found


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
