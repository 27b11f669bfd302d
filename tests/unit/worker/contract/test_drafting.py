"""Which weights that draft are pushed."""

from types import SimpleNamespace

import pytest

from genserve.worker.contract.drafting import drafts_with_served_checkpoint


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
