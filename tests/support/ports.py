"""Ports on which something may listen later, or again."""

import itertools
import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
# In another order in each process, and none twice.
_candidates = itertools.cycle(random.SystemRandom().sample(_BELOW_EPHEMERAL, len(_BELOW_EPHEMERAL)))


def free_port() -> int:
    """A port of 127.0.0.1 that the kernel gives to nobody else. One that it has chosen itself it gives away again as
    soon as nobody listens there."""
    while True:
        port = next(_candidates)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
