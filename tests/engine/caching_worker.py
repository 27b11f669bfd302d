"""Workers whose embedding keeps a copy of its weight from its first step on, as layers of some models on a GPU do."""

from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from genserve.worker.extension import WeightExchangeExtension


class CachingEmbedding(VocabParallelEmbedding):
    """Makes the copy where it has none."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """As vLLM's, for one rank."""
        if getattr(self, "copied", None) is None:
            self.copied = self.weight.detach().clone()
        return functional.embedding(input_, self.copied)


class CachingExtension(WeightExchangeExtension):
    """Makes the embedding such a one before the worker is made ready for pushes."""

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """As ever."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.get_submodule("model.embed_tokens").__class__ = CachingEmbedding
        return super().genserve_attach(wire)
