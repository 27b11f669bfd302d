"""What a live model may keep beside the weights that are exchanged; without an engine."""

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.model import audit as audit_module
from genserve.worker.model.audit import audit
from genserve.worker.model.digests import weight_digests
from tests.unit.worker.hidden_weights import HIDDEN, Plain, PrecisionConfig, Slotted, closure, experts, model

SCALE = "model.layers.0.mlp.experts.quant_method.w13_precision_config.weight_scale"


def test_scales_of_mxfp4_in_a_dataclass_are_refused_by_their_path() -> None:
    """As gpt-oss keeps them: a push would serve new weights under old scales."""
    live = model()
    experts(live).quant_method.process_weights_after_loading(experts(live))
    for copied in (False, True):
        with pytest.raises(ValueError, match=rf"{re.escape(SCALE)} \(1 in all\)"):
            audit(live, model(), copied=copied)


@pytest.mark.parametrize("how", HIDDEN)
def test_a_weight_is_found_wherever_it_hides(how: str) -> None:
    """By its path, in Python's notation."""
    live = model()
    make, path = HIDDEN[how]
    experts(live, 1).kernel = make(torch.ones(3))
    with pytest.raises(ValueError, match=re.escape(f" model.layers.1.mlp.experts.{path} (1 in all)")):
        audit(live, model(), copied=False)


@pytest.mark.parametrize("how", HIDDEN)
def test_a_digest_tells_a_hidden_weight_from_another(how: str) -> None:
    """Or a mix of two versions would have the digests of one."""
    found = []
    for value in (1.0, 2.0):
        live = model()
        experts(live).kernel = HIDDEN[how][0](torch.full((3,), value))
        found.append(weight_digests(live))
    assert found[0].keys() == found[1].keys()
    differing = {name for name in found[0] if found[0][name] != found[1][name]}
    assert differing == {f"model.layers.0.mlp.experts.{HIDDEN[how][1]}"}


def test_what_an_exchange_reaches_is_not_refused() -> None:
    """Parameters that are referred to twice, closures that loading makes, tensors in attributes, the KV cache, and what
    has no contents."""
    live = model()
    layer = experts(live)
    layer.kernel = [layer.w13_weight, functools.partial(torch.mul, layer.w13_weight)]
    layer.cpu_linear = closure(torch.ones(3))
    layer.derived = torch.ones(3)
    layer.kv_cache = [torch.ones(5), {"scales": torch.ones(2)}]
    layer.views = (layer.kv_cache[0][1:],)
    layer.empty = [torch.empty(0), torch.empty(3, device="meta")]
    assert audit(live, model(), copied=False).paths == frozenset()


def test_a_view_of_a_weight_is_good_where_contents_are_copied_alone() -> None:
    """An exchange that moves the weight leaves the view behind."""
    live = model()
    experts(live).kernel = {"transposed": experts(live).w13_weight.data.view(2, 2).t()}
    audit(live, model(), copied=True)
    with pytest.raises(ValueError, match=r"kernel\['transposed'\]"):
        audit(live, model(), copied=False)


def test_derived_tensor_with_one_of_two_references_exchanged_is_refused() -> None:
    """The attribute gets the new one, the list keeps the old one."""
    live = model()
    layer = experts(live)
    layer.derived = torch.ones(3)
    layer.kernel = [layer.derived]
    with pytest.raises(ValueError, match=r"experts\.kernel\[0\]"):
        audit(live, model(), copied=False)
    audit(live, model(), copied=True)


def test_a_closure_that_construction_made_is_looked_into() -> None:
    """It is not exchanged: loading makes no other one."""
    live, structure = model(), model()
    config = PrecisionConfig()
    experts(live).forward_scaled = closure(config)  # type: ignore[arg-type]
    experts(structure).forward_scaled = closure(PrecisionConfig())  # type: ignore[arg-type]
    audit(live, structure, copied=False)
    config.weight_scale = torch.ones(2)
    with pytest.raises(ValueError, match=r"forward_scaled\.__closure__\.weight\.weight_scale"):
        audit(live, structure, copied=False)


def with_constant(value: float) -> nn.Module:
    """A model whose construction makes a tensor where an exchange does not look."""
    made = model()
    experts(made, 1).kernel = [torch.full((3,), value)]
    return made


