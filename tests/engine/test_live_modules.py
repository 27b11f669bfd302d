"""Models of transformers are pushed as a trainer has them: wrapped, with a merged adapter, with the experts of a layer
in one tensor, or from the file that they were saved to. The daemon then computes what they do."""

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from genserve.client import AsyncClient
from genserve.errors import ManifestMismatchError
from tests.engine.outputs import next_version
from tests.support import models, vision
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.refusals import refuses
from tests.support.released_package import NO_WARNINGS, ReleasedPackage
from tests.support.same_policy import assert_same_policy, perturb
from tests.support.wrappers import WRAPPERS, only_rank

pytestmark = pytest.mark.long(
    "genserve/client/weights/modules.py",
    "genserve/client/weights/sources.py",
    "genserve/client/weights/layout.py",
    "genserve/weights/checkpoint/index.py",
    "genserve/worker/update",
    "tests/peft",
    "tests/support/released_package.py",
    "tests/support/same_policy.py",
    "tests/support/wrappers.py",
    "tests/support/vision.py",
    "tests/support/models.py",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model: how to make a checkpoint, and which class of transformers loads it. `adapted`: how PEFT is told
    what to adapt."""

    make: Callable[[Path], Path]
    auto: Any
    adapted: dict[str, Any]


ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
KINDS = {
    "tied": Kind(models.tiny_qwen3, AutoModelForCausalLM, {"target_modules": "all-linear"}),
    "experts": Kind(
        models.tiny_qwen3_moe,
        AutoModelForCausalLM,
        ATTENTION | {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "images": Kind(vision.tiny_vlm, AutoModelForImageTextToText, ATTENTION),
}
FORMS = ("live", "merged", "unloaded", "saved")
"""As it is; with an adapter of PEFT that is merged into its weights; after merge_and_unload; from a file."""
SOME = ("plain", "compile", "ddp", "fsdp", "fsdp2", "checkpointing", "all of them")
CELLS = [
    pytest.param(*cell, id=" ".join(cell))
    for cell in ((kind, wrapper, form) for kind in KINDS for wrapper in SOME for form in FORMS)
    if cell[2] != "unloaded" or cell[1] == "plain"  # it is the same model then
]


RENAMED = {("saved", "all of them")}
"""transformers saves compiled layers under names that the refusal of such a file tells to rewrite."""


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon on a checkpoint in float32, and the model of it as a trainer loads it."""

    client: AsyncClient
    model: Any
    kind: Kind


Serving = Callable[[str], Awaitable[Served]]


@asynccontextmanager
async def _serving(kind: Kind, directory: Path) -> AsyncIterator[Served]:
    checkpoint = kind.make(directory / "checkpoint")
    flags = ["--model", str(checkpoint), "--dtype", "float32", *SMALL_ENGINE]
    process = DaemonProcess(flags, directory / "stderr")
    try:
        model = kind.auto.from_pretrained(checkpoint, dtype=torch.float32).eval()  # while the daemon starts
        process.wait_serving()
        async with AsyncClient(process.address) as client:
            yield Served(client, model, kind)
    finally:
        process.end()


@pytest.fixture(scope="module")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    """Serves a kind until another one is asked for. (A fixture with parameters would do so for each test: pytest tells
    them by their places in the list of the cells.)"""
    found: dict[str, Served] = {}

    async def of(name: str) -> Served:
        if name not in found:
            await last.aclose()
            found.clear()
            found[name] = await last.enter_async_context(_serving(KINDS[name], tmp_path_factory.mktemp(name)))
        return found[name]

    with only_rank():
        async with AsyncExitStack() as last:
            yield of


def _adapted(model: Any, kind: Kind) -> Any:
    """The model with an adapter that changes what it computes."""
    peft = ReleasedPackage("peft").imported()
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **kind.adapted))
    return tuned.eval()


def _saved(model: Any, directory: Path) -> Path:
    """Where transformers has saved the model. It takes no DTensors, of which the only rank has the whole."""
    tensors = {name: getattr(each, "to_local", lambda each=each: each)() for name, each in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=tensors)
    return directory


@NO_WARNINGS
@pytest.mark.parametrize(("kind", "wrapper", "form"), CELLS)
async def test_what_is_served_computes_what_the_pushed_model_does(
    serving: Serving, kind: str, wrapper: str, form: str, tmp_path: Path
) -> None:
    """Its greedy tokens and their log-probabilities, by transformers' own forward with an adapter that is not merged.
    Each case pushes other weights than the one before."""
    served = await serving(kind)
    model = copy.deepcopy(served.model)
    perturb(model, seed=SOME.index(wrapper) * len(FORMS) + FORMS.index(form))
    if form in ("merged", "unloaded"):
        model = _adapted(model, served.kind)
    same = copy.deepcopy(model)
    if form == "merged":
        model.merge_adapter()
    elif form == "unloaded":
        model = model.merge_and_unload()
    weights: Any = WRAPPERS[wrapper](model)
    if form == "saved":
        weights = _saved(model, tmp_path)
    options: Any = {"rename": lambda name: name.replace("_orig_mod.", "")} if (form, wrapper) in RENAMED else {}
    await served.client.push_weights(weights, version=await next_version(served.client), **options)
    await assert_same_policy(served.client, same)


async def test_what_sees_images_is_pushed_like_the_model_that_was_saved(serving: Serving, tmp_path: Path) -> None:
    """No text reaches it, so its tensors in the workers are compared; each differs from what was there before."""
    served = await serving("images")
    model = copy.deepcopy(served.model)
    perturb(model, seed=100)

    async def pushed(weights: Any) -> dict[tuple[str, str], str]:
        await served.client.push_weights(weights, version=await next_version(served.client))
        digests = (await served.client.get_weights(include_digests=True)).digests
        return {place: digest for place, digest in digests.items() if "vision" in place[1] or "connector" in place[1]}

    before, live = await pushed(served.model), await pushed(model)
    assert live and all(live[place] != before[place] for place in live)
    assert await pushed(served.model) == before
    assert await pushed(_saved(model, tmp_path)) == live


async def test_the_dict_of_a_compiled_model_is_refused_in_one_sentence(serving: Serving) -> None:
    """Which says what to push instead."""
    served = await serving("images")
    tensors = torch.compile(copy.deepcopy(served.model)).state_dict()
    with refuses(ManifestMismatchError, field="header.manifest", says="with '_orig_mod.': pass rename="):
        await served.client.push_weights(dict(tensors), version=await next_version(served.client))
