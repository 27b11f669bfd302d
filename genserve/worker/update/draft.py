"""The model that drafts tokens where its weights are in the served checkpoint: layers for multi-token prediction (MTP).

vLLM holds it beside the served model, with a loader of its own, and shares the served model's embeddings and head with
it. A push of a whole checkpoint has its weights, so it is exchanged together with the served model. EAGLE heads and
draft models have checkpoints of their own, which no push has: they stay as they are, and engine.refusals says so.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from genserve.worker.contract import drafts_with_served_checkpoint
from genserve.worker.model.audit import Constants
from genserve.worker.model.digests import weight_digests
from genserve.worker.model.tree import Holding, held_by, holdings, modules_by_name
from genserve.worker.update.beside import BesideUpdate
from genserve.worker.update.device import Device
from genserve.worker.update.shadow import Shadow

log = logging.getLogger(__name__)

PREFIX = "draft."
"""Of the names of its weights in digests, as vLLM has it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A model that drafts, the one it drafts for, and what vLLM has built it from."""

    model: nn.Module
    served: nn.Module
    config: VllmConfig
    model_config: ModelConfig


def draft_of(worker: Any) -> Draft | None:
    """What drafts in a worker of vLLM, if a push of the served checkpoint has its weights.

    internal: `get_draft_model` of vLLM's two model runners, and how each of them makes the configuration of it."""
    speculative, runner = worker.vllm_config.speculative_config, worker.model_runner
    found = getattr(runner, "get_draft_model", lambda: None)()
    if speculative is None or found is None or not drafts_with_served_checkpoint(worker.vllm_config):
        return None
    drafter = getattr(runner, "drafter", None)
    if drafter is not None:
        config = drafter._create_draft_vllm_config()
    else:
        config = speculative.apply_draft_overrides(worker.vllm_config)
    return Draft(found, runner.get_model(), config, speculative.draft_model_config)


class NoDraftWeightsError(Exception):
    """A version has no tensor for the model that drafts."""


class DraftShadow(Shadow):
    """A second model that drafts. It has embeddings and a head of its own while it is loaded, as vLLM's has: what is
    shared with the served model is exchanged with that."""

    def __init__(self, draft: Draft, place: torch.device, device: Device) -> None:
        self._live = draft.model
        self._shared_names = shared_names(draft)
        super().__init__(draft.model, draft.config, place, device, draft.model_config)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Holding]:
        """As of any shadow, but for what is shared: that is what it is live. Raises NoDraftWeightsError."""
        with disable_mtp_completeness_check():  # `Shadow` says what is missing
            prepared = super().load(tensors)
        own = {name: place for name, place in prepared.items() if not _is_within(name, self._shared_names)}
        live = holdings(self._live)
        return own | {name: place for name, place in live.items() if _is_within(name, self._shared_names)}

    def _expected(self) -> set[str]:
        return {name for name in super()._expected() if not _is_within(name, self._shared_names)}

    def _missing(self, expected: set[str], loaded: set[str]) -> list[str]:
        if expected and not expected & loaded:
            raise NoDraftWeightsError
        return super()._missing(expected, loaded)


class DraftUpdate(BesideUpdate):
    """Exchanges what drafts, built beside the live one: it is small, a layer or two. A version without weights for it
    leaves it as it is."""

    def __init__(self, draft: Draft, device: Device, place: torch.device) -> None:
        self._draft = draft
        self._shared_names = shared_names(draft)
        self._is_told = False
        self._constants: frozenset[str] = frozenset()
        super().__init__(draft.model, draft.config, device, place)

    def audit(self) -> Constants:
        """As of any update."""
        constants = super().audit()
        self._constants = constants.paths
        return constants

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """As of any update."""
        try:
            super().prepare(tensors, cancelled)
        except NoDraftWeightsError:
            if not self._is_told:
                self._is_told = True
                log.warning(
                    "pushes have no weights for the model that drafts (--speculative-config), which keeps those it has:"
                    " tokens stay right, but fewer drafts are accepted with every version"
                )

    def commit(self) -> None:
        """Does nothing for a version without weights for it."""
        if self._exchange is not None:
            super().commit()

    def digests(self) -> dict[str, str]:
        """As `draft_digests`."""
        return draft_digests(self._draft, self._constants)

    def _shadow_of(self, config: VllmConfig, place: torch.device) -> Shadow:
        return DraftShadow(self._draft, place, self._device)

    def _exchanged(self) -> dict[str, Holding]:
        return {name: each for name, each in super()._exchanged().items() if not _is_within(name, self._shared_names)}

    def let_go(self) -> None:
        """As `give_up`, but for the memory that the device keeps: another update gives that up."""
        self.discard()
        self._buffer.give_up()


