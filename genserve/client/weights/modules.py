"""The tensors of a torch module under the names of its checkpoint: without what wraps the module, without adapters that
are merged into its weights, and in the form in which transformers saves it.

Wrappers and adapters are recognised by what they hold, so neither they nor torch are imported. Nothing is merged here.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.client.weights.conversion import as_saved
from genserve.tensors.inserted_names import BASE_LAYER, PARALLEL, PEFT_PREFIX, WRAPPED


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
    """What stands before each name because of what wraps the module as a whole, apart from WRAPPED; and the module
    inside."""
    outer = ""
    while True:
        children = dict(module.named_children())
        wrapped = next(iter(children.keys() & WRAPPED), None)
        base: Any = children.get("base_model")
        if wrapped is not None:
            module = children[wrapped]
        elif children.keys() == {PARALLEL} and not any(True for _ in module.named_parameters(recurse=False)):
            outer, module = f"{outer}{PARALLEL}.", children[PARALLEL]  # data parallel: DDP, DeepSpeed
        elif hasattr(module, "peft_config") and hasattr(base, "peft_config") and hasattr(base, "model"):
            outer, module = f"{outer}{PEFT_PREFIX}", base.model
        else:
            return outer, module


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A layer that PEFT has put in the place of one of the model. `used`: what it computes with, as its names begin;
    `is_merged`: whether nothing else of it is needed."""

    used: tuple[str, ...]
    is_merged: bool


def _adapted(module: Any) -> Iterator[tuple[str, _Adapted]]:
    """Layers of PEFT, by their names without WRAPPED."""
    for name, layer in module.named_modules():
        children = dict(layer.named_children())
        path = ".".join(part for part in name.split(".") if part not in WRAPPED)
        if BASE_LAYER in children and hasattr(layer, "merged"):
            yield path, _Adapted((BASE_LAYER,), bool(layer.merged))
        elif "token_adapter" in children:  # PEFT's trainable_token_indices
            yield path, _Adapted(("token_adapter",), is_merged=True)
        elif {"original_module", "modules_to_save"} <= children.keys():
            active = getattr(layer, "active_adapter", None)
            active = next(iter(active), None) if isinstance(active, list) else active
            trained = active in children["modules_to_save"] and not getattr(layer, "disable_adapters", False)
            yield path, _Adapted(("modules_to_save", str(active)) if trained else ("original_module",), is_merged=True)


def _placed(raw: str, layers: Mapping[str, _Adapted]) -> str | None:
    """The name without WRAPPED and PEFT's layers; None for a tensor that the model does not use."""
    parts = [part for part in raw.split(".") if part not in WRAPPED]
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
