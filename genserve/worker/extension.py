"""The methods that genserve adds to vLLM's worker class. `collective_rpc` calls them by name."""

import json
import multiprocessing
import time
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import layerwise

from genserve.observe.log_lines import write_log_lines
from genserve.worker.contract.calls import (
    Ack,
    AddedLora,
    AddLora,
    Attach,
    Attached,
    Described,
    Digests,
    Fetch,
    Prepare,
    ReadDigests,
    RemoveLora,
    Sleep,
    Step,
    Transfer,
    Unused,
)
from genserve.worker.contract.lifetime import end_with_daemon
from genserve.worker.update.unused import unused_tensors
from genserve.worker.versions import Versions, acknowledged

# bf16 attention on the CPU uses AMX tiles, and dies with SIGILL in a process that did not request them from the kernel.
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()


_OF_EXPERTS = ".base_layer"
"""PEFT's name for the first of two adapters of one layer of experts; vLLM stacks both."""


class WeightExchangeExtension:
    """Mixed into vLLM's Worker: `self` is the worker. One version is prepared at a time."""

    _genserve: Versions

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Attach -> Attached."""
        write_log_lines()
        rank = self._weight_checksum_prefix().rstrip(":")  # type: ignore[attr-defined]

        def attach() -> None:
            config = self.vllm_config  # type: ignore[attr-defined]
            if config.lora_config is not None and config.device_config.device_type == "cpu":
                from genserve.worker.cpu_lora import skip_tokens_without_adapter  # imports vLLM's kernels

                skip_tokens_without_adapter()
            self._genserve = Versions(self, rank, Attach.from_wire(wire))

        ack = acknowledged(rank, "", attach)
        return (Attached(rank, ack.error) if ack.error else self._genserve.attached()).to_wire()

    def genserve_unused(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Described -> Unused."""
        request, names = Described.from_wire(wire), list[str]()
        ack = acknowledged(self._genserve.rank, "", lambda: names.extend(unused_tensors(self, request.tensors)))
        return Unused(ack.rank, ack.nonce, ack.error, names).to_wire()

    def genserve_ping(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Ack."""
        return Ack(self._genserve.rank, "", "").to_wire()

    def genserve_fetch(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Fetch -> Ack at once."""
        versions, request = self._genserve, Fetch.from_wire(wire)
        return acknowledged(versions.rank, request.nonce, lambda: versions.fetch(request)).to_wire()

    def genserve_fetched(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Progress."""
        return self._genserve.fetched(Step.from_wire(wire).nonce).to_wire()

    def genserve_prepare(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Prepare -> Ack at once, and another one to the report socket when it is done."""
        versions, request = _changing(self), Prepare.from_wire(wire)
        return acknowledged(versions.rank, request.nonce, lambda: versions.prepare(request)).to_wire()

    def genserve_prepared(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Progress."""
        return self._genserve.prepared(Step.from_wire(wire).nonce).to_wire()

    def genserve_commit(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack."""
        versions, step = _changing(self), Step.from_wire(wire)
        return acknowledged(versions.rank, step.nonce, lambda: versions.commit(step.nonce)).to_wire()

    def genserve_rollback(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack."""
        versions, step = _changing(self), Step.from_wire(wire)
        return acknowledged(versions.rank, step.nonce, lambda: versions.rollback(step.nonce)).to_wire()

    def genserve_discard(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack."""
        versions, step = _changing(self), Step.from_wire(wire)
        return acknowledged(versions.rank, step.nonce, lambda: versions.discard(step.nonce)).to_wire()

    def genserve_sleep(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Sleep -> Ack."""
        versions, request = _changing(self), Sleep.from_wire(wire)
        return acknowledged(versions.rank, request.nonce, lambda: versions.before_sleep(request.level)).to_wire()

    def genserve_wake(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Ack."""
        versions = _changing(self)
        return acknowledged(versions.rank, "", versions.after_wake_up).to_wire()

    def genserve_transfer(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Transfer -> Ack."""
        versions, request = _changing(self), Transfer.from_wire(wire)
        return acknowledged(versions.rank, request.nonce, lambda: _transfer(self, request)).to_wire()

    def genserve_add_lora(self, wire: dict[str, Any]) -> dict[str, Any]:
        """AddLora -> AddedLora."""
        versions, request, unused = _changing(self), AddLora.from_wire(wire), list[str]()

        def add() -> None:
            lora = LoRARequest(request.lora_name, request.lora_id, request.directory)
            self.add_lora(lora)  # type: ignore[attr-defined]
            unused.extend(_without_layer(self, request.lora_id))

        ack = acknowledged(versions.rank, request.nonce, add)
        return AddedLora(ack.rank, ack.nonce, ack.error, unused).to_wire()

    def genserve_remove_lora(self, wire: dict[str, Any]) -> dict[str, Any]:
        """RemoveLora -> Ack."""
        versions, request = _changing(self), RemoveLora.from_wire(wire)
        remove = self.remove_lora  # type: ignore[attr-defined]
        return acknowledged(versions.rank, request.nonce, lambda: remove(request.lora_id)).to_wire()

    def genserve_digests(self, wire: dict[str, Any]) -> dict[str, Any]:
        """ReadDigests -> Digests."""
        versions, request, began_s = self._genserve, ReadDigests.from_wire(wire), time.perf_counter()
        found: list[dict[str, str] | None] = []
        ack = acknowledged(versions.rank, "", lambda: found.append(versions.live_digests.read_on(request.budget_s)))
        digests = found[0] if found else None
        spent_s = time.perf_counter() - began_s
        return Digests(ack.rank, digests or {}, digests is not None, spent_s, ack.error).to_wire()


def _changing(worker: WeightExchangeExtension) -> Versions:
    """For calls that change the live weights or adapters, or may do so by a fault: forgets the digests, so that they
    are read again."""
    versions = worker._genserve
    versions.live_digests.forget()
    return versions


def _without_layer(worker: Any, lora_id: int) -> list[str]:
    """The modules of a loaded adapter, by vLLM's names, that no layer of this worker's part of the model takes: vLLM
    gives each layer that may have an adapter the module of its own name, and says nothing of the others."""
    manager = worker.model_runner.lora_manager._adapter_manager
    layers = manager.modules.keys()
    # vLLM looks for the layers of a model that pools without their first name, too.
    taken = layers | {name.removeprefix("model.") for name in layers}
    return sorted(name for name in manager.get_adapter(lora_id).loras if name.removesuffix(_OF_EXPERTS) not in taken)


def _transfer(worker: Any, request: Transfer) -> None:
    """Carries out a request of vLLM's own weight transfer. Raises vLLM's errors."""
    match request.call:
        case "init":
            worker.init_weight_transfer_engine(json.loads(request.info))
        case "start":
            worker.start_weight_update()
        case "update":
            worker.update_weights(json.loads(request.info))
        case "finish":
            worker.finish_weight_update()
        case "abandon":
            _abandon(worker)
        case unknown:
            raise ValueError(f"there is no call {unknown!r}")


def _abandon(worker: Any) -> None:
    """Ends an update that was not finished, which vLLM itself cannot: from its start to its end the live layers are on
    the meta device, and after a failed end the worker refuses every further update. Gives the layers their previous
    tensors back, some of which may have new contents already. The live weights are inconsistent then, until a version
    is prepared and committed.

    internal: vLLM's flag of an open update, and what it keeps of layers that are being loaded."""
    worker.weight_transfer_engine.drain_pending()
    worker._weight_update_active = False
    worker.weight_transfer_engine.reset_weight_update_target()
    model = worker.model_runner.get_model()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


# Even before Attach: a daemon may be ended while its engine starts. A process that was spawned does this from its
# beginning; on a GPU, vLLM forks them.
if multiprocessing.parent_process() is not None:
    end_with_daemon()
