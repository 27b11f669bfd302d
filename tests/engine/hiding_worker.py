"""A worker whose model keeps a weight in a dataclass, as gpt-oss does on a GPU."""

from dataclasses import dataclass
from typing import Any

import torch

from genserve.worker.extension import WeightExchangeExtension


@dataclass
class PrecisionConfig:
    """As triton_kernels'."""

    weight_scale: torch.Tensor


class HidingExtension(WeightExchangeExtension):
    """Hides it before the worker is made ready for pushes."""

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """As ever."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.get_submodule("model.layers.1.mlp").precision_config = PrecisionConfig(torch.ones(4))
        return super().genserve_attach(wire)
