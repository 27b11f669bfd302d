"""Ports on which something may listen later, or again."""

import itertools
import os
import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
# Those of pytest's processes are apart: where nobody listens for a moment, no other test's server does.
_number, _num_processes = (
    int(os.environ.get(name, default).removeprefix("gw"))
    for name, default in (("PYTEST_XDIST_WORKER", "gw0"), ("PYTEST_XDIST_WORKER_COUNT", "1"))
)
_own = _BELOW_EPHEMERAL[_number::_num_processes]
# In another order in each process, and none twice.
_candidates = itertools.cycle(random.SystemRandom().sample(_own, len(_own)))


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
