"""The first policy that decides wins, among the replicas that may serve the request."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.chain import Chain, eligible, why_none
from genserve.routing.names import POLICY_NAMES, PolicyName, make_chain, parse_policies
from genserve.routing.replica import Replica, ReplicaState, Request
from tests.unit.routing.fleets import REQUESTS, UNTIMED, VERSION, asking, fleet, prompt, replica, replicas

STATES = st.lists(st.tuples(REQUESTS, replicas()), max_size=4)


class Scripted:
    """A policy that decides as it is told, and remembers what it was told of."""

    def __init__(self, name: str, *, always_decides: bool = False, decides: bool = False) -> None:
        self.name = name
        self.always_decides = always_decides
        self.decides = decides
        self.told: list[Replica] = []

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The last replica, or none."""
        return (ready[-1],) if self.decides or self.always_decides else ()

    def sent(self, request: Request, replica: Replica) -> None:
        """Remembers it."""
        self.told.append(replica)


@pytest.mark.parametrize("name", POLICY_NAMES)
@UNTIMED
@given(routed=STATES, committed=st.integers(VERSION - 1, VERSION + 1), seed=st.integers(0, 9))
def test_no_policy_names_a_replica_that_may_not_serve_the_request(
    name: PolicyName, routed: list[tuple[Request, list[Replica]]], committed: int, seed: int
) -> None:
    """For requests in sequence and a fleet in any state: READY, not behind, with the adapter, not twice. A request is
    routed if and only if there is such a replica."""
    chain = make_chain(parse_policies(name), Random(seed), lambda: 0.0)
    for request, members in routed:
        version = max(committed, request.min_weight_version or 0)
        usable = [
            each
            for each in members
            if each.state is ReplicaState.READY
            and each.weight_version >= version
            and (not request.lora_name or each.lora_names is None or request.lora_name in each.lora_names)
        ]
        decision = chain.route(request, members, committed)
        assert (decision is None) == (not usable)
        if decision is not None:
            assert decision.candidates and all(each in usable for each in decision.candidates)
            assert len(set(each.replica_id for each in decision.candidates)) == len(decision.candidates)
            chain.sent(request, decision.candidates[0])


@UNTIMED
@given(routed=STATES, seed=st.integers(0, 9))
def test_the_same_seed_gives_the_same_decisions(routed: list[tuple[Request, list[Replica]]], seed: int) -> None:
    """Nothing else is left to chance, nor to the order of a set."""

    def decisions() -> list[object]:
        chain = make_chain(parse_policies("session,prefix,requests"), Random(seed), lambda: 0.0)
        found = []
        for request, members in routed:
            found.append(chain.route(request, members, VERSION))
            if found[-1] is not None:
                chain.sent(request, found[-1].candidates[0])
        return [*found, dict(chain.num_decided)]

    assert decisions() == decisions()


def test_the_first_policy_that_decides_wins_and_is_counted() -> None:
    """All of them learn where the request went."""
    first, second = Scripted("first"), Scripted("second", decides=True)
    last = Scripted("last", always_decides=True)
    chain, members = Chain([first, second, last]), fleet(0, 0)
    decision = chain.route(Request(), members, VERSION)
    assert decision is not None and decision.policy == "second" and decision.candidates == (members[1],)
    second.decides = False
    decision = chain.route(Request(), members, VERSION)
    assert decision is not None and decision.policy == "last"
    assert dict(chain.num_decided) == {"first": 0, "second": 1, "last": 1}
    chain.sent(Request(), members[0])
    assert first.told == second.told == last.told == [members[0]]


def test_a_request_that_cannot_go_anywhere_is_no_decision() -> None:
    """Nobody is counted."""
    chain = Chain([Scripted("last", always_decides=True)])
    assert chain.route(Request(), [], VERSION) is None
    assert chain.route(Request(), fleet(0), VERSION + 1) is None
    assert dict(chain.num_decided) == {"last": 0}


def test_a_replica_that_was_tried_in_vain_is_not_named_again() -> None:
    """Not even the one that holds the session and the prompt."""
    chain, members = make_chain(parse_policies("session,prefix"), Random(1), lambda: 0.0), fleet(0, 0)
    request = asking(prompt(1, 4), "s1")
    chain.sent(request, members[0])
    named = [chain.route(request, members, VERSION, tried) for tried in ((), {"instance-000"})]
    assert [each and (each.policy, each.candidates) for each in named] == [
        ("session", (members[0],)),
        ("requests", (members[1],)),
    ]
    assert chain.route(request, members, VERSION, {"instance-000", "instance-001"}) is None


def test_a_replica_at_a_later_version_than_the_committed_one_may_serve() -> None:
    """It has committed a moment before the router heard of it; what is behind never may."""
    ahead, behind = replica(0, weight_version=VERSION + 1), replica(1, weight_version=VERSION - 1)
    assert eligible(Request(), [ahead, behind], VERSION) == [ahead]
    assert eligible(Request(min_weight_version=VERSION + 1), [ahead, replica(2)], VERSION) == [ahead]
    assert eligible(Request(min_weight_version=0), [behind], VERSION) == []


def test_a_replica_that_lacks_the_adapter_may_not_serve() -> None:
    """One whose adapters are not known may; requests without an adapter go to any."""
    has, lacks = replica(0, lora_names=frozenset({"x", "y"})), replica(1, lora_names=frozenset({"y"}))
    unknown = replica(2)
    assert eligible(Request(lora_name="x"), [has, lacks, unknown], VERSION) == [has, unknown]
    assert eligible(Request(), [has, lacks, unknown], VERSION) == [has, lacks, unknown]


def test_the_reason_why_no_replica_can_take_a_request_names_each_kind() -> None:
    """For the message of an error."""
    members = [
        replica(0, state=ReplicaState.SYNCING),
        replica(1, state=ReplicaState.SYNCING),
        replica(2, weight_version=6),
        replica(3, lora_names=frozenset()),
        replica(4),
    ]
    assert why_none(Request(lora_name="x"), members, VERSION) == (
        "no replica is ready at version 7: 1 at version 6, 2 syncing, 1 tried in vain, 1 without adapter 'x'"
    )
    assert why_none(Request(min_weight_version=9), [], VERSION) == (
        "no replica is ready at version 9: the fleet is empty"
    )


@pytest.mark.parametrize("decides", [[], [False], [True, True], [True, False], [False, False]])
def test_chain_with_undecided_requests_or_unused_policies_is_refused(decides: list[bool]) -> None:
    """The last policy decides about every request, and it alone."""
    with pytest.raises(ValueError, match="last policy"):
        Chain([Scripted(str(number), always_decides=each) for number, each in enumerate(decides)])
