"""The model of a push to a fleet gives what can be computed by hand."""

from dataclasses import replace
from itertools import takewhile
from math import inf
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fleet.model.calibration import Calibration, link_bound, measured
from bench.fleet.model.figures import CASES, FAILURES, MEASURED, failures, page
from bench.fleet.model.push import Outcome, push, push_until_taken
from bench.fleet.model.topology import CHAIN, NAIVE, STAR, TOPOLOGIES, TRAINER, TREES, Topology
from bench.fleet.model.transfer import Death, Transfer, shares
from bench.results.page import BEGIN, END

GB = 1e9
RATE = 1e9
PLAIN = Calibration(
    up=RATE,
    down=RATE,
    latency_s=0.001,
    stream_bytes_per_s=inf,
    process_bytes_per_s=inf,
    start_s=0.5,
    level_s=0.1,
    prepare_bytes_per_s=inf,
    digest_bytes_per_s=inf,
    hashed_last_bytes=inf,
    exchange_spread_s=0.0,
)
SLOW_STREAMS = replace(PLAIN, stream_bytes_per_s=RATE / 4)
FIRST_S = PLAIN.start_s + PLAIN.latency_s
ROUTED = [each for each in TOPOLOGIES if each is not NAIVE]


def transferred(
    topology: Topology, num_replicas: int, calibration: Calibration = PLAIN, deaths: tuple[Death, ...] = ()
) -> Transfer:
    """A transfer of 16 GB that has ended."""
    transfer = Transfer(16 * GB, topology.sources(num_replicas), calibration, deaths)
    transfer.run()
    return transfer


def ready_s(transfer: Transfer) -> list[float]:
    """When each replica had prepared it; those that died are left out."""
    return [each.ready_s for each in transfer.hosts if each.ready_s is not None and each.is_alive]


def total_s(topology: Topology, num_replicas: int, calibration: Calibration, size_bytes: float = 16 * GB) -> float:
    outcome = push(size_bytes, num_replicas, topology, calibration)
    assert isinstance(outcome, Outcome)
    return outcome.total_s


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda each: each.name)
def test_one_replica_takes_the_time_of_the_link(topology: Topology) -> None:
    """All topologies are the same then."""
    assert ready_s(transferred(topology, 1)) == pytest.approx([FIRST_S + 16])


def test_copies_share_the_link_of_the_trainer() -> None:
    """The naive way takes as many times as long as there are replicas."""
    transfer = transferred(NAIVE, 8)
    assert ready_s(transfer) == pytest.approx([FIRST_S + 8 * 16] * 8)
    assert transfer.trainer.sent == pytest.approx(8 * 16 * GB)


def test_a_star_takes_a_copy_more_than_the_first_replica_alone() -> None:
    """The first one sends to 7 others; they begin when they know the push."""
    first, *others = ready_s(transferred(STAR, 8))
    began_s = FIRST_S + PLAIN.level_s + PLAIN.latency_s
    assert first == pytest.approx(FIRST_S + 16)
    assert others == pytest.approx([began_s + 7 * 16] * 7)


def test_a_star_whose_receivers_are_slow_is_limited_by_them() -> None:
    """Three streams of a quarter of the link each."""
    _, *others = ready_s(transferred(STAR, 4, SLOW_STREAMS))
    assert others == pytest.approx([FIRST_S + PLAIN.level_s + PLAIN.latency_s + 64] * 3, abs=0.02)


@pytest.mark.parametrize("num_replicas", [2, 5, 64, 1024])
def test_each_replica_of_a_chain_is_later_by_the_time_to_begin(num_replicas: int) -> None:
    """Everything else overlaps."""
    level_s = PLAIN.level_s + PLAIN.latency_s
    expected = [FIRST_S + 16 + index * level_s for index in range(num_replicas)]
    assert ready_s(transferred(CHAIN, num_replicas)) == pytest.approx(expected)


def test_each_replica_of_a_chain_that_begins_at_once_is_later_by_a_chunk() -> None:
    """A chunk is passed on when it is there as a whole."""
    chunked = replace(PLAIN, level_s=0.0, chunk_bytes=0.5 * GB)
    late_s = 0.5 + PLAIN.latency_s
    assert ready_s(transferred(CHAIN, 9, chunked)) == pytest.approx([FIRST_S + 16 + late_s * each for each in range(9)])


@pytest.mark.parametrize("topology", TREES, ids=lambda each: each.name)
def test_a_tree_takes_as_many_copies_as_it_has_children(topology: Topology) -> None:
    """Whatever its depth, but for the time to begin."""
    assert topology.fanout is not None
    last_s = max(ready_s(transferred(topology, 1023)))
    assert FIRST_S + 16 * topology.fanout < last_s < FIRST_S + 16 * topology.fanout + 10 * 0.102 + 0.1


