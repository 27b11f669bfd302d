"""What is used of vLLM's adapters that is not public. Each test names the place that must change when vLLM moves."""

import inspect
import json
import re

import pytest
import vllm
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from genserve.errors import InvalidFieldError
from genserve.installed_engine import OLDEST
from genserve.weights.lora.config import LoraConfig
from genserve.worker import cpu_lora
from tests.support.adapters import CONFIG
from tests.support.refusals import refuses


def test_adapters_are_still_taken_out_of_their_slots_by_these_names() -> None:
    """worker.model.slept does so after a sleep of level 2; a step that uses one then puts it into a slot again."""
    assert "self._active_adapters" in inspect.getsource(LoRAModelManager.__init__)
    assert "self._deactivate_adapter(adapter_id)" in inspect.getsource(LoRAModelManager.deactivate_adapter)
    mapping = inspect.getsource(LoRAModelManager.set_adapter_mapping)
    assert "self._last_mapping" in mapping
    assert "self._last_slot_layout" in mapping
    assert "module.reset_lora(index)" in inspect.getsource(LoRAModelManager.activate_adapter)
    assert "module.reset_module_to_save(index)" in inspect.getsource(LoRAModelManager.activate_adapter)
    assert {"modules", "lora_slots"} <= set(vars(LoRAModelManager)) | set(
        re.findall(r"self\.(\w+)", inspect.getsource(LoRAModelManager))
    )
    assert "self._adapter_manager.activate_adapter" in inspect.getsource(LRUCacheWorkerLoRAManager.add_adapter)


def test_layers_still_take_the_modules_of_an_adapter_that_have_their_names() -> None:
    """worker.extension tells by these names which of them no layer has taken."""
    activating = inspect.getsource(LoRAModelManager.activate_adapter)
    assert "for module_name, module in self.modules.items():" in activating
    assert "module_lora = self._get_lora_layer_weights(lora_model, module_name)" in activating
    found = inspect.getsource(LoRAModelManager._get_lora_layer_weights)
    assert 'module_name.removeprefix("model.")' in found
    assert "return lora_model.get_lora(org_module_name)" in found
    assert "self.loras.get(module_name, None)" in inspect.getsource(LoRAModel.get_lora)
    assert 'lora_model, module_name + ".base_layer"' in inspect.getsource(LoRAModelManager._stack_moe_lora_weights)
    assert "self._registered_adapters.get(adapter_id)" in inspect.getsource(LoRAModelManager.get_adapter)


def test_features_that_vllm_refuses_are_refused_before_the_tensors_come() -> None:
    """By all that it looks at, apart from ranks, which are compared, and from how weights were initialised: what to do
    then is another thing for each way, and vLLM says it."""
    source = inspect.getsource(PEFTHelper._validate_features) + inspect.getsource(PEFTHelper.validate_legal)
    features = set(re.findall(r"self\.(\w+)", source))
    features -= {"_validate_features", "_init_is_supported", "init_lora_weights", "r", "rank_pattern"}
    assert len(features) >= 8
    for name in features:
        with refuses(InvalidFieldError, field="config", says=f"{name}: "):
            LoraConfig.parse(json.dumps(CONFIG | {name: "x"}), 8, "config")


def test_oldest_vllm_cpu_lora_kernels_still_need_help_without_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """worker.cpu_lora replaces two functions of theirs, which the others call by their names. It goes when the oldest
    supported vLLM skips such tokens itself, as 0.33 does."""
    for name in ("bgmv_shrink", "bgmv_expand"):
        assert getattr(punica_cpu, name) is getattr(lora_ops, name)
        for module in (lora_ops, punica_cpu):
            monkeypatch.setattr(module, name, getattr(module, name))
    for name in ("shrink", "expand"):
        assert f"bgmv_{name}(" in inspect.getsource(getattr(lora_ops, f"sgmv_{name}"))
        assert f"bgmv_{name}(" in inspect.getsource(getattr(punica_cpu.PunicaWrapperCPU, f"_{name}_decode"))
    vllms = lora_ops.bgmv_shrink
    is_fixed = cpu_lora.vllm_skips_them()
    assert is_fixed == (vllm.__version_tuple__[:2] >= (0, 33))
    assert OLDEST < (0, 33), "delete worker.cpu_lora"
    cpu_lora.skip_tokens_without_adapter()
    assert cpu_lora.vllm_skips_them()
    assert (lora_ops.bgmv_shrink is vllms) == is_fixed
