"""What the methods of the extension have in common."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from genserve.worker.contract.calls import Step, WeightWorker
from genserve.worker.extension import WeightExchangeExtension

# The methods after which the same weights and adapters are live, whatever happens meanwhile.
KEEPING = {f"genserve_{call}" for call in ("attach", "unused", "ping", "fetch", "fetched", "prepared", "digests")}
METHODS = {name for name in vars(WeightWorker) if name.startswith("genserve_")}


def test_every_call_that_keeps_the_weights_is_one_of_a_worker() -> None:
    """All others must forget what was read."""
    assert KEEPING < METHODS


@pytest.mark.parametrize("name", sorted(METHODS - KEEPING))
def test_a_call_that_changes_weights_forgets_what_was_read_of_them(name: str) -> None:
    """Also where it fails. Digests of another version, or of weights that a fault has changed, are told to nobody."""
    forgotten: list[str] = []
    digests = SimpleNamespace(forget=lambda: forgotten.append(name))
    worker = SimpleNamespace(_genserve=SimpleNamespace(rank="r", live_digests=digests, after_wake_up=lambda: None))
    with suppress(TypeError):  # it is not the call's message
        getattr(WeightExchangeExtension, name)(worker, Step("n").to_wire())
    assert forgotten
