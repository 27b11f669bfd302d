"""A backend named "genserve" for trainers that are written against vLLM's weight-transfer API.

Importing this module registers it with `WeightTransferTrainerFactory`; importing `genserve.client` does not. It needs
nothing in the daemon's workers: `send_weights` is a push, which is checked, staged, prepared beside the live weights
and exchanged.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from genserve.client.weights.results import PushResult
from genserve.integrations.vllm_sync import GenserveWeightSyncClient

__all__ = ["GenserveTrainerEngine", "GenserveTrainerInitInfo", "GenserveWeightSyncClient"]


@dataclass(frozen=True)
class GenserveTrainerInitInfo:
    """`rank` of this trainer process; rank 0 pushes. `streams`: gRPC connections that a push is spread over."""

    backend: ClassVar[str] = "genserve"

    rank: int = field(kw_only=True)
    streams: int = field(default=1, kw_only=True)

    @property
    def is_sender(self) -> bool:
        """Whether this rank pushes."""
        return self.rank == 0


class GenserveTrainerEngine:
    """vLLM's `TrainerWeightTransferEngine`. On every rank `send_weights` iterates the source, which may gather; rank 0
    keeps a copy of each tensor in host memory, and pushes them when it has all."""

    def __init__(self, client: GenserveWeightSyncClient, source: Any, init_info: GenserveTrainerInitInfo) -> None:
        self.client = client
        self.source = source
        self.is_sender = init_info.is_sender
        self.last_push: PushResult | None = None
        """The outcome of the last push, on rank 0."""
        self._streams = init_info.streams

    @classmethod
    def trainer_init(cls, init_info: GenserveTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """A sender. `source` is vLLM's `WeightSource` of all tensors, under the checkpoint's names.

        Raises TypeError if the client is not a GenserveWeightSyncClient, ValueError without a source or if each rank
        holds a part of the source, and UnavailableError if no daemon answers.
        """
        if not isinstance(client, GenserveWeightSyncClient):
            raise TypeError(f"the client must be a GenserveWeightSyncClient, not {type(client).__name__}")
        if source is None:
            raise ValueError("`source` must be a WeightSource")
        if source.held_names() is not None:
            raise ValueError("every rank's source must yield every tensor")
        if init_info.is_sender:
            client.client.get_weights()
        return cls(client, source, init_info)

    def send_weights(self) -> None:
        """Pushes the source's present tensors as the served version plus 1.

        Raises as `Client.push_weights` (ManifestMismatchError names tensors), and ValueError if the source yields other
        tensors than its metadata says; then the served version is unchanged.
        """
        metadata = self.source.metadata()  # may gather too, so every rank calls it
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        tensors = _copied(self.source, metadata)
        served_version = self.client.client.get_weights().weight_version
        self.last_push = self.client.client.push_weights(
            tensors, version=served_version + 1, expected_version=served_version, streams=self._streams
        )

    def shutdown(self) -> None:
        """Does nothing: the client belongs to the caller."""


def _copied(pairs: Iterable[tuple[str, Any]], metadata: Iterable[Any]) -> dict[str, Any]:
    """Copies of all tensors on the host, because a source may reuse its buffers. The iteration completes before an
    error is raised, because other ranks may wait for this one in a gather."""
    expected = {each.name: (each.dtype, tuple(each.shape)) for each in metadata}
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in pairs}
    for name in expected.keys() | tensors.keys():
        found = (tensors[name].dtype, tuple(tensors[name].shape)) if name in tensors else None
        if found != expected.get(name):
            raise ValueError(f"the source yields {name} as {found}, its metadata says {expected.get(name)}")
    return tensors


def _register() -> None:
    # By name, as vLLM loads its own backends: the client's package depends on neither vLLM nor torch.
    vllm = importlib.import_module("vllm.distributed.weight_transfer")
    vllm.TrainerWeightTransferEngine.register(GenserveTrainerEngine)
    vllm.WeightTransferTrainerFactory.register_engine(GenserveTrainerInitInfo.backend, GenserveTrainerEngine)


_register()
