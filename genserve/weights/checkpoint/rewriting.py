"""Finds the one difference between the names that a trainer has and those of the checkpoint, where one explains all:
what a wrapper puts into every name. Pure."""

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from functools import partial
from typing import Final

_REMEDY: Final = "pass rename=..."
_INSIDE: Final = {"_orig_mod": "model._orig_mod", "module": "model.module"}
"""What torch.compile and data parallelism put into names, and how to reach the module that they wrap."""
_PARTS: Final = (*_INSIDE, "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
"""What is put into the middle of names: by those, by FSDP1, activation checkpointing and PEFT."""
_ADAPTER: Final = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B", ".lora_magnitude_vector")
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
        return f"has tensors of an adapter, such as {adapter[:256]!r}: push it with push_lora, or merge it first"
    for rewrite, says in _rewritings(foreign, known):
        renamed = {name if name in known else rewrite(name) for name in names}
        if len(renamed) == len(names) and renamed <= known:
            return says
    return ""


def _rewritings(foreign: Sequence[str], known: Set[str]) -> Iterator[tuple[Callable[[str], str], str]]:
    """What may make known names of foreign ones, and how to say it."""
    tried = foreign[:: -(-len(foreign) // _NUM_TRIED)]
    for old, new in dict.fromkeys(pair for name in tried for pair in _beginnings(name, known)):
        every = "every name" if all(name.startswith(old) for name in foreign) else "names"
        if not old:
            says = f"begins no name with {new!r}, as the checkpoint does: {_REMEDY}"
        elif new:
            says = f"begins {every} with {old!r} where the checkpoint has {new!r}: {_REMEDY}"
        else:
            inside = _INSIDE.get(old.removesuffix("."))
            says = f"begins {every} with {old!r}: {_REMEDY}{f', or push {inside}' if inside else ''}"
        yield partial(_begun, old, new), says
    parts = [part for part in _PARTS if any(part in name.split(".") for name in foreign)]
    for left_out in [*([part] for part in parts), *([parts] if parts else [])]:
        shown = " and ".join(repr(f"{part}.") for part in left_out)
        yield partial(_without, frozenset(left_out)), f"has {shown} in names: {_REMEDY}, or push the module"


def _beginnings(name: str, known: Set[str]) -> list[tuple[str, str]]:
    """How the name begins, and how known names begin that end like it from there on: those with the longest end in
    common, a few of them."""
    parts = name.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        alike = [each for each in known if each.endswith(end) and each.removesuffix(end)[-1:] in ("", ".")]
        if alike:
            return [(name.removesuffix(end), each.removesuffix(end)) for each in alike[:_NUM_TRIED]]
    return []


def _begun(old: str, new: str, name: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _without(left_out: frozenset[str], name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in left_out)
