"""Where one thing explains all names that the checkpoint does not have, the refusal says it in one sentence."""

import re
from dataclasses import replace

import pytest

from genserve.errors import ManifestMismatchError
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor, checkpoint_issues
from genserve.weights.push_admission import refuse_issues
from tests.support.refusals import refuses

LAYERS = [f"layers.{number}.{part}.weight" for number in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")]
NAMES = ["lm_head.weight", "model.embed_tokens.weight", *(f"model.{name}" for name in LAYERS), "model.norm.weight"]
OF_TEXT = [name.replace("model.", "model.language_model.") for name in NAMES]


def checkpoint(names: list[str]) -> CheckpointIndex:
    return CheckpointIndex(dict.fromkeys(names, CheckpointTensor("F32", (2,), 8)))


def message(pushed: list[str], served: list[str]) -> str:
    """What a push of tensors with these names is told."""
    with refuses(ManifestMismatchError) as raised:
        refuse_issues(checkpoint_issues(checkpoint(pushed).as_manifest(), checkpoint(served)))
    return raised.value.message


INSIDE = [name.replace("mlp.", "_checkpoint_wrapped_module.mlp.") for name in NAMES]
MERGED = [f"base_model.model.{name.replace('q_proj', 'q_proj.base_layer')}" for name in NAMES]
FUSED, EXPERT = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.0.down_proj.weight"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("pushed", "served", "says"),
    [
        ([f"_orig_mod.{name}" for name in NAMES], NAMES,
         "begins every name with '_orig_mod.': pass rename=..., or push model._orig_mod"),
        ([f"module.{name}" for name in NAMES], NAMES,
         "begins every name with 'module.': pass rename=..., or push model.module"),
        ([f"actor.net.{name}" for name in NAMES], NAMES, "begins every name with 'actor.net.': pass rename=..."),
        ([f"module._orig_mod.{name}" for name in NAMES], NAMES, "with 'module._orig_mod.': pass rename=..."),
        (OF_TEXT, NAMES, "with 'model.language_model.' where the checkpoint has 'model.': pass rename=..."),
        (NAMES, OF_TEXT, "with 'model.' where the checkpoint has 'model.language_model.': pass rename=..."),
        ([name.removeprefix("model.") for name in NAMES], NAMES,
         "begins no name with 'model.', as the checkpoint does: pass rename=..."),
        (INSIDE, NAMES, "has '_checkpoint_wrapped_module.' in names: pass rename=..., or push the module"),
        (MERGED, NAMES, f"has PEFT's names, such as {MERGED[0]!r}: push the module, or pass rename=..."),
        ([*NAMES[:2], FUSED], [*NAMES[:2], EXPERT],
         f"has the experts of a layer in one tensor, such as {FUSED!r}: push the module, which is converted"),
        ([f"_orig_mod.{name}" for name in [*NAMES[:2], FUSED]], [*NAMES[:2], EXPERT],
         f"in one tensor, such as '_orig_mod.{FUSED}': push the module, which is converted"),
        ([FUSED.removeprefix("model.")], [EXPERT], "push the module, which is converted"),
        ([*NAMES[:3], *(f"actor.{name}" for name in NAMES[3:])], NAMES,
         f"begins names such as 'actor.{NAMES[3]}' with 'actor.': pass rename=..."),
        ([*NAMES[:3], *(name.removeprefix("model.") for name in NAMES[3:])], NAMES,
         f"does not begin names such as '{NAMES[3].removeprefix('model.')}' with 'model.', as the checkpoint does: "
         "pass rename=..."),
        ([*NAMES, A], NAMES, f"such as {A!r}: push it with push_lora, or merge it, and push the module"),
    ],
)  # fmt: skip
def test_one_thing_that_explains_every_name_is_said_in_one_sentence(
    pushed: list[str], served: list[str], says: str
) -> None:
    """And nothing else is."""
    said = message(pushed, served)
    assert said.endswith(says)
    assert ";" not in said


def test_tensors_that_lack_beside_it_do_not_hide_the_cause() -> None:
    """They are told when the names are right."""
    assert "_orig_mod" in message([f"_orig_mod.{name}" for name in NAMES[3:]], NAMES)


@pytest.mark.parametrize(
    "pushed",
    [
        [f"_orig_mod.{name}" for name in NAMES] + ["value_head.weight"],
        [f"a.{name}" if name < "model.layers.5" else f"b.{name}" for name in NAMES],
        [*NAMES, "_orig_mod.model.norm.weight"],
        ["x", "y"],
        NAMES[:-1],
        [*NAMES, f"other{FUSED}"],
    ],
)
def test_where_it_would_be_two_things_or_none_the_tensors_are_named(pushed: list[str]) -> None:
    """The first of each kind."""
    assert "is missing" in message(pushed, NAMES) or "is not in the checkpoint" in message(pushed, NAMES)


SHIFTED = [re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + 1}", name) for name in NAMES]


@pytest.mark.parametrize(
    ("pushed", "partial"),
    [
        (SHIFTED, False),  # layers are counted from 1: the renaming that is advised permutes them
        ([name.replace("layers.3.", "layers.12.") for name in NAMES if "layers.3." in name], True),
        (["value_head.weight"], True),
        (["model.layers.0.self_attn.v_proj.weight"], True),
    ],
)
def test_what_is_another_layer_or_module_is_not_the_beginning_of_a_name(pushed: list[str], partial: bool) -> None:
    """Who renamed it as advised would overwrite another layer of the served model, and be told that all is well."""
    manifest = replace(checkpoint(pushed).as_manifest(), partial=partial)
    with refuses(ManifestMismatchError) as raised:
        refuse_issues(checkpoint_issues(manifest, checkpoint(NAMES)))
    assert "rename" not in raised.value.message
