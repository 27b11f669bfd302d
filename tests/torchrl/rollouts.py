"""Generates with torchrl's vLLMWrapper, updates the weights with its vLLMUpdaterV2, and generates again. Arguments: the
daemon's address, a checkpoint, and prompts of token ids. Prints both rollouts."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict, lazy_stack
from torchrl.collectors.llm import vLLMUpdaterV2
from torchrl.modules.llm import vLLMWrapper
from torchrl.modules.llm.backends.vllm import RLvLLMEngine

from genserve.integrations.torchrl import AsyncVLLM

OPTIONS = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def rollout(policy: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """What the wrapper makes of them."""
    tokens = [TensorDict({"tokens": {"prompt": torch.tensor(prompt)}}) for prompt in prompts]
    out = policy(lazy_stack(tokens))
    columns = {"prompt": ("tokens", "prompt"), "response": ("tokens", "response"), "logprobs": ("log_probs", "full")}
    return {name: [each.tolist() for each in out.get(key, as_list=True)] for name, key in columns.items()}


address, checkpoint, prompts = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
engine = AsyncVLLM(address)
assert isinstance(engine, RLvLLMEngine)
weights = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
assert engine.get_model_metadata() == {name: (each.dtype, each.shape) for name, each in weights.items()}
policy = vLLMWrapper(engine, input_mode="tokens", pad_output=False, inplace=False, generate_kwargs=OPTIONS)
updater = vLLMUpdaterV2(engine)
updater.init()
rollouts = [rollout(policy, prompts)]
updater.push_weights(TensorDict(weights))
rollouts.append(rollout(policy, prompts))
print("ROLLOUTS", json.dumps(rollouts))
engine.shutdown()