@given(
    topology=st.sampled_from(TOPOLOGIES),
    num_replicas=st.integers(1, 40),
    streams=st.sampled_from([inf, RATE / 3]),
    deaths=st.lists(
        st.tuples(st.integers(1, 39), st.floats(0.1, 40), st.booleans()), max_size=4, unique_by=lambda d: d[0]
    ),
)
@settings(max_examples=60, deadline=None)
def test_no_byte_is_lost_and_none_is_made(
    topology: Topology, num_replicas: int, streams: float, deaths: list[tuple[int, float, bool]]
) -> None:
    """What all have sent is what all have received, also when some die; who lives has all of it."""
    killed = tuple(Death(*each) for each in deaths if each[0] < num_replicas)
    transfer = transferred(topology, num_replicas, replace(PLAIN, stream_bytes_per_s=streams), killed)
    sent = transfer.trainer.sent + sum(each.sent for each in transfer.hosts)
    assert sent == pytest.approx(sum(each.received for each in transfer.hosts))
    living = [each for each in transfer.hosts if each.is_alive]
    assert [each.received for each in living] == [16 * GB] * len(living)
    assert all(each.ready_s is not None for each in living)
    assert all(each.received <= 16 * GB * (1 + 1e-9) for each in transfer.hosts)


@given(topology=st.sampled_from(ROUTED), num_replicas=st.integers(2, 40), at_s=st.floats(0.7, 30))
@settings(max_examples=40, deadline=None)
def test_no_replica_has_what_its_source_lacks(topology: Topology, num_replicas: int, at_s: float) -> None:
    """At any moment; the death of the first one stops the simulation."""
    at_s = min(at_s, FIRST_S + 15.9)
    transfer = transferred(topology, num_replicas, PLAIN, (Death(0, at_s),))
    for host in transfer.hosts:
        host.advance(at_s, inf)
    for host in transfer.hosts[1:]:
        source = transfer.hosts[host.sources[0]]
        assert host.received <= max(0.0, source.received - PLAIN.lag_bytes) + 1000


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda each: each.name)
def test_push_time_never_falls_with_replicas_or_bytes_or_slower_links(topology: Topology) -> None:
    """For each topology."""
    by_number = [total_s(topology, 2**power, PLAIN) for power in range(9)]
    by_size = [total_s(topology, 16, PLAIN, size * GB) for size in (1, 16, 140, 1000)]
    by_rate = [total_s(topology, 16, measured(gbit)) for gbit in (100, 10, 1)]
    assert by_number == sorted(by_number) and by_size == sorted(by_size) and by_rate == sorted(by_rate)
    assert by_number[0] < by_number[-1] and by_size[0] < by_size[-1] and by_rate[0] < by_rate[-1]


@pytest.mark.parametrize("topology", ROUTED, ids=lambda each: each.name)
def test_one_copy_leaves_the_trainer(topology: Topology) -> None:
    """Through the router, however many replicas there are."""
    outcome = push(16 * GB, 200, topology, PLAIN)
    assert isinstance(outcome, Outcome) and outcome.copies == pytest.approx(1)


def test_ten_gigabits_are_more_than_one_stream_takes() -> None:
    """The page has one table for both rates."""
    assert total_s(CHAIN, 64, measured(10)) == pytest.approx(total_s(CHAIN, 64, measured(100)), rel=1e-6)
    assert total_s(CHAIN, 1, link_bound(100)) < 0.2 * total_s(CHAIN, 1, link_bound(10))


def test_what_is_slower_than_the_link_to_prepare_ends_later() -> None:
    """The preparation overlaps with the arrival. What is left of the digest begins after it, and overlaps with the
    preparation."""
    assert ready_s(transferred(CHAIN, 1, replace(PLAIN, prepare_bytes_per_s=2 * RATE))) == pytest.approx([FIRST_S + 16])
    slow = replace(PLAIN, prepare_bytes_per_s=RATE / 2)
    assert ready_s(transferred(CHAIN, 1, slow)) == pytest.approx([FIRST_S + 32])
    both = replace(slow, digest_bytes_per_s=RATE / 4)
    assert ready_s(transferred(CHAIN, 1, both)) == pytest.approx([FIRST_S + 16 + 64])
    hashed_before = replace(both, hashed_last_bytes=RATE)
    assert ready_s(transferred(CHAIN, 1, hashed_before)) == pytest.approx([FIRST_S + 32])
    assert ready_s(transferred(CHAIN, 1, replace(hashed_before, prepare_bytes_per_s=inf))) == pytest.approx(
        [FIRST_S + 16 + 4]
    )


def test_a_digest_that_the_trainer_names_is_checked_level_by_level() -> None:
    """A parent ends the streams of its children only when it has computed its own."""
    named = replace(PLAIN, digest_bytes_per_s=RATE, names_digest=True, stall_s=1000.0)
    plain = replace(named, names_digest=False)
    assert max(ready_s(transferred(CHAIN, 5, plain))) == pytest.approx(FIRST_S + 32, abs=0.5)
    assert max(ready_s(transferred(CHAIN, 5, named))) == pytest.approx(FIRST_S + 16 + 5 * 16, abs=0.5)


