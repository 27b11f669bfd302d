"""The weights that a daemon serves, as `get_weights` tells them."""

import math
from dataclasses import dataclass

from genserve.client.control.state import EngineState
from genserve.tensors.dtypes import item_bytes
from genserve.tensors.manifest import Manifest
from genserve.v1 import weights_pb2
from genserve.wire.conversions import manifest_of


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """A tensor of the served checkpoint; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The served weights. `digests` are SHA-256 in hex by (rank, name of vLLM's parameter), if requested. `resident`:
    whether the weights can be pulled, and used to complete partial pushes. `push_id`: the push that brought them, "" if
    none did; `content_digest`: SHA-256 of their contents, "" if it is not known."""

    weight_version: int
    tensors: list[ServedTensor]
    total_bytes: int
    manifest_digest: str
    digests: dict[tuple[str, str], str]
    resident: bool
    state: EngineState
    push_id: str = ""
    content_digest: str = ""

    @classmethod
    def of(cls, message: weights_pb2.GetWeightsResponse) -> "ServedWeights":
        """From the wire."""
        manifest = manifest_of(message.manifest)
        return cls(
            weight_version=message.weight_version,
            tensors=[ServedTensor(each.name, each.dtype, each.shape) for each in manifest.tensors],
            total_bytes=manifest.total_bytes,
            manifest_digest=manifest.digest,
            digests={(each.rank, each.name): each.sha256 for each in message.digests},
            resident=message.resident,
            state=EngineState.of(message.state),
            push_id=message.push_id,
            content_digest=message.content_digest,
        )

    def layout(self) -> Manifest:
        """Where the tensors lie in a push of several callers. Raises DtypeError."""
        return Manifest.end_to_end(
            (each.name, each.dtype, each.shape, math.prod(each.shape) * item_bytes(each.name, each.dtype))
            for each in self.tensors
        )
