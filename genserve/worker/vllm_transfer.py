"""vLLM's own weight transfer in a worker: its calls, and how to abandon an update that was not finished.

vLLM cannot abandon an update: from its start to its end the live layers are on the meta device, and after a failed end
the worker refuses every further update. `_abandon` gives the layers their previous tensors back, some of which may have
new contents already. The live weights are inconsistent then, until a version is prepared and committed.
"""

import json
from typing import Any

from vllm.model_executor.model_loader.reload import layerwise

from genserve.worker.contract.calls import Transfer


def transfer(worker: Any, request: Transfer) -> None:
    """Carries out the request. Raises vLLM's errors."""
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
    """internal: vLLM's flag of an open update, and what it keeps of layers that are being loaded."""
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
