"""What gives way to a push, in a daemon with room for 100 bytes; and how much room a daemon has."""

from types import SimpleNamespace
from typing import Any

import pytest

from genserve.errors import ApplyInProgressError, StagingFullError
from genserve.tensors.manifest import Manifest
from genserve.weights import push_admission
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.push.lifecycle import State
from genserve.weights.push_admission import MAX_PUSHES, Evictions, limit_bytes, naming_wide_tensors, plan_evictions
from tests.support.refusals import refuses

MAX_BYTES = 100
INDEX = CheckpointIndex({"a": CheckpointTensor("F32", (4,), 16)})


def push(
    size_bytes: int,
    state: State = State.STAGED,
    *,
    arena_bytes: int = 0,
    is_held: bool = False,
    push_id: str = "p1",
    preemptible: bool = False,
    is_to_wait: bool = True,
    lora: bool = False,
) -> Any:
    """One that is here already; its arena may have less than the push needs in the end."""
    return SimpleNamespace(
        push_id=push_id,
        header=SimpleNamespace(preemptible=preemptible, lora=object() if lora else None),
        size_bytes=size_bytes,
        is_held=is_held,
        is_to_wait=is_to_wait,
        lifecycle=SimpleNamespace(state=state),
        staging=SimpleNamespace(arena=SimpleNamespace(size_bytes=arena_bytes or size_bytes)),
        in_progress=lambda: ApplyInProgressError("another one"),
    )


def resident(held_bytes: int = 0, served_bytes: int = 0, spare_bytes: int = 0) -> Any:
    """Versions whose bytes are here: the served one, and others that are still read."""
    return SimpleNamespace(held_bytes=held_bytes, served_bytes=served_bytes, spare_bytes=spare_bytes)


