"""A module is pushed under the names of its checkpoint, whatever wraps it. PEFT's layers are imitated by modules that
hold what those hold, under the same names; tests/engine/test_peft_release.py has PEFT's own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from genserve.client.weights.sources import tensor_sources
from genserve.errors import InvalidFieldError
from tests.support.refusals import refuses
from tests.support.wrappers import WRAPPERS, only_rank


class Layer(torch.nn.Module):
    """A part of a model that is wrapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(2, 2, bias=False)
        self.up_proj = torch.nn.Linear(2, 3)


class Model(torch.nn.Module):
    """Two layers, an embedding, and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4, 2)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.lm_head = torch.nn.Linear(2, 4, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


NAMES = [name for name in Model().state_dict() if name != "lm_head.weight"]


def contents(weights: Any, **options: Any) -> dict[str, bytes]:
    return {each.name: bytes(each.read()) for each in tensor_sources(weights, **options)}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """This process is the only rank."""
    with only_rank():
        yield


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_module_has_the_names_and_the_values_of_the_one_inside(wrapper: str) -> None:
    """And its tied head once, apart from FSDP1, which copies what it holds."""
    model = Model()
    expected = contents(model)
    assert list(expected) == NAMES
    if wrapper == "fsdp":
        expected["lm_head.weight"] = expected["embed_tokens.weight"]
    assert contents(WRAPPERS[wrapper](model)) == expected


class Tuned(torch.nn.Module):
    """A layer of PEFT: the one that it replaces, and two small matrices."""

    def __init__(self, base_layer: torch.nn.Module, *, merged: bool) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 1, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(1, 2, bias=False)})
        self.merged = merged


class Saved(torch.nn.Module):
    """A whole layer that PEFT trains beside adapters (modules_to_save)."""

    def __init__(self, layer: torch.nn.Module, trained: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = torch.nn.ModuleDict({"default": trained})
        self.active_adapter = "default"
        self.disable_adapters = False


class Tuner(torch.nn.Module):
    """LoraModel of PEFT, and PeftModel around it."""

    def __init__(self, name: str, inside: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, inside)
        self.peft_config: dict[str, object] = {}


def peft(model: Model, *, merged: bool) -> torch.nn.Module:
    """The model with an adapter."""
    layer: Any = model.layers[0]
    layer.q_proj = Tuned(layer.q_proj, merged=merged)
    return Tuner("base_model", Tuner("model", model))


@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile, DistributedDataParallel])
def test_a_merged_adapter_is_left_out(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """The weights have it in them, under the names of the model without one."""
    model = Model()
    expected = contents(model)
    assert contents(wrap(peft(model, merged=True))) == expected


def test_an_adapter_inside_an_adapter_is_left_out_too() -> None:
    """As of two layers of PEFT around one."""
    model = Model()
    expected = contents(model)
    layer: Any = model.layers[1]
    layer.q_proj = Tuned(Tuned(layer.q_proj, merged=True), merged=True)
    assert contents(model) == expected


def test_an_adapter_that_is_not_merged_is_refused() -> None:
    """Its model would be pushed without it. The error says what to do, and names the layer."""
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj\.lora_A.*push_lora, or merge it first"):
        tensor_sources(peft(Model(), merged=False))


def test_wholly_trained_layer_comes_from_its_trained_copy() -> None:
    """Unless it is switched off."""
    model = Model()
    trained = torch.nn.Linear(2, 3)
    layer: Any = model.layers[0]
    before = contents(model)
    layer.up_proj = Saved(layer.up_proj, trained)
    found = contents(Tuner("base_model", Tuner("model", model)))
    assert found == before | {
        f"layers.0.up_proj.{name}": value for name, value in contents(dict(trained.state_dict())).items()
    }
    layer.up_proj.disable_adapters = True
    assert contents(model) == before


def test_single_rows_that_were_trained_are_those_of_the_merged_embedding() -> None:
    """PEFT holds them in an adapter inside a wrapper (trainable_token_indices)."""
    model = Model()
    before = contents(model)
    wrapper: Any = torch.nn.Module()
    wrapper.token_adapter = Tuned(torch.nn.Embedding.from_pretrained(torch.ones(4, 2)), merged=True)
    model.embed_tokens = wrapper
    trained = torch.ones(4, 2).numpy().tobytes()
    found = contents(model)
    assert found.pop("embed_tokens.weight") == trained
    assert found.pop("lm_head.weight") == before["embed_tokens.weight"]
    assert found == {name: data for name, data in before.items() if name != "embed_tokens.weight"}


def test_what_is_no_tensor_in_a_module_is_refused_by_name() -> None:
    """Such as the extra state of some layers."""

    class Scaled(Model):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 1}

    with pytest.raises(TypeError, match=r"^_extra_state: dict"):
        tensor_sources(Scaled())


def test_names_are_rewritten_by_a_mapping_or_a_function() -> None:
    """A mapping keeps what it does not have; a module is unwrapped first."""
    tensors = {"policy.a": torch.zeros(1), "b": torch.ones(1)}
    assert list(contents(tensors, rename=lambda name: name.removeprefix("policy."))) == ["a", "b"]
    assert list(contents(tensors, rename={"policy.a": "c", "other": "d"})) == ["c", "b"]
    assert "layers.0.w" in contents(torch.compile(Model()), rename={"layers.0.q_proj.weight": "layers.0.w"})


@pytest.mark.parametrize("rename", [3, "x", lambda _: None, {"a": 5}])
def test_what_gives_no_name_is_refused(rename: Any) -> None:
    """As any other option with a wrong value."""
    with refuses(InvalidFieldError, field="rename"):
        tensor_sources({"a": torch.zeros(1)}, rename=rename)


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        ({"actor.": ""}, "renames 'actor.', which no tensor is called: they are called as 'actor.a' is"),
        ({"b": "c", "d": "e"}, "renames 'b', which no tensor is called"),
        ({"actor.a": "actor.b"}, "gives 'actor.b' to several tensors, such as 'actor.a' and 'actor.b'"),
        (lambda name: "w", "gives 'w' to several tensors, such as 'actor.a' and 'actor.b'"),
    ],
)
def test_a_renaming_that_reaches_no_tensor_or_makes_one_of_two_is_refused(rename: Any, says: str) -> None:
    """It is named, and not the names that the checkpoint then lacks."""
    with refuses(InvalidFieldError, field="rename", says=says):
        tensor_sources({"actor.a": torch.zeros(1), "actor.b": torch.ones(1)}, rename=rename)


def test_a_mapping_of_nothing_keeps_all_names() -> None:
    """And a rank without tensors has none that it could name."""
    assert list(contents({"a": torch.zeros(1)}, rename={})) == ["a"]
    assert contents({}, rename={"a": "b"}) == {}
