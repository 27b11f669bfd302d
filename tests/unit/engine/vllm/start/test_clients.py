"""How many clients an engine has, and which of them is the daemon."""

import pytest

from genserve.engine.vllm.start.clients import ALONE, Clients


def test_the_daemon_is_one_of_the_clients() -> None:
    """A number outside of them would leave the engine without an owner."""
    assert (ALONE.count, ALONE.daemon_index) == (1, 0)
    assert Clients(3, 2).daemon_index == 2
    for count, index in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"one of {count} clients"):
            Clients(count, index)