@pytest.fixture(autouse=True)
def required(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is asked of the machine: the bytes of the push, and those that are freed for it."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(push_admission, "require_memory", lambda *sizes: asked.append(sizes))
    return asked


def planned(size_bytes: int, *pushes: Any, kept: Any = None, partial: bool = False, **fields: bool) -> Evictions:
    kept = resident() if kept is None else kept
    return plan_evictions(size_bytes, pushes, MAX_BYTES, kept, partial=partial, **fields)


def test_what_fits_to_the_last_byte_takes_nothing_from_anybody(required: list[tuple[int, int]]) -> None:
    """Beside what is staged, what is served and what is read."""
    assert planned(30, push(40), kept=resident(30, 20)) == Evictions()
    assert required == [(30, 0)]


def test_machine_is_not_asked_for_memory_that_waits(required: list[tuple[int, int]]) -> None:
    """The arena of the version before is used again; another size has to be allocated."""
    assert planned(30, kept=resident(30, 30, spare_bytes=30)) == Evictions()
    assert required == []
    assert planned(29, kept=resident(30, 30, spare_bytes=30)) == Evictions()
    assert required == [(29, 30)]


@pytest.mark.parametrize(("kind", "freed_bytes"), [("partial", 30), ("lora", 0)])
def test_memory_is_checked_for_pushes_that_cannot_use_the_spare_arena(
    required: list[tuple[int, int]], kind: str, freed_bytes: int
) -> None:
    """The bytes of a part have another size before it is completed, and adapters leave that arena to versions."""
    planned(30, kept=resident(30, 30, spare_bytes=30), **{kind: True})
    assert required == [(30, freed_bytes)]


def test_versions_that_are_read_and_not_served_give_way_first(required: list[tuple[int, int]]) -> None:
    """The served one stays while that is enough."""
    for size_bytes in (31, 40):
        assert planned(size_bytes, push(40), kept=resident(30, 20)) == Evictions(releases_replaced=True)
    assert required == [(31, 10), (40, 10)]


def test_the_served_bytes_give_way_to_a_whole_version_that_fits_alone(required: list[tuple[int, int]]) -> None:
    """A partial one needs them."""
    kept = resident(30, 20, spare_bytes=5)
    for size_bytes in (81, 100):
        assert planned(size_bytes, kept=kept) == Evictions(releases_replaced=True, releases_resident=True)
        with pytest.raises(StagingFullError):
            planned(size_bytes, kept=kept, partial=True)
    assert required == [(81, 35), (100, 35)]


def test_what_is_staged_gives_way_to_nothing() -> None:
    """Somebody means to commit it."""
    for state in (State.STAGED, State.PREPARED):
        with pytest.raises(StagingFullError) as full:
            planned(81, push(20, state), kept=resident(30, 0))
        assert full.value.metadata == {"staged_bytes": "50", "max_staging_bytes": "100", "push_ids": "p1"}


def test_pushes_that_hold_the_memory_are_named_largest_first() -> None:
    """At most three, and how many more there are; nobody if it is not a push."""
    staged = [push(size_bytes, push_id=f"p{size_bytes}") for size_bytes in (2, 4, 1, 3)]
    with refuses(StagingFullError, says="'p4', 'p3', 'p2' and 1 more") as full:
        planned(91, *staged, push(50, State.RECEIVING))
    assert full.value.metadata["push_ids"] == "p4,p3,p2"
    with pytest.raises(StagingFullError) as full:
        planned(101)
    assert "push_ids" not in full.value.metadata


def test_what_has_broken_off_gives_way_to_an_adapter_that_needs_its_room(required: list[tuple[int, int]]) -> None:
    """And to no other one: it may be resumed, or committed again."""
    broken = push(40, State.RECEIVING, is_to_wait=False)
    assert planned(60, broken, lora=True) == Evictions()
    assert planned(61, broken, lora=True) == Evictions((broken,))
    assert required == [(60, 0), (61, 40)]
    others = [push(0, State.FAILED, lora=True) for _ in range(MAX_PUSHES)]
    assert planned(1, *others, lora=True).leftovers == tuple(others)


def test_what_can_never_fit_is_refused() -> None:
    """By one byte."""
    with pytest.raises(StagingFullError):
        planned(101)


def test_pushes_that_nobody_sends_and_nobody_committed_give_way(required: list[tuple[int, int]]) -> None:
    """Whether they lack bytes, have failed, or were sent to be applied. What they have taken of the machine is free
    then."""
    idle = (push(50, State.RECEIVING, arena_bytes=30), push(60, State.FAILED), push(70, is_to_wait=False))
    assert planned(90, push(10), *idle, kept=resident(spare_bytes=7)) == Evictions(idle)
    assert required == [(90, 30 + 60 + 70 + 7)]


@pytest.mark.parametrize("state", [State.STAGED, State.PREPARED])
def test_what_is_preemptible_gives_way_to_new_weights_only(state: State) -> None:
    """An adapter, or bytes that are only staged, may come while it is about to be committed."""
    first = push(60, state, preemptible=True)
    assert planned(50, first, replaces_weights=True) == Evictions((first,))
    assert planned(40, first) == Evictions()
    with refuses(StagingFullError, says="'p1'"):
        planned(50, first)


def test_while_other_weights_are_held_there_is_no_room_for_weights() -> None:
    """However much is free."""
    with pytest.raises(ApplyInProgressError):
        planned(1, push(1, State.RECEIVING, is_held=True))


@pytest.mark.parametrize(("is_lora", "lora"), [(True, False), (False, True), (True, True)])
def test_an_adapter_that_is_held_is_in_the_way_of_nothing_but_memory(is_lora: bool, lora: bool) -> None:
    """And weights that are held are not in its way. They take nothing from each other, whatever they may be later."""
    held = push(60, State.RECEIVING, is_held=True, lora=is_lora, preemptible=True, is_to_wait=False)
    assert planned(40, held, lora=lora, replaces_weights=not lora) == Evictions()
    with refuses(StagingFullError, says="wait for, commit or discard 'p1'"):
        planned(41, held, lora=lora, replaces_weights=not lora)


@pytest.mark.parametrize("lora", [True, False])
def test_pushes_of_a_kind_are_not_more_than_so_many(lora: bool) -> None:
    """However small they are; those of the other kind come nevertheless."""
    pushes = [push(0, push_id=f"p{number}", lora=lora) for number in range(MAX_PUSHES)]
    assert planned(1, *pushes, lora=not lora) == Evictions()
    assert planned(1, *pushes[1:], push(0, lora=not lora), lora=lora) == Evictions()
    with refuses(StagingFullError, says="commit or discard") as refused:
        planned(1, *pushes, lora=lora)
    wide = Manifest.end_to_end([("a", "F64", (4,), 32)])
    assert naming_wide_tensors(refused.value, wide, INDEX) is refused.value  # other tensors would be refused, too


def test_an_adapter_does_not_take_the_memory_of_the_served_version() -> None:
    """It replaces none."""
    assert planned(40, kept=resident(90, 60), lora=True) == Evictions(releases_replaced=True)
    with refuses(
        StagingFullError,
        says="41 bytes do not fit: 60 of the 100 bytes for pushes are in use; give --max-staging-bytes more",
    ):
        planned(41, kept=resident(60, 60), lora=True)


@pytest.mark.parametrize(
    ("evicted", "calls"),
    [
        (Evictions(), []),
        (Evictions(releases_replaced=True), ["release_replaced"]),
        (Evictions(releases_replaced=True, releases_resident=True), ["release_memory"]),
    ],
)
def test_what_was_planned_is_freed_and_no_more(evicted: Evictions, calls: list[str]) -> None:
    """Of what is resident; pushes are dropped by whoever owns them."""
    done: list[str] = []
    methods = {name: lambda name=name: done.append(name) for name in ("release_replaced", "release_memory")}
    evicted.clear(SimpleNamespace(**methods))  # type: ignore[arg-type]
    assert done == calls


@pytest.mark.parametrize(
    ("dtype", "name", "checkpoint", "says"),
    [
        ("F64", "a", INDEX, "full; the push's tensors are 2 times as wide as the checkpoint's"),
        ("F32", "a", INDEX, "full"),
        ("F16", "a", INDEX, "full"),
        ("F64", "of an adapter", INDEX, "full"),
        ("F64", "a", None, "full"),
    ],
)
def test_tensors_wider_than_the_checkpoints_are_named(
    dtype: str, name: str, checkpoint: CheckpointIndex | None, says: str
) -> None:
    """As far as it is known how wide those are."""
    length = {"F64": 32, "F32": 16, "F16": 8}[dtype]
    manifest = Manifest.end_to_end([(name, dtype, (4,), length)])
    named = naming_wide_tensors(StagingFullError("full", metadata={"a": "b"}), manifest, checkpoint)
    assert (named.message, named.metadata) == (says, {"a": "b"})


def test_the_limit_holds_two_versions_unless_it_is_given() -> None:
    """And 256 MiB; without the files nobody knows how much two are."""
    assert limit_bytes(0, INDEX) == 2 * 16 + (256 << 20)
    assert limit_bytes(0, None) == 64 << 30
    assert limit_bytes(7, INDEX) == limit_bytes(7, None) == 7


def test_the_limit_holds_an_adapter_as_well() -> None:
    """Of the largest rank, in float32. Packed matrices have shapes by which it would be larger than the model."""
    tensors = {"a": CheckpointTensor("F16", (3, 50, 70), 21000), "b": CheckpointTensor("F16", (9,), 18)}
    assert limit_bytes(0, CheckpointIndex(tensors), 2) - limit_bytes(0, CheckpointIndex(tensors)) == 3 * 2 * 120 * 4
    packed = CheckpointIndex({"a": CheckpointTensor("U8", (1000, 1), 1000)})
    assert limit_bytes(0, packed, 64) - limit_bytes(0, packed) == 1000
