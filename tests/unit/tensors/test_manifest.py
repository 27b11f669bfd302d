"""Manifests: what is refused before a byte moves, and how fast."""

import hashlib
import time

import pytest

from genserve.errors import InvalidFieldError, ManifestMismatchError
from genserve.tensors.manifest import Manifest, TensorSpec, structural_issues
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.push_admission import MAX_TENSORS, check_num_tensors, examine, mismatch
from tests.support.refusals import refuses


def spec(name: str, offset: int, shape: tuple[int, ...] = (2, 2), dtype: str = "F32", length: int = 16) -> TensorSpec:
    return TensorSpec(name, dtype, shape, offset, length)


GOOD = Manifest((spec("b", 16), spec("a", 0)), 32)


def test_good_manifest_has_no_issues() -> None:
    """In any order, with scalars and with tensors of no element."""
    assert structural_issues(GOOD) == []
    tensors = (spec("empty", 4, (0, 7), "BF16", 0), spec("scalar", 0, (), "F32", 4), spec("x", 4, (3,), "BOOL", 3))
    assert structural_issues(Manifest(tensors, 7)) == []


def test_digest_is_that_of_the_lines_in_order_of_the_names() -> None:
    """As weights.proto says, so that any client can compute it."""
    lines = "a\tF32\t2,2\t0\t16\nb\tF32\t2,2\t16\t16\n"
    assert GOOD.digest == hashlib.sha256(lines.encode()).hexdigest()
    assert Manifest(GOOD.tensors[::-1], 32).digest == GOOD.digest
    assert Manifest((spec("a", 0), spec("b", 16, dtype="I32")), 32).digest != GOOD.digest


@pytest.mark.parametrize(
    ("bad", "total_bytes", "says"),
    [
        (spec("", 0), 16, "no name"),
        (spec("a\tb", 0), 16, "printable"),
        (spec("a", 0, dtype="F31"), 16, "F31"),
        (spec("a", 0, shape=(2, 3)), 16, " 24 "),
        (spec("a", 0, shape=(-2, -2)), 16, "out of range"),
        (spec("a", 0, shape=(2**32, 2**32), length=0), 16, "73786976294838206464"),  # 0 modulo 2^64
        (spec("a", 0, shape=(2**63,)), 16, "out of range"),
        (spec("a", 0, shape=(1,) * 17, length=4), 4, "17 dimensions"),
        (spec("a", -1), 16, "total_bytes"),
        (spec("a", 1), 16, "total_bytes"),
        (spec("a", 2**63), 16, "total_bytes"),
        (spec("a", 0), 17, "[16, 17)"),
        (spec("a", 1), 17, "[0, 1)"),
        (spec("a", 0), -1, "total_bytes -1"),
        (spec("a", 0), 2**63, f"total_bytes {2**63}"),
    ],
)
def test_tensor_that_cannot_be_is_an_issue(bad: TensorSpec, total_bytes: int, says: str) -> None:
    """Names, types, shapes, lengths and places; no product overflows and wraps around to fit."""
    assert any(says in issue.description for issue in structural_issues(Manifest((bad,), total_bytes)))


def test_duplicates_and_overlaps_name_the_tensor() -> None:
    """The issue is about the tensor that is wrong."""
    assert [each.tensor for each in structural_issues(Manifest((spec("a", 0), spec("a", 16)), 32))] == ["a"]
    (issue,) = structural_issues(Manifest((spec("a", 0), spec("b", 8)), 24))
    assert issue.tensor == "b" and "8" in issue.description and "'a'" in issue.description
    assert [each.tensor for each in structural_issues(Manifest((), 0))] == [""]


def test_a_small_tensor_inside_a_large_one_is_an_overlap() -> None:
    """Also when a later one begins after the small one's end: the large one still lies there."""
    manifest = Manifest((spec("large", 0, (32,), "U8", 32), spec("small", 4, (4,), "U8", 4), spec("c", 10)), 32)
    assert {issue.tensor for issue in structural_issues(manifest)} == {"small", "c"}


def test_at_most_twenty_issues_are_named_and_the_others_counted() -> None:
    """An error message stays readable."""
    issues = structural_issues(Manifest(tuple(spec(f"t{i}", 16 * i, dtype="X") for i in range(50)), 800))
    assert [issue.tensor for issue in issues] == [*(f"t{i}" for i in range(20)), ""]
    assert " 30 " in issues[-1].description


CHECKPOINT = CheckpointIndex(
    {
        "embed.weight": CheckpointTensor("BF16", (4, 2), 16),
        "fp8.weight": CheckpointTensor("F8_E4M3", (2,), 2),
        "ids": CheckpointTensor("I64", (1,), 8),
    },
    tied={"lm_head.weight": "embed.weight"},
)


def changed(**tensors: CheckpointTensor | None) -> Manifest:
    """The checkpoint's manifest with tensors replaced, added or taken out."""
    merged = {k: v for k, v in (dict(CHECKPOINT.tensors) | tensors).items() if v is not None}
    return CheckpointIndex(merged).as_manifest()


