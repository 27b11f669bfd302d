"""Which replica passes a push on to which. Pure."""

from collections.abc import Sequence

from genserve.wire.bounds import MAX_PEERS


def sources(addresses: Sequence[str], fanout: int) -> dict[str, tuple[str, ...]]:
    """Where each replica but the first one fetches a push that the first one receives: from its parent, and if that
    fails from the parent's parent and so on.

    Replica i has the children i * fanout + 1 ... i * fanout + fanout: a chain for a fanout of 1, in which every replica
    sends one copy; a star if the fanout is the number of the others.
    """
    if fanout < 1:
        raise ValueError(f"fanout must be at least 1, is {fanout}")
    found: dict[str, tuple[str, ...]] = {}
    for index, address in enumerate(addresses[1:], 1):
        ancestors = []
        while index > 0:
            index = (index - 1) // fanout
            ancestors.append(addresses[index])
        found[address] = tuple(ancestors[: MAX_PEERS - 1]) + ((addresses[0],) if len(ancestors) >= MAX_PEERS else ())
    return found
