"""Keeps adapters away from requests without one, in vLLM's LoRA kernels for the CPU.

vLLM marks a token without an adapter with the index -1. Its kernels for a GPU skip such a token; those for the CPU take
the index from the end, so in a step with requests of both kinds the adapter in the last slot applies to all the others,
and their keys and values are cached as if there was none (vllm-project/vllm#48421). From vLLM 0.33 on they skip it
themselves: this module goes with 0.32.
"""

from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu


def vllm_skips_them() -> bool:
    """Whether a token without an adapter gets nothing of the last one, here of one that multiplies by 1."""
    output = torch.zeros(1, 1)
    lora_ops.bgmv_shrink(torch.ones(1, 1), torch.ones(1, 1, 1, 1), output, torch.tensor([-1]))
    return not output.any()


def skip_tokens_without_adapter() -> None:
    """For this process, if vLLM's own kernels do not.

    The second half of an adapter multiplies 0 for those tokens: what the first one has given, and of an embedding,
    where the first is a table, what was looked up.
    """
    if vllm_skips_them():
        return
    shrink, expand = lora_ops.bgmv_shrink, lora_ops.bgmv_expand

    def bgmv_shrink(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, *scaling: Any
    ) -> None:
        shrink(inputs, weights, output, indices, *scaling)
        output[indices < 0] = 0

    def bgmv_expand(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        add_inputs: bool = True,
    ) -> None:
        expand(inputs.masked_fill((indices < 0).unsqueeze(1), 0), weights, output, indices, add_inputs)

    for module in (lora_ops, punica_cpu):  # the kernels of a prefill call those of the first
        module.bgmv_shrink, module.bgmv_expand = bgmv_shrink, bgmv_expand
