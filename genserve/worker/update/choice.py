"""The way that a worker takes new versions: what it knows, the choice, and what is built for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import torch

from genserve.memory.arena import available_memory_bytes
from genserve.worker.contract import RANKS_HERE_KEY, WEIGHT_UPDATE_KEY
from genserve.worker.model import online_quantization
from genserve.worker.model.audit import Constants
from genserve.worker.model.tree import sizes_of
from genserve.worker.update.beside import BesideUpdate
from genserve.worker.update.device import Device
from genserve.worker.update.draft import DraftUpdate, WithDraft, draft_of, draft_update
from genserve.worker.update.inplace import InPlaceUpdate
from genserve.worker.update.placement import Facts, Placement, place


class Update(Protocol):
    """Prepares, commits and undoes versions, one at a time."""

    can_roll_back: bool

    def audit(self) -> Constants:
        """Raises ValueError naming weights of the live model that an exchange would miss; what it has found to be
        constant."""

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """Builds a version, or proves that it can be built, while the live one serves."""

    def commit(self) -> None:
        """Makes it the live one; only while nothing is scheduled."""

    def rollback(self) -> None:
        """Undoes a commit, whole or in part; without one it does nothing."""

    def give_up(self) -> None:
        """Frees what is kept of the device while nothing is served, and what is prepared."""

    def take_back(self) -> None:
        """Keeps it again. Raises torch.OutOfMemoryError."""

    def discard(self) -> None:
        """Frees what is prepared, or what a commit replaced."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a worker takes new versions."""

    placement: Placement
    update: Update
    device: Device


def choose(worker: Any) -> Chosen:
    """For a worker of vLLM whose model is loaded; while nothing is served. Raises ValueError for a way that was asked
    for and cannot be had, and torch.OutOfMemoryError."""
    live, config = worker.model_runner.get_model(), worker.vllm_config
    device = Device.of(worker.device)
    asked = config.additional_config.get(WEIGHT_UPDATE_KEY, "auto")
    drafting: DraftUpdate | None = None
    beside: BesideUpdate | None = None
    if worker.device.type == "cpu":
        # Its packed weights lie outside of torch: what a second model takes is known once there is one, empty.
        if asked != "inplace":
            beside = BesideUpdate(live, config, device, worker.device)
        drafting = draft_update(worker, device, asked)
        num_bytes = sum(each.num_bytes for each in (beside, drafting) if each is not None)
        facts = Facts(num_bytes, 0, None, _host_bytes(config))
    else:
        # What drafts is loaded with embeddings and a head of its own, so what it shares counts twice.
        draft = draft_of(worker)
        drafting_sizes = sizes_of(draft.model) if draft is not None else []
        # Both have a buffer of their largest tensor.
        sizes = [*sizes_of(live), *drafting_sizes, *([max(drafting_sizes)] if drafting_sizes else [])]
        facts = gpu_facts(worker, sizes, device.free_bytes())
    placement = place(asked, facts)
    at = torch.device("cpu") if placement.way == "host" else worker.device
    update: Update
    if placement.way == "inplace":
        update = InPlaceUpdate(live, config, device)
    else:
        update = beside if beside is not None else BesideUpdate(live, config, device, at)
    if drafting is None and worker.device.type != "cpu":
        drafting = draft_update(worker, device, placement.way)
    return Chosen(placement, update if drafting is None else WithDraft(update, drafting), device)


def gpu_facts(worker: Any, sizes: Sequence[int], free_bytes: int) -> Facts:
    """What a worker of a GPU knows; all in bytes. `sizes`: of the tensors that a push replaces; `free_bytes`: of the
    device, that nobody has."""
    config = worker.vllm_config
    return Facts(
        sum(sizes),
        max(sizes, default=0),
        _left(worker, free_bytes),
        _host_bytes(config),
        config.model_config.quantization,
        online_quantization.is_online(config),
        int(worker.cache_config.kv_cache_memory_bytes or 0),
    )


def _left(worker: Any, free_bytes: int) -> int:
    """What vLLM has left of the device for keys, values and activations, in bytes.

    internal: `requested_memory` and `init_snapshot` of its GPU worker. Once the KV cache is there, what is free."""
    fixed_bytes = worker.cache_config.kv_cache_memory_bytes
    if getattr(worker.model_runner, "kv_caches", None):
        return free_bytes
    if fixed_bytes:
        return max(0, free_bytes - int(fixed_bytes))
    return max(0, int(worker.requested_memory) - (int(worker.init_snapshot.free_memory) - free_bytes))


def _host_bytes(config: Any) -> int:
    """Of the host's memory, for each of the workers that share it."""
    return available_memory_bytes() // _ranks_here(config)


def _ranks_here(config: Any) -> int:
    """Workers on this host, which share its memory. The daemon counts them: vLLM gives each replica of a dense model a
    configuration without data parallelism."""
    return max(1, int(config.additional_config.get(RANKS_HERE_KEY, 1)))