def draft_update(worker: Any, device: Device, way: str) -> DraftUpdate | None:
    """For a worker of vLLM, if pushes have what drafts in it, and it can be exchanged. It is built on the host for the
    way `host`, else where it lives. One that cannot be exchanged costs speed and no correct token: it is told of, and
    left as it is. Raises torch.OutOfMemoryError."""
    draft = draft_of(worker)
    if draft is None:
        return None
    try:
        update = DraftUpdate(draft, device, torch.device("cpu") if way == "host" else worker.device)
        update.audit()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever vLLM's model raises
        log.warning("pushes leave the model that drafts (--speculative-config) as it is: %s", error)
        return None
    return update


class WithDraft:
    """An update of the served model, and the one of what drafts for it: both take a version, or neither does. In
    place, a commit that fails leaves the weights unknown, as it does without a draft."""

    def __init__(self, served: Any, draft: DraftUpdate) -> None:
        self._served = served
        self._draft = draft
        self.can_roll_back = served.can_roll_back
        self.take_back()  # each has taken the other's place: a push needs both at once

    def audit(self) -> Constants:
        """Of both; answers the served model's constants."""
        constants: Constants = self._served.audit()
        self._draft.audit()
        return constants

    def draft_failure(self) -> Exception | None:
        """Why what drafts cannot be exchanged, if it cannot."""
        try:
            self._draft.audit()
        except Exception as error:  # whatever vLLM's model raises
            return error
        return None

    def without_draft(self) -> Any:
        """The update of the served model alone."""
        self._draft.let_go()
        return self._served

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """Builds both from the same tensors, which are walked twice."""
        self._served.prepare(tensors, cancelled)
        self._draft.prepare(tensors, cancelled)

    def commit(self) -> None:
        """Of what drafts last: it is the smaller loss if that fails where nothing can be undone."""
        self._served.commit()
        self._draft.commit()

    def rollback(self) -> None:
        """Of both, also if the commit of the second one was not begun."""
        self._draft.rollback()
        self._served.rollback()

    def give_up(self) -> None:
        """Of both. What the device keeps is the served model's to give."""
        self._draft.let_go()
        self._served.give_up()

    def take_back(self) -> None:
        """Of both, at the same time."""
        self._served.take_back(self._draft.reserved)

    def discard(self) -> None:
        """Of both."""
        self._served.discard()
        self._draft.discard()

    def digests(self) -> dict[str, str]:
        """Of what drafts."""
        return self._draft.digests()


def draft_digests(draft: Draft, constants: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 (hex) of what drafts and is not the served model's, by a name that begins with `draft.`. `constants` as
    for `weight_digests`."""
    shared = shared_names(draft)
    found = weight_digests(draft.model, constants)
    return {f"{PREFIX}{name}": digest for name, digest in found.items() if not _is_within(name, shared)}


def shared_names(draft: Draft) -> frozenset[str]:
    """Names, in the model that drafts, of the modules and tensors that are the served model's as well."""
    served = {id(each) for each in held_by(draft.served)} | {id(module) for module in draft.served.modules()}
    modules = {name for name, module in modules_by_name(draft.model).items() if name and id(module) in served}
    return frozenset(modules | {name for name, place in holdings(draft.model).items() if id(place.value) in served})


def _is_within(name: str, shared: frozenset[str]) -> bool:
    """Whether a name is one of these, or of something that hangs on one."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in shared for end in range(1, len(parts) + 1))
