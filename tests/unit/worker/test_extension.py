"""What the methods of the extension have in common."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from genserve.worker.contract.calls import CHANGING, Step
from genserve.worker.extension import WeightExchangeExtension


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_a_call_that_changes_weights_forgets_what_was_read_of_them(name: str) -> None:
    """Also where it fails. Digests of another version, or of weights that a fault has changed, are told to nobody."""
    forgotten: list[str] = []
    digests = SimpleNamespace(forget=lambda: forgotten.append(name))
    worker = SimpleNamespace(_genserve=SimpleNamespace(rank="r", live_digests=digests, after_wake_up=lambda: None))
    with suppress(TypeError):  # it is not the call's message
        getattr(WeightExchangeExtension, name)(worker, Step("n").to_wire())
    assert forgotten
