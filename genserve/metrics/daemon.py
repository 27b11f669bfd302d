"""The daemon's own series: what it knows of its engine, its pushes and its pauses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from genserve.control.conditions import Phase
from genserve.engine.staleness import CLASSES
from genserve.engine.types import Load
from genserve.errors import REASONS
from genserve.metrics.exposition import Family, counter, counters, gauge, gauges, histogram, histograms
from genserve.rpc.server import ServerParts
from genserve.weights.push.types import PushKind

_NO_PUSHES = {(kind, outcome): 0 for kind in PushKind for outcome in ("APPLIED", "STAGED", "PREPARED", *REASONS)}
"""All series are there from the beginning. `increase` does not see the first push of one that begins with it."""


class MeasuredEngine(Protocol):
    """Figures that an engine reports beside its protocol."""

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since it last answered; None without a heartbeat."""

    def served_tokens(self) -> Sequence[int]:
        """Tokens of sequences that have ended, by class of `staleness`."""

    def load(self) -> Load:
        """The present load."""


@dataclass(frozen=True, slots=True)
class DaemonSeries:
    """Reads the numbers where they are."""

    engine: MeasuredEngine
    parts: ServerParts

    def read(self) -> Iterable[Family]:
        """The families. Call on the event loop."""
        yield from self._state()
        yield from self._load()
        yield from self._pushes()
        yield from self._memory()

    def _state(self) -> Iterable[Family]:
        board = self.parts.board
        state, standstill = board.state(), self.parts.pauses.standstill
        yield gauge("genserve_weight_version", "Version of the weights served.", state.weight_version)
        yield gauge("genserve_serving", "1 if health says SERVING.", board.is_serving)
        phases = [([each.value], each is state.phase) for each in Phase]
        yield gauges("genserve_phase", "1 for the phase that clients see, 0 for the others.", ["phase"], phases)
        age_s = self.engine.heartbeat_age_s
        if age_s is not None:
            yield gauge("genserve_heartbeat_age_seconds", "Seconds since the engine last answered.", age_s)
        frontends = self.parts.frontends
        counts = (0, 0) if frontends is None else (len(frontends.live_ports()), frontends.num_down())
        states = [(["serving"], counts[0]), (["down"], counts[1])]
        yield gauges("genserve_frontends", "Front ends that serve, and those that stay down.", ["state"], states)
        yield gauge("genserve_pause_leases", "Leases that keep the engine paused.", len(state.pauses))
        yield gauge(
            "genserve_paused_seconds", "For how long generation has stood still; 0 while it runs.", standstill.seconds
        )
        yield histogram(
            "genserve_pause_seconds",
            "Lengths of the pauses that have ended, for pushes and for leases.",
            standstill.lengths,
        )

    def _load(self) -> Iterable[Family]:
        load = self.engine.load()
        yield gauges(
            "genserve_sequences",
            "Sequences that are admitted and unfinished.",
            ["state"],
            [(["running"], load.running), (["waiting"], load.waiting)],
        )
        yield counters(
            "genserve_served_tokens",
            "Output tokens of sequences that have ended, by how many versions they were behind the served one then.",
            ["versions_behind"],
            [([name], count) for name, count in zip(CLASSES, self.engine.served_tokens(), strict=True)],
        )

    def _pushes(self) -> Iterable[Family]:
        measures, live = self.parts.pushes.measures, self.parts.pushes.live
        yield counter("genserve_push_received_bytes", "Bytes of pushes that were new.", live.received_bytes)
        yield counters(
            "genserve_pushes",
            "Pushes that the daemon was done with, by the state they were left in or the reason of their error.",
            ["kind", "outcome"],
            [((kind.value, outcome), count) for (kind, outcome), count in {**_NO_PUSHES, **measures.outcomes}.items()],
        )
        yield counter(
            "genserve_rollbacks",
            "Pushes that failed, after which the version before was served again.",
            measures.num_rolled_back,
        )
        yield histograms(
            "genserve_push_step_seconds", "Seconds of each step of applied pushes.", "step", measures.steps
        )
        yield histogram(
            "genserve_push_paused_seconds", "Seconds that an applied push stopped generation.", measures.paused
        )
        yield gauge("genserve_open_pushes", "Pushes with bytes in the daemon.", len(live))
        keeper = self.parts.keeper
        kept_version, num_failed = (0, 0) if keeper is None else (keeper.weight_version, keeper.num_failed)
        yield gauge("genserve_kept_version", "Version of the weights in --keep-committed; 0 = none.", kept_version)
        yield counter("genserve_keep_failures", "Versions that could not be written to --keep-committed.", num_failed)

    def _memory(self) -> Iterable[Family]:
        staged_bytes = sum(push.size_bytes for push in self.parts.pushes.live.values())
        kinds = {
            "staged": staged_bytes,
            "resident": self.parts.resident.held_bytes,
            "spare": self.parts.resident.spare_bytes,
        }
        yield gauges(
            "genserve_arena_bytes",
            "Memory for weights: staged by pushes, resident of the served version, spare for the next push.",
            ["use"],
            [([use], size_bytes) for use, size_bytes in kinds.items()],
        )
        yield gauge(
            "genserve_staging_limit_bytes", "Limit of staged and resident bytes together.", self.parts.max_staging_bytes
        )
