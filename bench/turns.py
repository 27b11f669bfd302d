"""The order in which what is compared takes its turns."""

from collections.abc import Iterable, Iterator


def turns(peers: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Numbers of rounds, and the peers of each. Round 0 warms up: its figures are not kept. Every second round goes
    backwards, so that no peer is always the one after a peer that tires the machine."""
    forwards = list(peers)
    for number in range(rounds + 1):
        for peer in forwards if number % 2 == 0 else forwards[::-1]:
            yield number, peer
