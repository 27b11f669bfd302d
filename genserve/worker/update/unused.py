"""Which tensors of the checkpoint the model's loader leaves alone, such as those of layers that draft for a model that
is served without them: a version is complete without these.

The loader is tried on tensors without memory, in a model without memory. What it touches it may need.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from genserve.tensors.dtypes import FRAMEWORK_NAMES
from genserve.worker.model.draft import draft_of
from genserve.worker.update.structure import with_own_registries

Descriptions = Sequence[tuple[str, str, Sequence[int]]]
"""Names, safetensors' types and shapes of tensors."""

_META: Final = torch.device("meta")
_LOOKS: Final = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "itemsize")}
    | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size, torch.Tensor.__len__}
    | {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__hash__}
)
"""Questions that a loader may ask of a tensor before it leaves it alone."""


def unused_tensors(worker: Any, tensors: Descriptions) -> list[str]:
    """The names of the tensors that neither the model nor what drafts for it takes, in order. Call it while nothing is
    served, as it sets torch's default dtype. Raises what a loader raises that needs values."""
    configs = [(worker.vllm_config, worker.vllm_config.model_config)]
    draft = draft_of(worker)
    if draft is not None:
        configs.append((draft.config, draft.model_config))
    touched = set[str]().union(*(_touched(*each, tensors) for each in configs))
    return [name for name, _, _ in tensors if name not in touched]


def _touched(config: VllmConfig, model_config: ModelConfig, tensors: Descriptions) -> set[str]:
    config, touches = with_own_registries(config), _Touches()
    with (
        torch.no_grad(),
        set_current_vllm_config(config),
        set_default_torch_dtype(model_config.dtype),
        _META,
        disable_mtp_completeness_check(),
        touches,
    ):
        model = initialize_model(vllm_config=config, model_config=model_config)
        model.load_weights(touches.of(tensors))
    return touches.names


class _Touches(TorchFunctionMode):
    """Notes which of the tensors that a loader takes it does anything with."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._given: dict[int, tuple[str, torch.Tensor]] = {}  # with the tensor, so that no other gets its id

    def of(self, tensors: Descriptions) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, for the loader. Those of one element, which loaders read, have one."""
        for name, dtype, shape in tensors:
            with torch._C.DisableTorchFunction():
                device = "cpu" if torch.Size(shape).numel() == 1 else "meta"
                tensor = torch.zeros(tuple(shape), dtype=getattr(torch, FRAMEWORK_NAMES[dtype]), device=device)
            self._given[id(tensor)] = (name, tensor)
            yield name, tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func not in _LOOKS:
            self._note([*args, *options.values()])
        if func is torch.Tensor.copy_:  # some layers make parameters where there is memory
            return args[0]
        return func(*args, **options)

    def _note(self, args: Any) -> None:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if given := self._given.get(id(arg)):
                    self.names.add(given[0])
            elif isinstance(arg, list | tuple):
                self._note(arg)
