"""Which weights are quantised while they are loaded, on vLLM's own configurations, and which that draft are pushed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
from vllm.engine.arg_utils import AsyncEngineArgs

from genserve.worker.contract.vllm_settings import drafts_with_served_checkpoint, quantizes_online
from tests.support import models


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16."""
    return models.tiny_qwen3(tmp_path_factory.mktemp("model"))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
ON_TOP = {"quantization_config": {"linear": "fp8_per_channel"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "experts_int8", *sorted({*ONLINE_QUANT_SHORTHAND_NAMES} - {"online"})])
def test_a_name_of_vllms_quantises_a_checkpoint_that_is_not(plain: Path, name: str) -> None:
    """Every one that vLLM has."""
    assert quantizes_online(AsyncEngineArgs(model=str(plain), quantization=name).create_engine_config())


@pytest.mark.parametrize(
    ("checkpoint", "flags", "online"),
    [
        (None, {}, False),
        (FP8, {}, False),
        ({"quant_method": "mxfp8"}, {"quantization": "mxfp8"}, False),  # also a name for quantising online
        ({"quant_method": "mxfp4"}, {}, False),
        (AWQ, {}, False),
        (AWQ, ON_TOP, True),  # what the checkpoint has in full; the name says awq
        (FP8, ON_TOP, True),
        (None, ON_TOP, False),  # vLLM does nothing without --quantization
        (None, {"quantization": "online", **ON_TOP}, True),
        (None, {"quantization": "online", "quantization_config": {"targets": {"re:.*o_proj": "mxfp8"}}}, True),
    ],
)
def test_what_the_checkpoint_has_and_what_is_asked_for_decide(
    plain: Path, tmp_path: Path, checkpoint: dict[str, Any] | None, flags: dict[str, Any], online: bool
) -> None:
    """Not the name."""
    directory = shutil.copytree(plain, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": checkpoint}))
    assert quantizes_online(AsyncEngineArgs(model=str(directory), **flags).create_engine_config()) == online


@pytest.mark.parametrize(
    ("method", "model", "expected"),
    [("mtp", "served", True), ("mtp", "other", False), ("eagle3", "served", False), ("ngram", None, False)],
)
def test_layers_of_the_served_checkpoint_are_in_every_push(method: str, model: str | None, expected: bool) -> None:
    """Others are in none."""
    draft_model = None if model is None else SimpleNamespace(model=model)
    speculative = SimpleNamespace(method=method, draft_model_config=draft_model)
    config = SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(model="served"))
    assert drafts_with_served_checkpoint(config) is expected
