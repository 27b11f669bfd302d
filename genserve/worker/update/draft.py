"""Exchanges a draft model together with the model that it drafts for.

A push of a complete checkpoint has the weights of its layers for multi-token prediction (MTP). EAGLE heads and draft
models have their own checkpoints, which no push contains: they do not change, and `engine.vllm.start.refusals` warns
about this.
"""

import logging
from collections.abc import Iterable
from threading import Event
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from genserve.worker.model.audit import Constants
from genserve.worker.model.digests import Digesting
from genserve.worker.model.draft import Draft, draft_digests, draft_of, is_within, shared_names
from genserve.worker.model.tree import Holding, holdings
from genserve.worker.update.beside import BesideUpdate
from genserve.worker.update.device import Device
from genserve.worker.update.protocol import ServedUpdate
from genserve.worker.update.shadow import Shadow
from genserve.worker.update.structure import Structure

log = logging.getLogger(__name__)


class NoDraftWeightsError(Exception):
    """A version has no tensor for the model that drafts. The daemon refuses such a push where it knows the names of the
    checkpoint's tensors, which it reads from safetensors files; with another checkpoint it does not know them."""


class DraftShadow(Shadow):
    """A second draft model. It has its own embeddings and head while it is loaded, as vLLM's does: what it shares with
    the served model is exchanged with that model."""

    def __init__(self, draft: Draft, place: torch.device, device: Device) -> None:
        self._live = draft.model
        self._shared_names = shared_names(draft)
        structure = Structure.build(draft.model, draft.config, place, draft.model_config)
        super().__init__(structure, place, device.loading)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, in_pause: bool = False) -> dict[str, Holding]:
        """As of any shadow; what is shared with the served model is returned as it is live. Raises
        NoDraftWeightsError."""
        with disable_mtp_completeness_check():  # `Shadow` says what is missing
            prepared = super().load(tensors, in_pause=in_pause)
        own = {name: place for name, place in prepared.items() if not is_within(name, self._shared_names)}
        live = holdings(self._live)
        return own | {name: place for name, place in live.items() if is_within(name, self._shared_names)}

    def _expected(self) -> set[str]:
        return {name for name in super()._expected() if not is_within(name, self._shared_names)}

    def _missing(self, expected: set[str], loaded: set[str]) -> list[str]:
        if expected and not expected & loaded:
            raise NoDraftWeightsError
        return super()._missing(expected, loaded)


class DraftUpdate(BesideUpdate):
    """Exchanges the model that drafts, built beside the live one: it is small, a layer or two. A version without
    weights for it leaves it as it is."""

    def __init__(self, draft: Draft, device: Device, place: torch.device) -> None:
        self._draft = draft
        self._shared_names = shared_names(draft)
        self._has_warned = False
        self._constants: frozenset[str] = frozenset()
        super().__init__(draft.model, draft.config, device, place)

    def audit(self) -> Constants:
        """See `Update.audit`."""
        constants = super().audit()
        self._constants = constants.paths
        return constants

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """See `Update.prepare`."""
        try:
            super().prepare(tensors, cancelled)
        except NoDraftWeightsError:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "pushes have no weights for the draft model (--speculative-config), which keeps its own: tokens "
                    "stay right, but fewer drafts are accepted with every version"
                )

    def commit(self) -> None:
        """Does nothing for a version without weights for it."""
        if self._exchange is not None:
            super().commit()

    def draft_digests(self) -> Digesting:
        """As of any update."""
        return draft_digests(self._draft, self._constants)

    def let_go(self) -> None:
        """As `release_memory`, but for the memory that the device keeps: the served model's update gives that up."""
        self.discard()
        self._buffer.release_memory()

    def _shadow_of(self, config: VllmConfig, place: torch.device) -> Shadow:
        return DraftShadow(self._draft, place, self._device)

    def _exchanged(self) -> dict[str, Holding]:
        return {name: each for name, each in super()._exchanged().items() if not is_within(name, self._shared_names)}


def draft_update(worker: Any, device: Device, way: str) -> DraftUpdate | None:
    """For a worker of vLLM, if pushes have what drafts in it, and it can be exchanged. It is built on the CPU for the
    way `host`, else where it lives. One that cannot be exchanged costs speed and no correct token: it is left as it is,
    with a warning. Raises torch.OutOfMemoryError."""
    draft = draft_of(worker)
    if draft is None:
        return None
    try:
        update = DraftUpdate(draft, device, torch.device("cpu") if way == "host" else worker.device)
        update.audit()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever vLLM's model raises
        warn_of(error)
        return None
    return update


def warn_of(error: Exception) -> None:
    """Says why what drafts is not exchanged."""
    log.warning("pushes do not change the draft model (--speculative-config): %s", error)


class WithDraft:
    """An update of the served model, and that of its draft model: both take a version, or neither does. In place, a
    commit that fails leaves the weights unknown, as without a draft model."""

    def __init__(self, served: ServedUpdate, draft: DraftUpdate) -> None:
        self._served = served
        self._draft = draft
        self.can_roll_back = served.can_roll_back

    def audit(self) -> Constants:
        """Audits both. Returns the served model's constants."""
        constants = self._served.audit()
        self._draft.audit()
        return constants

    def prepare(self, tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Event) -> None:
        """Builds both from the same tensors, which are iterated twice."""
        self._served.prepare(tensors, cancelled)
        self._draft.prepare(tensors, cancelled)

    def commit(self) -> None:
        """The draft model last: it is the smaller loss if its commit fails where nothing can be undone."""
        self._served.commit()
        self._draft.commit()

    def rollback(self) -> None:
        """Undoes both, even if the second commit did not begin."""
        self._draft.rollback()
        self._served.rollback()

    def release_memory(self) -> None:
        """Gives up both. The served model's update frees the reserved memory."""
        self._draft.let_go()
        self._served.release_memory()

    def reserve_memory(self) -> None:
        """Of both, at the same time: a push needs both at once."""
        self._served.reserve_memory(self._draft.reserved)

    def discard(self) -> None:
        """Discards both."""
        self._served.discard()
        self._draft.discard()

    def draft_digests(self) -> Digesting:
        """The digests of the draft model."""
        return self._draft.draft_digests()