@pytest.mark.parametrize(
    ("manifest", "issue"),
    [
        (changed(), None),
        (changed(**{"embed.weight": CheckpointTensor("F32", (4, 2), 32)}), None),
        (changed(**{"lm_head.weight": CheckpointTensor("BF16", (4, 2), 16)}), None),
        (changed(ids=None), ("ids", "missing")),
        (changed(other=CheckpointTensor("I64", (1,), 8), ids=None), ("other", "checkpoint")),
        (changed(**{"embed.weight": CheckpointTensor("BF16", (2, 4), 16)}), ("embed.weight", "[2, 4]")),
        (changed(**{"lm_head.weight": CheckpointTensor("BF16", (2, 4), 16)}), ("lm_head.weight", "[2, 4]")),
        (changed(ids=CheckpointTensor("F64", (1,), 8)), ("ids", "cannot be cast")),
        (changed(ids=CheckpointTensor("I32", (1,), 4)), ("ids", "cannot be cast")),
        (changed(**{"fp8.weight": CheckpointTensor("BF16", (2,), 4)}), ("fp8.weight", "cannot be cast")),
    ],
)
def test_manifest_is_held_to_the_checkpoint(manifest: Manifest, issue: tuple[str, str] | None) -> None:
    """Names, shapes and types; floats are cast, FP8 is not (its values are scaled), a tied head may come or not."""
    digest, issues = examine(manifest, "", CHECKPOINT)
    assert digest == manifest.digest
    if issue is None:
        assert issues == []
    else:
        assert any(found.tensor == issue[0] and issue[1] in found.description for found in issues)


def test_partial_manifest_may_lack_tensors_but_not_bring_others() -> None:
    """Only `missing` is forgiven."""
    lacking = changed(ids=None)
    assert examine(Manifest(lacking.tensors, lacking.total_bytes, partial=True), "", CHECKPOINT)[1] == []
    foreign = changed(ids=None, other=CheckpointTensor("I64", (1,), 8))
    issues = examine(Manifest(foreign.tensors, foreign.total_bytes, partial=True), "", CHECKPOINT)[1]
    assert [each.tensor for each in issues] == ["other"]


def test_manifest_that_is_not_the_one_claimed_is_refused() -> None:
    """A digest next to a manifest has to be its own."""
    with pytest.raises(InvalidFieldError):
        examine(changed(), "0" * 64, CHECKPOINT)


def test_one_tensor_too_many_is_named() -> None:
    """The commonest mistake of all: a buffer, or a head that is tied."""
    head = {"lm_head.weight": CheckpointTensor("BF16", (4, 2), 16)}  # may come, so there is one too many
    manifest = changed(rotary=CheckpointTensor("F32", (4,), 16), **head)
    check_num_tensors(len(manifest.tensors), CHECKPOINT)
    issues = examine(manifest, "", CHECKPOINT)[1]
    assert [each.tensor for each in issues] == ["rotary"]
    error = mismatch(issues)
    assert error.violations[0].field == 'header.manifest.tensors["rotary"]'
    assert "'rotary'" in error.message


def test_unknown_and_missing_tensors_are_both_named() -> None:
    """As of another model: the first twenty of either kind, and how many there are."""
    names = [f"layers.{number:03}" for number in range(50)]
    checkpoint = CheckpointIndex(dict.fromkeys(names, CheckpointTensor("F32", (1,), 4)))
    others = CheckpointIndex({f"blocks.{n[7:]}x": t for n, t in checkpoint.tensors.items()}).as_manifest()
    issues = examine(others, "", checkpoint)[1]
    foreign = [spec.name for spec in others.tensors]
    assert [issue.tensor for issue in issues] == [*foreign[:20], "", *names[:20], ""]
    assert all(" 30 " in issue.description for issue in issues if issue.tensor == "")
    error = mismatch(issues)
    for each in ("'blocks.000x'", "'layers.000'", " 98 "):
        assert each in error.message
    assert error.metadata == {"num_violations": "100"}


@pytest.fixture(scope="module")
def million_and_one() -> Manifest:
    """More tensors than a manifest may have."""
    return Manifest(tuple(spec(f"t{i}", 16 * i) for i in range(MAX_TENSORS + 1)), 16 * (MAX_TENSORS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [CHECKPOINT, None])
def test_hostile_manifest_of_a_million_tensors_is_refused_at_once(
    million_and_one: Manifest, checkpoint: CheckpointIndex | None
) -> None:
    """A million and one tensors: refused before they are looked at, whether or not the checkpoint is known."""
    began_s = time.thread_time()
    with refuses(ManifestMismatchError, says="1000001"):
        examine(million_and_one, "", checkpoint)
    assert time.thread_time() - began_s < 0.3


@pytest.mark.slow
def test_hostile_manifest_below_the_limit_is_read_no_further_than_needed() -> None:
    """A quarter of a million wrong tensors take no longer than the first thousand."""
    manifest = Manifest(tuple(spec(f"t{i}", 0, dtype="X") for i in range(250_000)), 16)
    began_s = time.thread_time()
    issues = structural_issues(manifest)
    assert time.thread_time() - began_s < 0.3
    assert " 980 " in issues[-1].description
