"""Replicas and requests for tests of policies."""

from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from genserve.routing.prefix_blocks import TOKENS_PER_BLOCK, blocks_of_tokens
from genserve.routing.replica import Load, Replica, ReplicaState, Request

UNTIMED = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
"""For properties whose examples are large: a busy machine is not what they are about."""

VERSION = 7
"""The committed version of the fleets."""


def replica(
    number: int = 0,
    *,
    inflight: int = 0,
    load: Load | None = None,
    state: ReplicaState = ReplicaState.READY,
    weight_version: int = VERSION,
    max_num_seqs: int = 32,
    lora_names: frozenset[str] | None = None,
) -> Replica:
    """A replica that may serve any request."""
    return Replica(
        replica_id=f"replica-{number:03}",
        address=f"10.0.0.{number}:50051",
        instance_id=f"instance-{number:03}",
        state=state,
        weight_version=weight_version,
        max_num_seqs=max_num_seqs,
        load=Load() if load is None else load,
        inflight=inflight,
        lora_names=lora_names,
    )


def fleet(*inflight: int) -> list[Replica]:
    """A replica for each number of sequences in flight."""
    return [replica(number, inflight=each) for number, each in enumerate(inflight)]


def with_inflight(replicas: list[Replica], changed: Replica, change: int) -> list[Replica]:
    """The fleet after sequences were sent to a replica, or have ended there."""
    return [replace(each, inflight=each.inflight + change) if each == changed else each for each in replicas]


def prompt(seed: int, num_blocks: int) -> list[int]:
    """The token ids of a prompt that fills its blocks of the first length."""
    return Random(seed).choices(range(1000), k=num_blocks * TOKENS_PER_BLOCK)


def asking(token_ids: list[int], session_id: str = "", num_sequences: int = 1) -> Request:
    """The request for a prompt."""
    return Request(blocks_of_tokens(token_ids), session_id, num_sequences=num_sequences)


REQUESTS = st.builds(
    Request,
    prefix_blocks=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3).map(
        lambda path: tuple(b"".join(path[: end + 1]) for end in range(len(path)))
    ),
    session_id=st.sampled_from(["", "s1", "s2"]),
    min_weight_version=st.none() | st.integers(VERSION - 1, VERSION + 1),
    lora_name=st.sampled_from(["", "lora"]),
    num_sequences=st.integers(1, 4),
)
"""Few prefixes, sessions and versions, so that requests have something in common."""


@st.composite
def replicas(draw: st.DrawFn, max_size: int = 4) -> list[Replica]:
    """A fleet in any state."""
    size = draw(st.integers(0, max_size))
    return [
        replica(
            number,
            state=draw(st.sampled_from([ReplicaState.READY] * 6 + [*ReplicaState])),
            weight_version=draw(st.sampled_from([VERSION - 1, VERSION, VERSION, VERSION + 1])),
            inflight=draw(st.integers(0, 40)),
            load=Load(draw(st.integers(0, 40)), draw(st.integers(0, 9)), draw(st.floats(0, 1)), 0.0, 0),
            lora_names=draw(st.sampled_from([None, frozenset[str](), frozenset({"lora"})])),
        )
        for number in range(size)
    ]
