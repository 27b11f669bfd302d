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


class FlaggedEmbedding(VocabParallelEmbedding):
    """Remembers in a flag that it has made the copy."""

    has_copied = False

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """As vLLM's, for one rank."""
        if not self.has_copied:
            self.copied, self.has_copied = self.weight.detach().clone(), True
        return functional.embedding(input_, self.copied)


class CachingExtension(WeightExchangeExtension):
    """Makes the embedding one of these before the worker is made ready for pushes."""

    embedding: type[VocabParallelEmbedding] = CachingEmbedding

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """As ever."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.get_submodule("model.embed_tokens").__class__ = self.embedding
        return super().genserve_attach(wire)


class FlaggingExtension(CachingExtension):
    """The other one."""

    embedding = FlaggedEmbedding
