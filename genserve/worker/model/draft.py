"""The model that drafts tokens where its weights are in the served checkpoint: layers for multi-token prediction (MTP).

vLLM holds it beside the served model, with a loader of its own, and shares the served model's embeddings and head with
it. Owns which model that is, and which of it is the served model's; `update.draft` exchanges the rest.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.config import ModelConfig, VllmConfig

from genserve.worker.contract.vllm_settings import drafts_with_served_checkpoint
from genserve.worker.model.digests import Digesting, digesting
from genserve.worker.model.tree import held_by, holdings, modules_by_name

PREFIX = "draft."
"""The prefix of the names of its weights in digests, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model, the model it drafts for, and the configuration from which vLLM built it."""

    model: nn.Module
    served: nn.Module
    config: VllmConfig
    model_config: ModelConfig


def drafting_model(worker: Any) -> nn.Module | None:
    """The model that drafts in a worker of vLLM, wherever its weights come from; None if there is none.

    internal: `get_draft_model` of vLLM's two model runners."""
    return getattr(worker.model_runner, "get_draft_model", lambda: None)()


def draft_of(worker: Any) -> Draft | None:
    """The model that drafts in a worker of vLLM, if a push of the served checkpoint has its weights.

    internal: how each of vLLM's two model runners makes the configuration of it."""
    speculative, runner = worker.vllm_config.speculative_config, worker.model_runner
    found = drafting_model(worker)
    if speculative is None or found is None or not drafts_with_served_checkpoint(worker.vllm_config):
        return None
    drafter = getattr(runner, "drafter", None)
    if drafter is not None:
        config = drafter._create_draft_vllm_config()
    else:
        config = speculative.apply_draft_overrides(worker.vllm_config)
    return Draft(found, runner.get_model(), config, speculative.draft_model_config)


def draft_digests(draft: Draft, constants: Collection[str] = ()) -> Digesting:
    """Reads the drafting model's own weights, by names that begin with `draft.`. `constants` as for `digesting`."""
    shared = shared_names(draft)
    found = yield from digesting(draft.model, constants)
    return {f"{PREFIX}{name}": digest for name, digest in found.items() if not is_within(name, shared)}


def shared_names(draft: Draft) -> frozenset[str]:
    """Names, in the draft model, of the modules and tensors that it shares with the served model."""
    served = {id(each) for each in held_by(draft.served)} | {id(module) for module in draft.served.modules()}
    modules = {name for name, module in modules_by_name(draft.model).items() if name and id(module) in served}
    return frozenset(modules | {name for name, place in holdings(draft.model).items() if id(place.value) in served})


def is_within(name: str, shared: Collection[str]) -> bool:
    """Whether a name is one of `shared`, or of something that hangs on one."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in shared for end in range(1, len(parts) + 1))
