"""A push to a fleet: the transfer, the preparation and the commits, until enough replicas serve it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import Final

from bench.fleet.model.calibration import Calibration
from bench.fleet.model.topology import NAIVE, Topology
from bench.fleet.model.transfer import Death, Transfer

_MAX_PUSHES: Final = 1000
_MARGIN: Final = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """`total_s`: until the last of the replicas that took it serves the new version. `copies`: bytes that left the
    trainer, in models. `kept_s`: how long the first replica waited, prepared, for the last one."""

    total_s: float
    copies: float
    skew_s: float
    num_taken: int
    kept_s: float = 0.0
    num_pushes: int = 1


def push(
    size_bytes: float,
    num_replicas: int,
    topology: Topology,
    calibration: Calibration,
    *,
    deaths: Sequence[Death] = (),
    min_replicas: int = 0,
    seed: int = 0,
) -> Outcome | float:
    """One push. A float if it failed: when the trainer is told."""
    if topology is NAIVE:
        calibration = replace(calibration, digest_bytes_per_s=inf)  # what is applied at once needs none
    transfer = Transfer(size_bytes, topology.sources(num_replicas), calibration, deaths)
    transfer.run()
    random = Random(seed)
    ready = sorted(host.ready_s for host in transfer.hosts if host.is_alive and host.ready_s is not None)
    copies = transfer.trainer.sent / size_bytes
    if topology is NAIVE:
        committed = [at_s + _exchange_s(calibration, random) for at_s in ready]
        return Outcome(max(committed) + calibration.latency_s, copies, max(committed) - min(committed), len(ready))
    needed = min_replicas or num_replicas
    died = [each for each in sorted(deaths, key=lambda each: each.at_s) if not transfer.hosts[each.index].is_alive]
    fatal = [each for number, each in enumerate(died) if each.index == 0 or number >= num_replicas - needed]
    if fatal:
        return fatal[0].at_s + (calibration.silence_s if fatal[0].with_host else 2 * calibration.latency_s)
    head_s = transfer.hosts[0].ready_s
    assert head_s is not None
    taken, decided_s = _taken(ready, needed, num_replicas - len(died), calibration)
    decided_s += calibration.latency_s
    committed = [
        decided_s + number * calibration.call_s + calibration.latency_s + _exchange_s(calibration, random)
        for number in range(taken)
    ]
    skew_s = max(committed) - min(committed)
    return Outcome(max(committed) + calibration.latency_s, copies, skew_s, taken, max(0.0, ready[taken - 1] - head_s))


def push_until_taken(
    size_bytes: float,
    num_replicas: int,
    topology: Topology,
    calibration: Calibration,
    *,
    deaths_per_hour: float,
    host_share: float = 0.5,
    spare: int = 0,
    seed: int = 0,
) -> Outcome:
    """Replicas die at random moments, each so often; the trainer repeats a push that fails, to those that are left.
    `spare`: how many replicas the router goes on without (0 = all or none)."""
    random = Random(seed)
    elapsed_s, copies = 0.0, 0.0
    for number in range(1, _MAX_PUSHES + 1):
        whole = push(size_bytes, num_replicas, topology, calibration)
        assert isinstance(whole, Outcome)
        limit_s = _MARGIN * whole.total_s + calibration.stall_s * _MARGIN  # what dies later dies after the push
        deaths = []
        for index in range(num_replicas):
            at_s = random.expovariate(deaths_per_hour / 3600) if deaths_per_hour else limit_s
            with_host = random.random() < host_share
            if at_s < limit_s:
                deaths.append(Death(index, at_s, with_host))
        outcome = push(
            size_bytes,
            num_replicas,
            topology,
            calibration,
            deaths=deaths,
            min_replicas=max(1, num_replicas - spare),
            seed=seed,
        )
        if isinstance(outcome, Outcome):
            return Outcome(
                elapsed_s + outcome.total_s,
                copies + outcome.copies,
                outcome.skew_s,
                outcome.num_taken,
                outcome.kept_s,
                number,
            )
        elapsed_s += outcome + calibration.retry_s
        copies += min(1.0, outcome * calibration.link / size_bytes)
        # Those that had died by then are out of the fleet.
        num_replicas = max(1, num_replicas - sum(death.at_s <= outcome for death in deaths))
    raise RuntimeError(f"{_MAX_PUSHES} pushes failed")


def _taken(ready: list[float], needed: int, num_alive: int, calibration: Calibration) -> tuple[int, float]:
    """How many take it, and when that is decided: if enough have it, no more than a moment is waited for the next."""
    taken = needed
    while taken < num_alive and ready[taken] - ready[taken - 1] <= calibration.straggler_s:
        taken += 1
    return taken, ready[taken - 1] + (calibration.straggler_s if taken < num_alive else 0.0)


def _exchange_s(calibration: Calibration, random: Random) -> float:
    return calibration.exchange_s + random.random() * calibration.exchange_spread_s
