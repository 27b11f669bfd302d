"""What an in-place update takes for a layer, and for a parameter with a value; without an engine."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.model_loader import utils
from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

from genserve.worker.model.tree import owners
from genserve.worker.update.device import Device
from genserve.worker.update.inplace import LayerModel, by_layer, layer_shadows
from genserve.worker.update.structure import Structure

CPU = Device(torch.device("cpu"))


class Model(nn.Module):
    """Two layers, each with one parameter that is loaded in two halves; the loader fills what a vocabulary lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.embedding = nn.Embedding(6, 4)

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        """Takes `layers.N.upper` and `layers.N.lower` for the halves of `layers.N.weight`."""
        loaded = set()
        with torch.no_grad():
            for name, tensor in tensors:
                module, _, key = name.rpartition(".")
                weight: torch.Tensor = self.get_submodule(module).weight
                if key == "weight":
                    weight[: len(tensor)].copy_(tensor)
                    weight[len(tensor) :].fill_(0)
                else:
                    weight[slice(0, 2) if key == "upper" else slice(2, 4)].copy_(tensor)
                loaded.add(f"{module}.weight")
        return loaded


def layer_of(model: Model, layer: int | None) -> LayerModel:
    """One layer of the model, all of whose parameters must be filled."""
    made = LayerModel(model, by_layer(model.named_modules())[layer])
    made.must_fill = list(made.named_parameters())
    return made


def test_a_layer_is_what_has_the_same_first_number_in_its_name() -> None:
    """However deep; names without one are a layer too."""
    names = ["model.layers.3.mlp.experts.7.w1", "h.3", "lm_head.weight", "", "v2.layers.12.0.w"]
    found = {layer: [name for name, _ in named] for layer, named in by_layer((name, 0) for name in names).items()}
    assert found == {3: names[:2], None: names[2:4], 12: names[4:]}


def test_walk_through_a_layer_finds_only_its_modules_by_full_names() -> None:
    """Also where torch walks through modules to find parameters."""
    model = Model()
    layer = layer_of(model, 1)
    assert [name for name, _ in layer.named_modules()] == ["layers.1"]
    assert list(layer.modules()) == [model.layers[1]]
    assert [name for name, _ in layer.named_parameters()] == ["layers.1.weight"]
    assert [name for name, _ in layer_of(model, None).named_parameters()] == ["embedding.weight"]
    assert layer.get_submodule("layers.0") is model.layers[0]


class Kernel:
    """As vLLM's kernels of experts, which post-processing makes."""

    __module__ = "vllm.model_executor.kernels"

    def __init__(self) -> None:
        self.scale = 0.5
        self.packed = torch.ones(2)


def structure_of(model: Model) -> Structure:
    """As `Structure.build` has it for this model, but for the storage."""
    config: Any = SimpleNamespace(quantization=None)
    own = owners(model).values()
    return Structure(
        model,
        config,
        config,
        slots=[],
        modules=[(owner, dict(vars(owner))) for owner in own if isinstance(owner, nn.Module)],
        parts=[(owner, dict(vars(owner))) for owner in own if not isinstance(owner, nn.Module)],
        shared=frozenset(),
    )


def test_state_on_objects_made_by_post_processing_belongs_to_the_layer() -> None:
    """And what was there before and several layers refer to, to the first one alone."""
    model, shared = Model(), Kernel()
    for layer in model.layers:
        layer.shared = shared  # type: ignore[assignment]
    first, second = (layer_shadows(structure_of(model), CPU)[number] for number in (0, 1))
    for number, shadow in enumerate((first, second)):
        model.layers[number].kernel = Kernel()  # type: ignore[assignment]
        shared.packed = torch.zeros(2)
        names = {f"layers.{number}.{each}" for each in ("weight", "kernel.scale", "kernel.packed")}
        names |= {"layers.0.shared.scale", "layers.0.shared.packed"} if number == 0 else set()
        assert shadow.written().keys() == names


@pytest.mark.parametrize("missing", ["upper", "lower"])
def test_a_parameter_of_which_a_part_is_missing_is_named(missing: str) -> None:
    """Though the loader reports it as loaded; the same part twice does not make up for another."""
    halves = [(f"layers.1.{half}", torch.ones(2, 4)) for half in ("upper", "lower")]
    layer = layer_of(Model(), 1)
    assert layer.load_weights(halves) == {"layers.1.weight"}
    present = [(name, tensor) for name, tensor in halves if not name.endswith(missing)]
    with pytest.raises(ValueError, match=r"no tensor gave a complete value to layers\.1\.weight \(1 in all\)"):
        layer.load_weights(present * 2)


def test_padding_that_the_loader_fills_is_not_missing() -> None:
    """vLLM pads vocabularies with zeros."""
    layer_of(Model(), None).load_weights([("embedding.weight", torch.ones(5, 4))])


def test_vllm_still_finds_post_processing_by_walking_named_modules() -> None:
    """`LayerModel` answers that walk with one layer; and a model's own hook, which it has not, would see them all."""
    source = inspect.getsource(utils.process_weights_after_loading)
    assert source.count("model.named_modules()") == 2
    assert 'hasattr(model, "process_weights_after_loading")' in source
    for other in (".modules()", ".children()", ".named_children()", "model.get_"):
        assert other not in source
    assert "word_embeddings_untied_by_checkpoint" in inspect.getsource(maybe_retie_word_embeddings)
