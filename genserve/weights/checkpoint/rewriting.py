"""Finds the one difference between the names that a trainer has and those of the checkpoint, where one explains all:
what a wrapper puts into every name. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from functools import partial
from typing import Final

from genserve.tensors.inserted_names import BASE_LAYER, COMPILED, HALVES, MAGNITUDE, PARALLEL, PEFT_PREFIX, WRAPPED

_REMEDY: Final = "pass rename=..."
_INSIDE: Final = (COMPILED, PARALLEL)
"""What stands before all names where the module that is wrapped is an attribute of this name."""
_PARTS: Final = (*WRAPPED, PARALLEL, BASE_LAYER)
"""What may be in the middle of names."""
_ADAPTER: Final = (*(half for pair in HALVES for half in pair), MAGNITUDE)
_FUSED: Final = (".experts.gate_up_proj", ".experts.down_proj")
"""How transformers names the experts of a layer, which checkpoints have one by one."""
_NUM_TRIED: Final = 8
"""Foreign names for which a counterpart is looked for: some may have none."""


def one_cause(names: Collection[str], known: Set[str]) -> str:
    """Why names are not among the `known` ones, if it is one thing for all of them, and what to do about it: said of
    the manifest, in an error message. Otherwise ""."""
    foreign = [name for name in names if name not in known]
    if not foreign:
        return ""
    adapter = next((name for name in foreign if any(part in name for part in _ADAPTER)), None)
    if adapter is not None:
        remedy = "push it with push_lora, or merge it, and push the module"
        return f"has tensors of an adapter, such as {adapter[:256]!r}: {remedy}"
    fused = next((name for name in foreign if name.endswith(_FUSED)), None)
    if fused is not None and _has_one_by_one(known, fused.rpartition(".")[0]):
        return f"has the experts of a layer in one tensor, such as {fused[:256]!r}: push the module, which is converted"
    for rewrite, says in _rewritings(names, foreign, known):
        # Most of what is tried fails at the first name: a manifest of 100,000 costs little.
        if all(rewrite(name) in known for name in foreign):
            renamed = {name if name in known else rewrite(name) for name in names}
            return says if len(renamed) == len(names) else ""
    return ""


def _has_one_by_one(known: Set[str], experts: str) -> bool:
    """Whether the known names have these experts one by one, however the names begin: the remedy is the same."""
    owners = {f".{name[: name.index('.0.', at)]}" for name in known if (at := name.find(".experts.0.")) >= 0}
    return any(owner.endswith(f".{experts}") or f".{experts}".endswith(owner) for owner in owners)


def _rewritings(
    names: Collection[str], foreign: Sequence[str], known: Set[str]
) -> Iterator[tuple[Callable[[str], str], str]]:
    """What may make known names of foreign ones, and how to say it."""
    tried = foreign[:: -(-len(foreign) // _NUM_TRIED)]
    ends = sorted(name.split(".")[::-1] for name in known)
    for old, new in dict.fromkeys(pair for name in tried for pair in _beginnings(name, ends)):
        certain = f"names such as {foreign[0][:256]!r}"
        every = "every name" if all(name.startswith(old) for name in names) else certain
        if not old and any(name.startswith(new) for name in names):
            says = f"does not begin {certain} with {new!r}, as the checkpoint does: {_REMEDY}"
        elif not old:
            says = f"begins no name with {new!r}, as the checkpoint does: {_REMEDY}"
        elif new:
            says = f"begins {every} with {old!r} where the checkpoint has {new!r}: {_REMEDY}"
        else:
            inside = old.removesuffix(".")
            says = f"begins {every} with {old!r}: {_REMEDY}{f', or push model.{inside}' if inside in _INSIDE else ''}"
        yield partial(_begun, old, new), says
    parts = [part for part in _PARTS if any(f"{part}." in name for name in foreign)]
    if any(name.startswith(PEFT_PREFIX) for name in foreign):
        left_out = frozenset(parts)
        yield (
            lambda name: _without(left_out, name.removeprefix(PEFT_PREFIX)),
            f"has PEFT's names, such as {foreign[0][:256]!r}: push the module, or pass rename=...",
        )
    for chosen in [*([part] for part in parts), *([parts] if parts else [])]:
        shown = " and ".join(repr(f"{part}.") for part in chosen)
        yield partial(_without, frozenset(chosen)), f"has {shown} in names: {_REMEDY}, or push the module"


def _beginnings(name: str, ends: Sequence[list[str]]) -> Iterator[tuple[str, str]]:
    """How the name begins, and how a few known names begin that have the longest end in common with it. That is more
    than the last part, which any two modules may share, and beginnings have the same numbers, since another number is
    another layer. `ends`: the parts of the known names from the last to the first, sorted, so that names with the same
    end are neighbours."""
    parts = name.split(".")[::-1]
    place = bisect_left(ends, parts)
    near = ends[max(0, place - _NUM_TRIED) : place + _NUM_TRIED]
    common = {tuple(each): _num_common(parts, each) for each in near}
    most = max(common.values(), default=0)
    for each, num_common in common.items():
        if num_common == most > 1 and _numbers(parts[most:]) == _numbers(each[most:]):
            yield _beginning(parts[most:]), _beginning(each[most:])


def _num_common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _numbers(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if part.isdigit()]


def _beginning(parts: Sequence[str]) -> str:
    return "".join(f"{part}." for part in reversed(parts))


def _begun(old: str, new: str, name: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _without(left_out: frozenset[str], name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in left_out)
