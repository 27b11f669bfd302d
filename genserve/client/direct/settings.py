"""How a client calls the replicas of a fleet itself."""

import reprlib
from dataclasses import dataclass
from typing import Final

from genserve.errors import InvalidFieldError
from genserve.routing.names import DIRECT_POLICIES, parse_policies
from genserve.routing.prefix_aware import OVERLOAD_THRESHOLD
from genserve.settings.config import MAX_TIMEOUT_S
from genserve.transport.fields import is_seconds
from genserve.wire.bounds import MIN_WATCH_INTERVAL_S

MAX_REPORT_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Direct:
    """The settings of `AsyncClient(router, direct=Direct(...))`. Times are in seconds.

    `policies`: as `genserve route --policy`. `overload_threshold`: as `--overload-threshold`. `report_interval_s`: how
    often the router tells the loads of the replicas. `silence_s`: after so long without a word of the router it is
    called again, and a replica that the router has not reached for so long is lost. `keep_s`: how long the replicas
    that were told last are used while the router does not answer. `wait_ready_s`: how long a request waits for a
    replica that may serve it. `connect_timeout_s`: how long a replica may take to answer the first call.
    """

    policies: str = DIRECT_POLICIES
    overload_threshold: float = OVERLOAD_THRESHOLD
    report_interval_s: float = 0.25
    silence_s: float = 5.0
    keep_s: float = 30.0
    wait_ready_s: float = 60.0
    connect_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Raises InvalidFieldError, which names the field."""
        if not isinstance(self.policies, str):
            raise InvalidFieldError.of("direct.policies", f"must be names with commas between, is {self.policies!r}")
        try:
            parse_policies(self.policies)
        except ValueError as error:
            raise InvalidFieldError.of("direct.policies", str(error)) from None
        _check_within("overload_threshold", self.overload_threshold, 1.0, 1e9)
        _check_within("report_interval_s", self.report_interval_s, MIN_WATCH_INTERVAL_S, MAX_REPORT_INTERVAL_S)
        _check_within("silence_s", self.silence_s, 2 * self.report_interval_s, MAX_TIMEOUT_S)
        _check_within("keep_s", self.keep_s, self.silence_s, MAX_TIMEOUT_S)
        _check_within("wait_ready_s", self.wait_ready_s, 0.0, MAX_TIMEOUT_S)
        _check_within("connect_timeout_s", self.connect_timeout_s, 0.1, MAX_TIMEOUT_S)


def direct_settings(direct: object) -> Direct | None:
    """What a client was given as `direct`; None: it calls its target alone. Raises InvalidFieldError."""
    if isinstance(direct, Direct):
        return direct
    if not isinstance(direct, bool):
        raise InvalidFieldError.of("direct", f"must be True, False or a Direct, is {reprlib.repr(direct)}")
    return Direct() if direct else None


def _check_within(name: str, value: float, least: float, most: float) -> None:
    if not is_seconds(value) or not least <= value <= most:
        raise InvalidFieldError.of(f"direct.{name}", f"must be in [{least:g}, {most:g}], is {value!r}")
