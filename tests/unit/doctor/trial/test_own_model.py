"""The built-in model, and a second version of the user's own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from genserve.doctor.trial import own_model, tiny_model
from genserve.errors import InvalidFieldError
from tests.support.refusals import refuses


def test_built_in_model_is_small_and_its_versions_differ_everywhere() -> None:
    """A tensor that a push leaves alone must be seen."""
    a, b = tiny_model.checkpoints(1).values()
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        assert bytes(a[name].data) != bytes(b[name].data)
    assert sum(len(tensor.data) for tensor in a.values()) < 1_000_000


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_the_built_in_model_is_a_checkpoint_as_others_read_it(tmp_path: Path, num_ranks: int) -> None:
    """Weights, configuration and tokenizer; a head for each rank."""
    directory = tiny_model.write(tmp_path / "a", tiny_model.checkpoints(num_ranks)["a"])
    config = AutoConfig.from_pretrained(directory)
    assert config.num_key_value_heads % num_ranks == 0
    tensors = load_file(directory / "model.safetensors")
    norm = tensors["model.layers.0.input_layernorm.weight"].float()
    assert 0.9 < norm.mean() < 1.1
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (config.num_attention_heads * 64, 128)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == tiny_model.VOCABULARY == config.vocab_size
    assert tokenizer.decode(tokenizer.encode("naïve Käse\n")) == "naïve Käse\n"
    assert tokenizer.eos_token_id == config.eos_token_id


def own(
    directory: Path, dtype: torch.dtype = torch.bfloat16, norm: str = "model.layers.0.input_layernorm.weight"
) -> str:
    """A checkpoint with one norm of a layer."""
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.norm.weight": torch.ones(4, dtype=dtype),
        norm: torch.rand(4, generator=generator).to(dtype),
        "w": torch.rand(4, 4, generator=generator).to(dtype),
    }
    save_file(tensors, directory / "model.safetensors")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 512}
    (directory / "config.json").write_text(json.dumps(heads))
    return str(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_second_version_of_the_users_model_doubles_the_norm_of_a_layer(tmp_path: Path, dtype: torch.dtype) -> None:
    """The last norm would only scale the logits. Everything else is the same memory."""
    versions = own_model.checkpoints(own(tmp_path, dtype))
    name = "model.layers.0.input_layernorm.weight"
    assert {each for each in versions["a"] if versions["a"][each] is not versions["b"][each]} == {name}
    before, after = (torch.frombuffer(bytearray(versions[each][name].data), dtype=dtype) for each in "ab")
    assert torch.equal(after, before * 2)


def test_the_size_of_the_users_model_is_that_of_its_tensors(tmp_path: Path) -> None:
    """Keys and values of two layers, two heads of 128, in bf16."""
    path = own(tmp_path)
    size = own_model.size_of(path, own_model.checkpoints(path)["a"])
    assert (size.weight_bytes, size.largest_bytes) == (48, 32)
    assert size.kv_bytes_per_token == 2 * 2 * 2 * 2 * 128


def test_what_is_not_a_checkpoint_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    """Before anything is started."""
    for path, words in (
        (str(tmp_path / "none"), "not a directory"),
        (own(tmp_path / "flat", norm="scale"), "no norm in a layer"),
    ):
        with refuses(InvalidFieldError, field="model", says=words):
            own_model.checkpoints(path)
    (tmp_path / "flat" / "model.safetensors").write_bytes(b"nonsense")
    with refuses(InvalidFieldError, field="model", says="model.safetensors"):
        own_model.checkpoints(str(tmp_path / "flat"))
    path = own(tmp_path / "torn")
    (tmp_path / "torn" / "config.json").write_text("{")
    with refuses(InvalidFieldError, field="model", says="not JSON"):
        own_model.size_of(path, own_model.checkpoints(path)["a"])


@pytest.mark.parametrize("config", ["[]", "null", '"x"', '{"text_config": null}', '{"text_config": []}'])
def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path, config: str) -> None:
    """By the file's name, and before anything is started."""
    path = own(tmp_path)
    (tmp_path / "config.json").write_text(config)
    with refuses(InvalidFieldError, field="model", says="config.json"):
        own_model.size_of(path, own_model.checkpoints(path)["a"])


@pytest.mark.parametrize(
    "config",
    [{}, {"num_attention_heads": 4, "hidden_size": "512"}, {"num_attention_heads": [4], "num_hidden_layers": 2}],
)
def test_a_configuration_that_does_not_say_leaves_keys_and_values_out(
    tmp_path: Path, config: dict[str, object]
) -> None:
    """Whatever it has in the place of the numbers."""
    path = own(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert own_model.size_of(path, own_model.checkpoints(path)["a"]).kv_bytes_per_token == 0
