"""The form in which transformers saves a model, where it is another one than that of the model in memory: the names of
checkpoints, and one tensor for each expert of a layer where the model has one tensor for all of them.

transformers has a mapping for each class of models, by which it loads checkpoints, and its reverse, by which
`save_pretrained` saves them. A model of it has imported it, so nothing is imported here.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from genserve.client.weights.dtensor import Cut


def as_saved(model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors as `save_pretrained` would save them, if this is a model of transformers: views of the same memory
    wherever the conversion cuts, turns or renames.

    Raises ValueError for a DTensor whose part on this rank cannot be told from what the conversion makes of it, because
    nothing communicates here.
    """
    modeling, loading = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "core_model_loading"))
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return tensors
    ignored = frozenset(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if loading is None:  # transformers 4 has the form of checkpoints in memory, too
        return kept
    if not any(hasattr(tensor, "full_tensor") for tensor in kept.values()):
        return _reverted(loading, model, kept)
    return _of_dtensors(loading, model, kept)


def _reverted(loading: Any, model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = import_module("torch.overrides")

    class Views(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        """Leaves out copies that only make a tensor contiguous: it becomes so when it is sent, one at a time. Otherwise
        all experts of a model would be copied at once."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is import_module("torch").Tensor.contiguous:
                return args[0]
            return func(*args, **(kwargs or {}))

    with Views():
        found: Mapping[str, Any] = loading.revert_weight_conversion(model, dict(tensors))
    return found


def _of_dtensors(loading: Any, model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts tensors without memory instead, and finds out what each of the results is of those that were put in."""
    torch = import_module("torch")
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    sources = {each.untyped_storage()._cdata: name for name, each in meta.items()}
    found: dict[str, Any] = {}
    for name, view in _reverted(loading, model, meta).items():
        source = sources.get(view.untyped_storage()._cdata, "")
        if source and (view.shape, view.stride()) == (meta[source].shape, meta[source].stride()):
            found[name] = tensors[source]
            continue
        cut = Cut.of_view(tensors[source], meta[source], view) if source else None
        if cut is None or not hasattr(cut.tensor, "full_tensor"):
            raise ValueError(
                f"{name}: transformers makes it of several tensors, some of them DTensors, or turns their elements: "
                "gather them by full_tensor(), and push what the module without DTensors has"
            )
        found[name] = cut
    return found