@pytest.mark.parametrize(("with_host", "late_s"), [(False, 0.0), (True, PLAIN.stall_s)])
def test_children_of_a_dead_replica_go_to_its_parent(with_host: bool, late_s: float) -> None:
    """At once when the connection is reset, after a stall when nothing is heard."""
    transfer = transferred(CHAIN, 3, PLAIN, (Death(1, 8.0, with_host),))
    (first, last), child = ready_s(transfer), transfer.hosts[2]
    assert child.source is transfer.hosts[0]
    assert first == pytest.approx(FIRST_S + 16)
    # It had 8 s of the link but for what came before; the rest comes from the grandparent.
    assert last == pytest.approx(FIRST_S + 2 * (PLAIN.level_s + PLAIN.latency_s) + 16 + late_s, abs=0.02)


@pytest.mark.parametrize(("with_host", "missed_s"), [(False, FIRST_S + 2.001), (True, 0.3 + PLAIN.silence_s)])
def test_children_of_a_replica_that_never_knew_begin_when_it_is_missed(with_host: bool, missed_s: float) -> None:
    """The router tells a replica when its parent knows the push, and asks a dead one in vain."""
    slow = replace(PLAIN, level_s=2.0)
    _, last = ready_s(transferred(CHAIN, 3, slow, (Death(1, 0.3, with_host),)))
    refused_s = PLAIN.stall_s if with_host else PLAIN.latency_s
    assert last == pytest.approx(missed_s + 2.001 + refused_s + 16, abs=0.02)


def test_all_or_none_fails_with_one_replica_and_min_replicas_does_not() -> None:
    """A push that fails is told to the trainer when the router knows."""
    death = Death(3, 5.0)
    failed = push(16 * GB, 8, CHAIN, PLAIN, deaths=[death])
    assert isinstance(failed, float) and failed == pytest.approx(5.0, abs=0.1)
    lost = push(16 * GB, 8, CHAIN, PLAIN, deaths=[replace(death, with_host=True)])
    assert lost == pytest.approx(5.0 + PLAIN.silence_s)
    taken = push(16 * GB, 8, CHAIN, PLAIN, deaths=[death], min_replicas=7)
    assert isinstance(taken, Outcome) and taken.num_taken == 7
    head = push(16 * GB, 8, CHAIN, PLAIN, deaths=[Death(0, 4.0)], min_replicas=1)
    assert head == pytest.approx(4.0, abs=0.1)  # nobody else has a copy


def test_pushes_are_repeated_until_one_is_taken() -> None:
    """Without deaths there is one; with many, several, and going on without a few needs fewer. The seed decides."""

    def found(deaths_per_hour: float, spare: int) -> list[Outcome]:
        return [
            push_until_taken(16 * GB, 32, CHAIN, PLAIN, deaths_per_hour=deaths_per_hour, spare=spare, seed=seed)
            for seed in range(10)
        ]

    assert [each.num_pushes for each in found(0, 0)] == [1] * 10
    all_or_none, most = found(5, 0), found(5, 8)
    assert sum(each.num_pushes for each in all_or_none) > sum(each.num_pushes for each in most) >= 10
    assert found(5, 0) == all_or_none


def test_the_skew_is_that_of_the_calls_and_the_steps() -> None:
    """Not that of the transfer: replicas that had it first wait for the others."""
    outcome = push(16 * GB, 101, CHAIN, replace(PLAIN, call_s=0.002))
    assert isinstance(outcome, Outcome)
    assert outcome.skew_s == pytest.approx(0.2)
    assert outcome.kept_s == pytest.approx(100 * (PLAIN.level_s + PLAIN.latency_s))


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_model() -> None:
    """Who changes the model runs `python -m bench.fleet.model --write`. Of the failures, which take longest to
    compute, those of the smallest fleet are compared."""
    text = (Path(__file__).parents[3] / "docs" / "benchmarks" / "fleet.md").read_text()
    written = text.split(f"{BEGIN}\n")[1].split(f"\n{END}")[0].splitlines()
    with_failures = written.index(FAILURES)
    assert written[:with_failures] == list(takewhile(lambda line: line != FAILURES, page()))
    first_columns = [" | ".join(line.split(" | ")[:2]) for line in written[with_failures + 2 :] if line]
    found = failures(CASES[MEASURED], [16])
    assert first_columns == [line.removesuffix(" |") for line in found if line]


def test_every_replica_has_the_first_one_among_its_sources() -> None:
    """The plan is the router's."""
    assert CHAIN.sources(4) == ((TRAINER,), (0,), (1, 0), (2, 1, 0))
    assert TREES[0].sources(4) == ((TRAINER,), (0,), (0,), (1, 0))
    assert STAR.sources(1) == CHAIN.sources(1) == ((TRAINER,),)


def test_shares_are_fair() -> None:
    """What one does not use, the others do."""
    assert shares(9, [1, inf, inf]) == [1, 4, 4]
    assert shares(9, [1, 2, 3]) == [1, 2, 3]
    random = Random(0)
    for _ in range(100):
        limits = [random.random() for _ in range(random.randrange(1, 9))]
        found = shares(1.5, limits)
        assert sum(found) == pytest.approx(min(1.5, sum(limits)))
        assert all(each <= limit for each, limit in zip(found, limits, strict=True))
