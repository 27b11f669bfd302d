"""A small adapter, and what a push of it sends."""

import json

import torch

from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.sources import tensor_sources
from genserve.tensors.manifest import Manifest

A, B = "base_model.model.layers.0.q.lora_A.weight", "base_model.model.layers.0.q.lora_B.weight"
TENSORS = {A: torch.arange(8.0).reshape(2, 4), B: torch.arange(12.0).reshape(6, 2).to(torch.bfloat16)}
CONFIG = json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["q"]})


def space(tensors: dict[str, torch.Tensor]) -> tuple[Manifest, bytes]:
    """The manifest and the bytes of a push."""
    sources = tensor_sources(tensors, tied_once=False)
    data = b"".join(bytes(source.read()) for source in sorted(sources, key=lambda source: source.name))
    return ByteSpace(sources).manifest(partial=False), data
