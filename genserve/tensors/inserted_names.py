"""What wrappers of torch, and PEFT, put into the names of tensors."""

from typing import Final

COMPILED: Final = "_orig_mod"
WRAPPED: Final = (COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Where torch.compile, FSDP1 and activation checkpointing keep the module that they wrap: the model, or a part of it.
Some of them leave it out of a state_dict, and others do not."""
PARALLEL: Final = "module"
"""Where DDP and other data parallelism keep the whole model."""

PEFT_PREFIX: Final = "base_model.model."
"""Before every name of a model with PEFT's adapters."""
BASE_LAYER: Final = "base_layer"
"""Where a layer of PEFT keeps the one that it replaces."""
HALVES: Final = ((".lora_A.", ".lora_B."), (".lora_embedding_A", ".lora_embedding_B"))
"""Parts of the names of an adapter's two matrices: in a linear layer, and in an embedding."""
MAGNITUDE: Final = ".lora_magnitude_vector"
"""Part of the name of the vector that DoRA adds to an adapter."""
