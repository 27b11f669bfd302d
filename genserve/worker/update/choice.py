"""The way that a worker takes new versions: what it knows, the choice, and what is built for it.

The rules of the choice are `placement`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from genserve.memory.available import available_memory_bytes
from genserve.worker.contract.placement import Placement, WorkerFacts, place
from genserve.worker.contract.vllm_settings import RANKS_HERE_KEY, WEIGHT_UPDATE_KEY, quantizes_online
from genserve.worker.model.draft import draft_of
from genserve.worker.model.tree import sizes_of
from genserve.worker.update.beside import BesideUpdate
from genserve.worker.update.device import Device
from genserve.worker.update.draft import DraftUpdate, WithDraft, draft_update, warn_of
from genserve.worker.update.inplace import InPlaceUpdate
from genserve.worker.update.protocol import ServedUpdate, Update


@dataclass(frozen=True, slots=True)
class Chosen:
    """How a worker takes new versions: of the served model, and of what drafts for it if pushes have its weights."""

    placement: Placement
    device: Device
    served: ServedUpdate
    draft: DraftUpdate | None

    def update(self) -> Update:
        """What takes the versions of an engine that is about to serve. What drafts is left as it is, with a warning, if
        its first steps have made it something that cannot be exchanged: that costs speed, and no correct token."""
        if self.draft is None:
            return self.served
        try:
            self.draft.audit()
        except Exception as error:  # whatever vLLM's model raises
            warn_of(error)
            self.draft.let_go()
            return self.served
        return WithDraft(self.served, self.draft)


def make_update(worker: Any) -> tuple[Update, Chosen]:
    """The update of a worker whose engine is about to serve, and the choice that it follows. Raises as
    `choose`."""
    # A worker class of the user's own does not choose before vLLM sizes the KV cache: then there is what vLLM has left.
    chosen: Chosen = getattr(worker, "genserve_chosen", None) or choose(worker)
    return chosen.update(), chosen


def choose(worker: Any) -> Chosen:
    """Chooses for a worker of vLLM with a loaded model, while nothing is served. Raises ValueError if the requested way
    is not possible, and torch.OutOfMemoryError."""
    live, config = worker.model_runner.get_model(), worker.vllm_config
    device = Device.of(worker.device)
    asked = config.additional_config.get(WEIGHT_UPDATE_KEY, "auto")
    drafting: DraftUpdate | None = None
    beside: BesideUpdate | None = None
    if worker.device.type == "cpu":
        # Its packed weights are outside of torch: the size of a second model is known only from one without weights.
        if asked != "inplace":
            beside = BesideUpdate(live, config, device, worker.device)
        drafting = draft_update(worker, device, asked)
        num_bytes = sum(each.num_bytes for each in (beside, drafting) if each is not None)
        facts = WorkerFacts(num_bytes, 0, None, _cpu_bytes(config))
    else:
        # A draft model is loaded with its own embeddings and head, so what it shares counts twice.
        draft = draft_of(worker)
        drafting_sizes = sizes_of(draft.model) if draft is not None else []
        # Both have a buffer of their largest tensor.
        sizes = [*sizes_of(live), *drafting_sizes, *([max(drafting_sizes)] if drafting_sizes else [])]
        facts = gpu_facts(worker, sizes, device.free_bytes())
    placement = place(asked, facts)
    at = torch.device("cpu") if placement.way == "host" else worker.device
    served: ServedUpdate
    if placement.way == "inplace":
        served = InPlaceUpdate(live, config, device)
    else:
        served = beside if beside is not None else BesideUpdate(live, config, device, at)
    if drafting is None and worker.device.type != "cpu":
        drafting = draft_update(worker, device, placement.way)
    if drafting is not None:
        WithDraft(served, drafting).reserve_memory()  # each has taken memory alone, and a push needs both at once
    return Chosen(placement, device, served, drafting)


def gpu_facts(worker: Any, sizes: Sequence[int], free_bytes: int) -> WorkerFacts:
    """The facts of a worker of a GPU; all in bytes. `sizes`: of the tensors that a push replaces; `free_bytes`: free
    memory of the device."""
    config = worker.vllm_config
    return WorkerFacts(
        sum(sizes),
        max(sizes, default=0),
        _left(worker, free_bytes),
        _cpu_bytes(config),
        config.model_config.quantization,
        quantizes_online(config),
        int(worker.cache_config.kv_cache_memory_bytes or 0),
    )


def _left(worker: Any, free_bytes: int) -> int:
    """Memory that vLLM has left of the device for keys, values and activations, in bytes.

    internal: `requested_memory` and `init_snapshot` of its GPU worker. Once the KV cache is there, what is free."""
    fixed_bytes = worker.cache_config.kv_cache_memory_bytes
    if getattr(worker.model_runner, "kv_caches", None):
        return free_bytes
    if fixed_bytes:
        return max(0, free_bytes - int(fixed_bytes))
    return max(0, int(worker.requested_memory) - (int(worker.init_snapshot.free_memory) - free_bytes))


def _cpu_bytes(config: Any) -> int:
    """Of this host's CPU memory, for each of the workers that share it."""
    return available_memory_bytes() // _ranks_here(config)


def _ranks_here(config: Any) -> int:
    """Workers on this host, which share its memory. The daemon counts them: vLLM gives each replica of a dense model
    a configuration without data parallelism."""
    return max(1, int(config.additional_config.get(RANKS_HERE_KEY, 1)))