def test_what_construction_makes_is_constant_until_loading_writes_it() -> None:
    """Scratch memory, and tables: another model of the class has them too, before anything is loaded."""
    live, structure = with_constant(1.0), with_constant(0.0)
    path = "model.layers.1.mlp.experts.kernel[0]"
    constants = audit(live, structure, copied=False)
    assert constants.paths == {path}
    constants.check()
    experts(structure, 1).kernel[0].data.fill_(2.0)  # as weight loaders write: torch does not count it
    with pytest.raises(ValueError, match=r"kernel\[0\] was written by loading"):
        constants.check()
    constants.within({"model.layers.0.mlp.experts"}).check()
    with pytest.raises(ValueError, match="was written by loading"):
        constants.within({"model.layers.1.mlp.experts"}).check()
    assert path in weight_digests(live)
    assert path not in weight_digests(live, constants.paths)


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3, dtype=torch.int32), nn.Parameter(torch.ones(3))])
def test_what_is_not_as_construction_made_it_is_refused(other: torch.Tensor) -> None:
    """Loading has put something else there, or it is a parameter: those are loaded."""
    live, structure = with_constant(1.0), with_constant(0.0)
    experts(live, 1).kernel[0] = other
    with pytest.raises(ValueError, match=r"kernel\[0\]"):
        audit(live, structure, copied=False)


class SharedExperts:
    """As vLLM's, which keeps what they say until the routed experts are done."""

    def __init__(self) -> None:
        self._output: list[Any] = [None, None]


class B12xExperts:
    """As vLLM's, which keeps ones, by device, from the loading on."""

    def __init__(self) -> None:
        self._unit_scales = {"cpu": torch.ones(3)}


def of_a_step() -> torch.Tensor:
    """A tensor that a step has made."""
    with torch.inference_mode():
        return torch.ones(3)


def test_state_kept_by_steps_is_known_by_class_name_and_creator() -> None:
    """Another class, another name, or a tensor that loading has made, is refused."""
    live = model()
    experts(live).kernel = [SharedExperts(), B12xExperts()]
    shared = experts(live).kernel[0]
    shared._output[1] = (of_a_step(),)
    audit(live, model(), copied=False)
    shared._output[1] = (torch.ones(3),)
    with pytest.raises(ValueError, match=r"kernel\[0\]\._output\[1\]\[0\]"):
        audit(live, model(), copied=False)
    shared._output[1] = None
    shared.repacked = [of_a_step()]
    with pytest.raises(ValueError, match=r"repacked\[0\]"):
        audit(live, model(), copied=False)
    experts(live).kernel = [Plain(_output=[of_a_step()])]
    with pytest.raises(ValueError, match=r"_output\[0\]"):
        audit(live, model(), copied=False)


class Attention:
    """As vLLM's attention on the CPU, which converts its sinks in the first step."""

    __module__ = "vllm.v1.attention.backends.cpu_attn"

    def __init__(self, sinks: nn.Parameter) -> None:
        self.sinks: torch.Tensor = sinks

    def forward(self) -> None:
        """As vLLM's."""
        with torch.inference_mode():
            self.sinks = self.sinks.to(torch.float64)


def with_attention() -> nn.Module:
    """A model whose attention refers to a weight."""
    made = model()
    experts(made).kernel = Attention(experts(made).w13_weight)
    return made


def test_a_copy_that_a_step_puts_in_the_place_of_a_weight_is_refused() -> None:
    """Loading makes none, so an exchange would leave it."""
    live, structure = with_attention(), with_attention()
    known = audit(live, structure, copied=False)
    assert audit(live, structure, copied=False, known=known) is known
    experts(live).kernel.forward()
    for copied in (False, True):
        with pytest.raises(ValueError, match=r"leave model\.layers\.0\.mlp\.experts\.kernel\.sinks \(1 in all\)"):
            audit(live, structure, copied=copied, known=known)


class LoraWrapper(nn.Module):
    """As vLLM wraps a layer for adapters, which are no weights of a version."""

    __module__ = "vllm.lora.layers.column_parallel_linear"

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.zeros(2),)


