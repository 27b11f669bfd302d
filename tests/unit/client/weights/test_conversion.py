"""A model of transformers is pushed in the form in which it saves itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from genserve.client.weights.modules import as_saved
from genserve.client.weights.sources import tensor_sources

SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 3, "num_local_experts": 3,
    "num_experts_per_tok": 1, "max_position_embeddings": 32, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = {
    "llama": LlamaConfig(**SMALL),
    "tied llama": LlamaConfig(**SMALL | {"tie_word_embeddings": True}),
    "qwen3_moe": Qwen3MoeConfig(**SMALL),
    "tied qwen3_moe": Qwen3MoeConfig(**SMALL | {"tie_word_embeddings": True}),
    "mixtral": MixtralConfig(**SMALL),
    "gpt_oss": GptOssConfig(**SMALL | {"layer_types": ["full_attention"] * 2}),
    "deepseek_v3": DeepseekV3Config(
        **SMALL | {"n_routed_experts": 3, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "qk_rope_head_dim": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
}  # fmt: skip


def model_of(kind: str) -> Any:
    """A live one, made from its configuration."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(KINDS[kind])


def contents(weights: Any) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {each.name: (each.shape, bytes(each.read())) for each in tensor_sources(weights)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_model_is_what_it_saves(kind: str, tmp_path: Path) -> None:
    """Made from a configuration, and loaded from a checkpoint."""
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    expected = contents(load_file(tmp_path / "model.safetensors"))
    assert contents(model) == expected
    assert contents(torch.compile(model)) == expected
    assert contents(AutoModelForCausalLM.from_pretrained(tmp_path)) == expected
    assert AutoConfig.from_pretrained(tmp_path).model_type == model.config.model_type


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_are_views_of_what_the_model_holds(kind: str) -> None:
    """So a push needs no memory for them: the trainer's next step is seen in what is sent."""
    model = model_of(kind)
    sources = tensor_sources(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert {each.name for each in sources if any(each.read())} == set()
    assert sum("experts" in each.name for each in sources) >= 9


def sharded(model: Any, mesh: DeviceMesh, dim: int) -> dict[str, Any]:
    """What a rank has of the tensors of a model. A process that plays several ranks must not have them detached by a
    state_dict: torch remembers the mesh of the first."""
    return {
        name: distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.ndim - 1))], src_data_rank=None)
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_ranks_that_share_the_experts_make_the_whole_together(kind: str, num_ranks: int, dim: int) -> None:
    """Of the experts that a rank holds, or of their rows or columns; nothing communicates. Each byte is sent once."""
    expected, found = contents(model_of(kind)), dict[str, bytearray]()
    for rank in range(num_ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        try:
            model = model_of(kind)
            parts = sharded(model, init_device_mesh("cpu", (num_ranks,)), dim)
            for source in tensor_sources(as_saved(model, parts)):
                whole = found.setdefault(source.name, bytearray(source.size_bytes))
                data, position = source.read(), 0
                for start, end in source.ranges:
                    assert not any(whole[start:end])
                    whole[start:end] = data[position : position + end - start]
                    position += end - start
        finally:
            dist.destroy_process_group()
    assert found == {name: data for name, (_, data) in expected.items()}


def test_tensors_that_no_rank_shares_stay_what_they_are() -> None:
    """Norms, say, beside experts that are sharded: no conversion is needed for them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = model_of("qwen3_moe")
        parts = sharded(model, init_device_mesh("cpu", (2,)), 0)
        whole = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
        saved = as_saved(model, parts | whole)
    finally:
        dist.destroy_process_group()
    assert whole and all(saved[name] is tensor for name, tensor in whole.items())
