"""What became of an adapter that vLLM has loaded: which of its modules a layer of the model has taken.

vLLM gives each layer that may have an adapter the module of its own name, and says nothing of the others.
"""

from typing import Any

_OF_EXPERTS = ".base_layer"
"""PEFT's name for the first of two adapters of one layer of experts; vLLM stacks both."""


def without_layer(worker: Any, lora_id: int) -> list[str]:
    """The modules of a loaded adapter, by vLLM's names, that no layer of this worker's part of the model takes."""
    manager = worker.model_runner.lora_manager._adapter_manager
    layers = manager.modules.keys()
    # vLLM looks for the layers of a model that pools without their first name, too.
    taken = layers | {name.removeprefix("model.") for name in layers}
    return sorted(name for name in manager.get_adapter(lora_id).loras if name.removesuffix(_OF_EXPERTS) not in taken)
