"""Models of many kinds as vLLM builds and loads them on the CPU, and what an audit says: run as a program, prints JSON.

    python -m tests.engine.audited_models DIRECTORY KIND...

No engine: the models are built in this process, with random weights, and never take a step. Three versions are pushed
into each, beside it and in place: which way a version came must make no difference.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
    "hidden_act": "silu",
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MAMBA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5,
    "dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {**_SMALL, **_EXPERTS, "model_type": "qwen3_moe"},
    "Qwen3ForCausalLM": {**_SMALL, "model_type": "qwen3", "tie_word_embeddings": True},
    "LlamaForCausalLM": {
        **_SMALL,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "Gemma3ForCausalLM": {
        **_SMALL,
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GptOssForCausalLM": {
        **_SMALL,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "DeepseekV3ForCausalLM": {  # MLA
        **_SMALL,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "Qwen3NextForCausalLM": {  # gated delta nets
        **_SMALL,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.5,
    },
    "MambaForCausalLM": {**_MAMBA, "model_type": "mamba", "intermediate_size": 128, "time_step_rank": 4},
    "Mamba2ForCausalLM": {**_MAMBA, "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "n_groups": 1},
}
"""By architecture. The one with experts comes first: with it vLLM makes the process groups that all of them need."""

HIDDEN_IN = "Qwen3ForCausalLM"
"""The kind that is audited once more, with a weight hidden in a layer."""


def main(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """What was refused of each of these kinds, "" if nothing; and the constants."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    torch.accelerator.empty_cache = lambda: None  # the loader calls it, and there is none
    init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
    found: dict[str, Any] = {}
    for i, (name, fields) in enumerate((name, CONFIGS[name]) for name in names):
        checkpoint = directory / name
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps({"architectures": [name], **fields}))
        args = AsyncEngineArgs(model=str(checkpoint), load_format="dummy", skip_tokenizer_init=True, max_model_len=128)
        config = args.create_engine_config()
        with set_current_vllm_config(config):
            if i == 0:
                initialize_model_parallel(1, 1)
            loader = get_model_loader(config.load_config)
            live = loader.load_model(vllm_config=config, model_config=config.model_config)
        found[name] = audits(live, config) | pushes(live, config, written_by_transformers(checkpoint))
        if name == HIDDEN_IN:
            live.get_submodule("model.layers.1.mlp").kernel = {"scale": torch.ones(2)}
            found["hidden"] = audits(live, config)
    return found


def audits(live: Any, config: Any) -> dict[str, Any]:
    """What each way of taking pushes says of a live model, and of a push without tensors."""
    import torch

    from genserve.worker.update.beside import BesideUpdate
    from genserve.worker.update.device import Device
    from genserve.worker.update.inplace import InPlaceUpdate
    from tests.support.kept_device import KeptDevice

    answers: dict[str, Any] = {}
    host = torch.device("cpu")
    updates: list[Any] = [BesideUpdate(live, config, Device.of(host), host), InPlaceUpdate(live, config, KeptDevice())]
    for update in updates:
        name = type(update).__name__
        answers[f"{name} at the start"] = answer(update.audit)
        answers[f"{name} at a push"] = answer(lambda update=update: update.prepare([], Event()))
    return answers


def written_by_transformers(checkpoint: Path) -> list[tuple[str, Any]]:
    """The tensors of a checkpoint of that kind, with random values, as names and tensors."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint)).to(torch.bfloat16)
    whole.save_pretrained(checkpoint / "saved")
    return [item for path in (checkpoint / "saved").glob("*.safetensors") for item in load_file(path).items()]


def pushes(live: Any, config: Any, tensors: list[tuple[str, Any]]) -> dict[str, Any]:
    """Digests of all that the live model holds, after pushes of three versions in two ways each."""
    import torch

    from genserve.worker.model.digests import weight_digests
    from genserve.worker.update.beside import BesideUpdate
    from genserve.worker.update.device import Device
    from genserve.worker.update.inplace import InPlaceUpdate
    from tests.support.loader_calls import loader_calls

    host = torch.device("cpu")
    device = Device.of(host)
    updates: list[Any] = [BesideUpdate(live, config, device, host), InPlaceUpdate(live, config, device)]
    answers: dict[str, Any] = {}

    def push(update: Any, factor: float) -> dict[str, str]:
        update.prepare([(name, tensor * factor) for name, tensor in tensors], Event())
        update.commit()
        update.discard()
        return weight_digests(live)

    for version, factor in (("a", 1.0), ("b", 1.25), ("c", 1.5)):
        with loader_calls([live]) as calls:
            for update in updates:
                answers[f"{type(update).__name__} {version}"] = push(update, factor)
        answers[f"loader calls {version}"] = len(calls)
    answers["loaded c"] = push(BesideUpdate(live, config, device, host), 1.5)
    return answers


def answer(ask: Any) -> Any:
    """Paths of constants, or what it raised."""
    try:
        constants = ask()
    except ValueError as error:
        return str(error)
    return sorted(constants.paths)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    print("AUDITS " + json.dumps(main(Path(sys.argv[1]), sys.argv[2:])), flush=True)