class MoELoRAContext:
    """As vLLM hands the adapters of experts to their kernels, which keep it."""

    __module__ = "vllm.model_executor.layers.fused_moe.experts.lora_context"

    def __init__(self) -> None:
        self.w13_lora_a_stacked = (torch.zeros(2),)


def test_adapters_that_kernels_keep_are_not_weights_either() -> None:
    """They change places with LoadLora."""
    live = model()
    experts(live).quant_method._lora_context = MoELoRAContext()
    audit(live, model(), copied=False)


def test_adapters_are_not_weights_and_what_they_wrap_is() -> None:
    """The wrapped layer is found under the name that it has without adapters."""
    live = model()
    live.get_submodule("model.layers.0.mlp").experts = LoraWrapper(experts(live))
    audit(live, model(), copied=False)
    experts(live).base_layer.kernel = Slotted(torch.ones(2))
    with pytest.raises(ValueError, match=r"leave model\.layers\.0\.mlp\.experts\.kernel\.weight \(1"):
        audit(live, model(), copied=False)


def of_package(package: str) -> Any:
    """An object with a tensor, of a class of that package."""
    return type("Holder", (Plain,), {"__module__": package})(tensor=torch.ones(2))


@pytest.mark.parametrize(
    "package",
    [
        "vllm.compilation.cuda_graph",  # compiled code gets weights as inputs
        "torch._dynamo.eval_frame",
        "vllm.config.vllm",
        "vllm.distributed.parallel_state",
        "flashinfer.prefill",  # workspaces of attention
        "transformers.cache_utils",
        "triton.runtime.jit",
    ],
)
def test_what_cannot_hold_weights_is_not_looked_into(package: str) -> None:
    """Nor refused for what it holds: example inputs, outputs of graphs, workspaces."""
    live = model()
    experts(live).kernel = [of_package(package)]
    audit(live, model(), copied=False)


@pytest.mark.parametrize("package", ["flashinfer.fused_moe", "triton_kernels.tensor", "vllm.utils", "torchao", "b12x"])
def test_any_other_object_is_looked_into(package: str) -> None:
    """Libraries of kernels pack weights into objects of their own."""
    live = model()
    experts(live).kernel = [of_package(package)]
    with pytest.raises(ValueError, match=r"experts\.kernel\[0\]\.tensor"):
        audit(live, model(), copied=False)


def test_a_walk_ends() -> None:
    """Also where objects refer to each other, or to more than anybody can look at."""
    live = model()
    ring: list[Any] = []
    ring.append({"back": ring})
    experts(live).kernel = ring
    audit(live, model(), copied=False)


def test_a_walk_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not looked at may be a weight."""
    monkeypatch.setattr("genserve.worker.model.references.MAX_OBJECTS", 50)
    live = model()
    experts(live).kernel = [[i] for i in range(50)]
    with pytest.raises(ValueError, match="more than 50 objects"):
        audit(live, model(), copied=False)


def many(layers: int) -> nn.Module:
    """A model of so many layers, whose construction makes four tensors on each, one of them shared by all."""
    made, shared = model(layers), torch.zeros(64)
    for layer in range(layers):
        experts(made, layer).kernel = [torch.zeros(2), {"a": torch.zeros(2)}, (torch.zeros(2),), shared]
    return made


def test_constants_of_many_layers_are_found_in_one_walk_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every push, while steps wait for Python's lock: no walk for each of them, and what layers share is no more."""
    live, structure = many(48), many(48)
    constants = audit(live, structure, copied=False)
    assert len(constants.paths) == 4 * 48
    walked, read = [], []
    plain_walk, plain_digest = audit_module.modules_by_name, audit_module.digest
    monkeypatch.setattr(audit_module, "modules_by_name", lambda each: walked.append(each) or plain_walk(each))
    monkeypatch.setattr(audit_module, "digest", lambda each: read.append(each) or plain_digest(each))
    constants.check()
    assert (len(walked), len(read)) == (1, 3 * 48 + 1)
    walked.clear()
    assert audit(live, structure, copied=False, known=constants) is constants
    assert walked == []
    experts(structure, 47).kernel[3].data.fill_(1.0)
    with pytest.raises(ValueError, match=r"experts\.kernel\[3\].* was written by loading"):
        constants.check()
