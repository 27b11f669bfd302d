"""Policies in order: the first that decides wins. Versions come before all of them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from genserve.routing.policies import Policy
from genserve.routing.replica import Replica, ReplicaState, Request

_MAX_NAMED: Final = 4
"""An error's message has 600 bytes on the wire."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The replicas that a policy chose, best first, and the policy's name."""

    policy: str
    candidates: tuple[Replica, ...]


class Chain:
    """Tries policies in order. The last one always decides, and none before it does, so that each can be reached."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        decides = [policy.always_decides for policy in policies]
        if not policies or decides != [False] * (len(policies) - 1) + [True]:
            names = ", ".join(policy.name for policy in policies)
            raise ValueError(f"the last policy alone must decide about every request, of: {names}")
        self._policies = tuple(policies)
        self._num_decided = dict.fromkeys((policy.name for policy in policies), 0)

    def route(
        self,
        request: Request,
        replicas: Iterable[Replica],
        committed_version: int,
        tried: Collection[str] = (),
    ) -> Decision | None:
        """Returns where the request can go, or None if no replica may serve it (`why_none` says why).

        `tried`: instance ids of replicas that have failed for this request. The sender tries the candidates in order
        and calls `sent` with the one that it sends the request to.
        """
        ready = eligible(request, replicas, committed_version)
        if tried:
            ready = [replica for replica in ready if replica.instance_id not in tried]
        if not ready:
            return None
        for policy in self._policies:
            candidates = policy.order(request, ready)
            if candidates:
                self._num_decided[policy.name] += 1
                return Decision(policy.name, candidates)
        raise RuntimeError(f"{self._policies[-1].name} did not decide")

    def sent(self, request: Request, replica: Replica) -> None:
        """To be called when the request is handed to a replica, before its answer: what follows it can then follow it
        there."""
        for policy in self._policies:
            policy.sent(request, replica)

    @property
    def num_decided(self) -> Mapping[str, int]:
        """How many requests each policy has decided, in order of the policies."""
        return MappingProxyType(self._num_decided)


def eligible(request: Request, replicas: Iterable[Replica], committed_version: int) -> list[Replica]:
    """The replicas that may serve a request: READY, not behind the committed version nor behind the request's own, and
    not known to lack its adapter."""
    version = _least_version(request, committed_version)
    ready = ReplicaState.READY  # a local name: this runs for every replica and request
    found = [replica for replica in replicas if replica.state is ready and replica.weight_version >= version]
    if request.lora_name:
        found = [replica for replica in found if replica.lora_names is None or request.lora_name in replica.lora_names]
    return found


def why_none(request: Request, replicas: Iterable[Replica], committed_version: int) -> str:
    """Why no replica may serve a request, for an error's message: "no replica is ready at version 7: 2 syncing, 1 at
    version 6"."""
    version = _least_version(request, committed_version)
    counts: Counter[str] = Counter()
    for replica in replicas:
        if replica.state is not ReplicaState.READY:
            counts[replica.state.value] += 1
        elif replica.weight_version < version:
            counts[f"at version {replica.weight_version}"] += 1
        elif request.lora_name and replica.lora_names is not None and request.lora_name not in replica.lora_names:
            counts[f"without adapter {request.lora_name!r}"] += 1
        else:
            counts["tried in vain"] += 1
    found = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    return f"no replica is ready at version {version}: {found if found else 'the fleet is empty'}"


def _least_version(request: Request, committed_version: int) -> int:
    asked = request.min_weight_version
    return committed_version if asked is None else max(asked, committed_version)


def with_reasons(why: str, reasons: Mapping[str, str]) -> str:
    """`why` none may, and behind it why each replica is not ready. `reasons`: by addresses, "" = it is."""
    told = [f"{address}: {reason}" for address, reason in sorted(reasons.items()) if reason]
    if not told:
        return why
    more = f"; and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
    return f"{why} ({'; '.join(told[:_MAX_NAMED])}{more})"
