"""The tensors of a torch module under the names of its checkpoint: without what wraps the module, without adapters that
are merged into its weights, and in the form in which transformers saves it.

Wrappers and adapters are recognised by what they hold, so neither they nor torch are imported. Nothing is merged here.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from genserve.client.weights.conversion import as_saved

_WRAPPED: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Where torch.compile, FSDP1 and activation checkpointing keep the module that they wrap: the model, or a part of it.
Some of them leave it out of a state_dict, and others do not."""


def module_tensors(module: Any, same: Callable[[Any], object]) -> Mapping[str, Any]:
    """The tensors that the module computes with, by the names of its checkpoint.

    Of tensors for which `same` gives the same result other than None, the first one is taken. Raises ValueError for an
    adapter that is not merged into the weights.
    """
    outer, inner = _unwrapped(module)
    layers = dict(_adapted(module))
    tensors: dict[str, Any] = {}
    seen: set[object] = set()
    for raw, tensor in module.state_dict().items():
        name = _placed(raw, layers)
        identity = None if name is None else same(tensor)
        if name is None or (identity is not None and identity in seen):
            continue
        seen.add(identity)
        tensors[name.removeprefix(outer)] = tensor
    return as_saved(inner, tensors)


def is_module(weights: Any) -> bool:
    """Whether it is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(weights, torch.nn.Module)


def _unwrapped(module: Any) -> tuple[str, Any]:
    """What stands before each name because of what wraps the module as a whole, apart from _WRAPPED; and the module
    inside."""
    outer = ""
    while True:
        children = dict(module.named_children())
        wrapped = next(iter(_WRAPPED & children.keys()), None)
        base: Any = children.get("base_model")
        if wrapped is not None:
            module = children[wrapped]
        elif children.keys() == {"module"} and not any(True for _ in module.named_parameters(recurse=False)):
            outer, module = f"{outer}module.", children["module"]  # data parallel: DDP, DeepSpeed
        elif hasattr(module, "peft_config") and hasattr(base, "peft_config") and hasattr(base, "model"):
            outer, module = f"{outer}base_model.model.", base.model
        else:
            return outer, module


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A layer that PEFT has put in the place of one of the model. `used`: what it computes with, as its names begin;
    `is_merged`: whether nothing else of it is needed."""

    used: tuple[str, ...]
    is_merged: bool


def _adapted(module: Any) -> Iterator[tuple[str, _Adapted]]:
    """Layers of PEFT, by their names without _WRAPPED."""
    for name, layer in module.named_modules():
        children = dict(layer.named_children())
        path = ".".join(part for part in name.split(".") if part not in _WRAPPED)
        if "base_layer" in children and hasattr(layer, "merged"):
            yield path, _Adapted(("base_layer",), bool(layer.merged))
        elif "token_adapter" in children:  # PEFT's trainable_token_indices
            yield path, _Adapted(("token_adapter",), is_merged=True)
        elif {"original_module", "modules_to_save"} <= children.keys():
            active = getattr(layer, "active_adapter", None)
            active = next(iter(active), None) if isinstance(active, list) else active
            trained = active in children["modules_to_save"] and not getattr(layer, "disable_adapters", False)
            yield path, _Adapted(("modules_to_save", str(active)) if trained else ("original_module",), is_merged=True)


def _placed(raw: str, layers: Mapping[str, _Adapted]) -> str | None:
    """The name without _WRAPPED and PEFT's layers; None for what is not computed with."""
    parts = [part for part in raw.split(".") if part not in _WRAPPED]
    kept: list[str] = []
    position = 0
    while position < len(parts):
        layer = layers.get(".".join(parts[:position]))
        if layer is None:
            kept.append(parts[position])
            position += 1
        elif tuple(parts[position : position + len(layer.used)]) == layer.used:
            position += len(layer.used)
        elif layer.is_merged:
            return None
        else:
            raise ValueError(
                f"{raw}: an adapter that is not merged into the weights: push it with push_lora, or merge it first, "
                "with PEFT's merge_adapter()"
            )
    return ".".join(kept)
