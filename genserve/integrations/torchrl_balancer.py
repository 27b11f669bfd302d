"""torchrl's LoadBalancer over the replicas of a fleet: its names and its answers, with the policies of a router."""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

from genserve.client.fleet import FleetReplica, Replicas
from genserve.errors import NoReplicaError
from genserve.routing.chain import Chain, why_none
from genserve.routing.names import make_chain, parse_policies
from genserve.routing.prefix_blocks import BYTES_PER_BLOCK, TOKENS_PER_BLOCK, blocks_of_text, blocks_of_tokens
from genserve.routing.replica import Load, Replica, ReplicaState, Request

Strategy: TypeAlias = Literal["prefix-aware", "requests", "kv-cache", "round-robin"]
"""torchrl's strategies, which genserve's policies are named after."""

_STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)
_DEFAULT: Final[tuple[Strategy, ...]] = ("prefix-aware", "requests")
_BYTES_PER_TOKEN: Final = BYTES_PER_BLOCK // TOKENS_PER_BLOCK


class Fleet(Protocol):
    """The fleet that a balancer chooses from."""

    def replicas(self) -> Replicas:
        """The replicas as they are now."""


class LoadBalancer:
    """Chooses a replica for a caller who passes it as `actor_index`. Other requests go to the router, which chooses by
    policies of its own (`genserve route --policy`).

    Strategies are tried in order until one decides: "prefix-aware" decides where it has sent the beginning of the
    prompt before, and the others always do, so what follows them is never asked. "requests" follows a "prefix-aware"
    that is the last. `prefix_length`: the fewest tokens that two prompts must share. `overload_threshold`: see
    `PrefixAware`. Only replicas that are ready at the version of the fleet are chosen.
    """

    def __init__(
        self,
        actors: Fleet,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
    ) -> None:
        names = _DEFAULT if strategy is None else (strategy,) if isinstance(strategy, str) else tuple(strategy)
        unknown = [name for name in names if name not in _STRATEGIES]
        if unknown or not names:
            raise ValueError(f"strategies are {', '.join(_STRATEGIES)}; given: {', '.join(unknown) or 'none'}")
        if prefix_length < 1:
            raise ValueError(f"prefix_length must be at least 1, is {prefix_length}")
        self.actors = actors
        self.strategies = list(names)
        self.strategy = self.strategies[0]
        self.prefix_length = prefix_length
        self.overload_threshold = overload_threshold
        self._chain = _chain(names, overload_threshold)

    def select_actor(
        self, prompt: str | Sequence[int] | None = None, request_context: Mapping[str, Any] | None = None
    ) -> int:
        """The index of a replica among those that the engine lists now. `request_context` has no effect, as in torchrl.
        Raises NoReplicaError if none may serve a request."""
        listed = self.actors.replicas()
        request = Request(prefix_blocks=self._blocks(prompt))
        replicas = [_routed(each) for each in listed.replicas]
        decision = self._chain.route(request, replicas, listed.weight_version)
        if decision is None:
            raise NoReplicaError(why_none(request, replicas, listed.weight_version))
        chosen = decision.candidates[0]
        self._chain.sent(request, chosen)
        return replicas.index(chosen)

    def get_stats(self) -> dict[str, Any]:
        """torchrl's statistics, and under `decisions` how many requests each policy has decided. `pending_requests`
        counts sequences that run or wait, whoever sent them."""
        replicas = [_routed(each) for each in self.actors.replicas().replicas]
        num_round_robin = self._chain.num_decided.get("round-robin", 0)
        return {
            "strategies": self.strategies,
            "primary_strategy": self.strategy,
            "num_actors": len(replicas),
            "prefix_length": self.prefix_length,
            "overload_threshold": self.overload_threshold,
            "round_robin_index": num_round_robin % len(replicas) if replicas else 0,
            "actor_stats": [
                {"actor_index": index, "pending_requests": each.outstanding, "cache_usage": each.load.kv_usage}
                for index, each in enumerate(replicas)
            ],
            "decisions": dict(self._chain.num_decided),
        }

    def _blocks(self, prompt: str | Sequence[int] | None) -> tuple[bytes, ...]:
        if prompt is None:
            return ()
        if isinstance(prompt, str):
            return blocks_of_text(prompt, block=self.prefix_length * _BYTES_PER_TOKEN)
        return blocks_of_tokens(prompt, block=self.prefix_length)


def _chain(names: Sequence[str], overload_threshold: float) -> Chain:
    """The chain of the strategies that can be asked: torchrl accepts more after one that always decides, and
    repetitions."""
    asked = list(dict.fromkeys(names))
    deciding = [position for position, name in enumerate(asked) if name != "prefix-aware"]
    asked = asked[: deciding[0] + 1] if deciding else asked
    return make_chain(parse_policies(",".join(asked)), random.Random(), time.monotonic, overload_threshold)


def _routed(replica: FleetReplica) -> Replica:
    """The replica as a policy knows it. The router's requests are in its report, or newer than that."""
    load = Load(inflight_at_report=replica.inflight)
    if replica.load is not None:
        told = replica.load
        load = Load(told.running, told.waiting, told.kv_usage, told.tokens_per_second, replica.inflight)
    return Replica(
        replica_id=replica.address,
        address=replica.address,
        instance_id="" if replica.engine is None else replica.engine.instance_id,
        state=ReplicaState(replica.state),
        weight_version=0 if replica.engine is None else replica.engine.weight_version,
        max_num_seqs=max(replica.max_num_seqs, 1),
        load=load,
        inflight=replica.inflight,
    )
