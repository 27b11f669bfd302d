"""What drafts beside a served model, with stand-ins for vLLM's models. Real ones: tests/engine/test_kinds.py."""

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.model.digests import whole
from genserve.worker.model.draft import Draft, draft_digests, shared_names
from genserve.worker.update import draft as drafting
from genserve.worker.update.device import Device
from genserve.worker.update.draft import WithDraft, draft_update

HOST = Device(torch.device("cpu"))


class Served(nn.Module):
    """An embedding, a head, and the table of positions that vLLM gives to all layers alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4)
        self.table = torch.ones(3)


class Drafting(nn.Module):
    """A layer of its own, and the served model's embedding and head."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self.embed = served.embed
        self.head = served.head
        self.layer = nn.Linear(2, 2)
        self.layer.table = served.table


class Recorded:
    """An update that writes down what is asked of it, and may fail."""

    can_roll_back = True

    def __init__(self, name: str, said: list[str], fails: str = "") -> None:
        self._name, self._said, self._fails = name, said, fails

    def __getattr__(self, asked: str) -> Any:
        def answer(*_: Any) -> None:
            self._said.append(f"{self._name} {asked}")
            if asked == self._fails:
                raise RuntimeError(asked)

        return answer


def both(fails: str = "") -> tuple[WithDraft, list[str]]:
    """An update of two, and what they were asked; the one that drafts fails at something."""
    said: list[str] = []
    return WithDraft(Recorded("served", said), Recorded("draft", said, fails)), said  # type: ignore[arg-type]


def draft_of_small_models() -> Draft:
    """Without configurations."""
    served = Served()
    nothing: Any = None
    return Draft(Drafting(served), served, nothing, nothing)


def test_what_is_shared_is_the_served_models() -> None:
    """Modules and tensors; digests tell of the rest, by a prefix."""
    draft = draft_of_small_models()
    assert {"embed", "head", "layer.table"} <= shared_names(draft)
    assert "layer" not in shared_names(draft)
    assert whole(draft_digests(draft)).keys() == {"draft.layer.weight", "draft.layer.bias"}


def test_a_commit_that_fails_in_what_drafts_is_undone_in_both() -> None:
    """Neither takes a version that the other one does not."""
    update, said = both(fails="commit")
    update.prepare([], Event())
    with pytest.raises(RuntimeError):
        update.commit()
    update.rollback()
    assert said[-4:] == ["served commit", "draft commit", "draft rollback", "served rollback"]


def test_what_the_device_keeps_is_given_up_last() -> None:
    """Nothing of it may be in use then: what drafts has let go of its part before."""
    update, said = both()
    update.release_memory()
    assert said == ["draft let_go", "served release_memory"]


def test_what_cannot_be_exchanged_is_left_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs speed and no correct token, so the daemon starts. Memory that is missing is not taken for that."""

    def refuse(*_: Any) -> None:
        raise ValueError("layer.kernel is hidden")

    worker: Any = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(drafting, "draft_of", lambda _: draft_of_small_models())
    monkeypatch.setattr(drafting, "DraftUpdate", refuse)
    assert draft_update(worker, HOST, "beside") is None
    assert "layer.kernel is hidden" in caplog.text

    def exhaust(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(drafting, "DraftUpdate", exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        draft_update(worker, HOST, "beside")
