"""The checks of a push before it may send a byte, at the edge of what is allowed."""

from typing import Any

import pytest

from genserve.errors import (
    FieldViolation,
    InvalidFieldError,
    ManifestMismatchError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.tensors.manifest import Manifest, PushIssue, bounded
from genserve.weights.push.types import LoraAdapter, PushAction
from genserve.weights.push_admission import (
    check_header,
    check_num_tensors,
    check_version,
    examine,
    mismatch,
)
from tests.support.refusals import refuses
from tests.unit.weights.conftest import CHECKPOINT, MANIFEST, header

DAY_S = 24 * 3600.0
LORA = LoraAdapter("policy", "{}")
PARTIAL = Manifest(MANIFEST.tensors, MANIFEST.total_bytes, partial=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"push_id": "x" * 256},
        {"push_id": ""},
        {"attempt": "ä" * 256},
        {"weight_version": 1},
        {"weight_version": (1 << 32) - 1},
        {"staging_ttl_s": 1e-9},
        {"staging_ttl_s": DAY_S},
        {"prepared_ttl_s": 1e-9},
        {"prepared_ttl_s": DAY_S},
        {"action": PushAction.PREPARE, "manifest": PARTIAL},
        {"content_digest": "0123456789abcdef" * 4},
        {"num_streams": 1},
        {"num_streams": 1024},
        {"manifest": None, "manifest_digest": "0123456789abcdef" * 4},
        {"manifest": PARTIAL},
        {"weight_version": 0, "lora": LORA},
        {"weight_version": (1 << 32) - 1, "lora": LORA, "expected_version": 0},
    ],
)
def test_what_just_can_be_is_accepted(fields: dict[str, Any]) -> None:
    """Each field by itself."""
    check_header(header(**fields))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"push_id": "x" * 257}, "header.push_id"),
        ({"push_id": "a\nb"}, "header.push_id"),
        ({"attempt": "x" * 257}, "header.attempt"),
        ({"weight_version": -1}, "header.weight_version"),
        ({"staging_ttl_s": -1.0}, "header.staging_ttl"),
        ({"staging_ttl_s": DAY_S + 0.001}, "header.staging_ttl"),
        ({"prepared_ttl_s": 0.0}, "header.prepared_ttl"),
        ({"prepared_ttl_s": DAY_S + 0.001}, "header.prepared_ttl"),
        ({"content_digest": "0" * 63}, "header.content_digest"),
        ({"content_digest": "A" * 64}, "header.content_digest"),
        ({"num_streams": 1025}, "header.num_streams"),
        ({"manifest_digest": "0" * 63}, "header.manifest_digest"),
        ({"manifest_digest": "0" * 65}, "header.manifest_digest"),
        ({"manifest_digest": "A" * 64}, "header.manifest_digest"),
        ({"weight_version": 0, "lora": LoraAdapter("", "{}")}, "header.lora.lora_name"),
        ({"weight_version": 0, "lora": LoraAdapter("x" * 257, "{}")}, "header.lora.lora_name"),
        ({"weight_version": 1 << 32, "lora": LORA}, "header.weight_version"),
        ({"weight_version": 0, "lora": LORA, "manifest": PARTIAL}, "header.manifest.partial"),
        ({"weight_version": 0, "lora": LORA, "action": PushAction.PREPARE}, "header.action"),
    ],
)
def test_what_just_cannot_be_is_named_by_its_path(fields: dict[str, Any], path: str) -> None:
    """In PushWeightsRequest."""
    with pytest.raises(InvalidFieldError) as caught:
        check_header(header(**fields))
    assert [violation.field for violation in caught.value.violations] == [path]


def test_a_name_of_an_adapter_may_have_256_characters() -> None:
    """As every name."""
    check_header(header(weight_version=0, lora=LoraAdapter("x" * 256, "{}")))


def test_a_version_follows_the_one_that_is_served() -> None:
    """Or another one, if the trainer means it; but never where it expects yet another."""
    check_version(header(weight_version=8), 7)
    check_version(header(weight_version=7, force=True), 7)
    check_version(header(weight_version=8, expected_version=7), 7)
    with pytest.raises(VersionNotNewerError) as older:
        check_version(header(weight_version=7), 7)
    for force in (False, True):
        with pytest.raises(WeightVersionMismatchError) as other:
            check_version(header(weight_version=8, expected_version=6, force=force), 7)
    assert older.value.metadata == other.value.metadata == {"weight_version": "7"}


def test_an_adapter_version_follows_the_one_loaded_under_its_name() -> None:
    """As one of weights does; without a number it is the next one, whatever that is."""
    for fields in ({"weight_version": 8}, {"weight_version": 7, "force": True}, {"weight_version": 0}):
        check_version(header(lora=LORA, **fields), 7)
    check_version(header(weight_version=1, lora=LORA, expected_version=0), 0)
    with pytest.raises(VersionNotNewerError, match="policy"):
        check_version(header(weight_version=7, lora=LORA), 7)
    with pytest.raises(WeightVersionMismatchError, match="policy"):
        check_version(header(weight_version=0, lora=LORA, expected_version=6), 7)


def test_a_digest_is_that_of_the_manifest_beside_it() -> None:
    """It is told even if nobody has claimed one. A further stream has a digest alone, which nobody can check yet."""
    assert examine(MANIFEST, MANIFEST.digest, CHECKPOINT) == (MANIFEST.digest, [])
    assert examine(MANIFEST, "", None) == (MANIFEST.digest, [])
    assert examine(None, "claimed", CHECKPOINT) == ("claimed", [])
    with refuses(InvalidFieldError, says=MANIFEST.digest):
        examine(MANIFEST, "0" * 64, CHECKPOINT)


def test_the_first_issue_of_each_kind_is_told_and_all_are_named() -> None:
    """Three kinds at most: the rest is in the details."""
    issues = [PushIssue(f"{kind}{number}", f"is {kind}") for kind in "abcd" for number in range(2)]
    error = mismatch(issues)
    assert "'a0' is a; 'b0' is b; 'c0' is c; 5 more" in error.message
    assert error.violations[0] == FieldViolation('header.manifest.tensors["a0"]', "is a")
    assert (len(error.violations), error.metadata) == (8, {})
    error = mismatch(
        [PushIssue("", "has too many tensors"), PushIssue("a", "is missing"), PushIssue("b", "is missing")]
    )
    assert "it has too many tensors; 'a' is missing; 1 more" in error.message
    assert error.violations[0].field == "header.manifest"


def test_where_tensors_are_missing_alone_the_error_says_how_they_may_stay() -> None:
    """It is no help to one whose names are wrong, too."""
    stay = "; to keep the served values of what is missing, set partial (--partial)"
    missing = [PushIssue(f"t{number}", "is missing") for number in range(25)]
    assert mismatch(bounded(missing[:1])).message.endswith(f"'t0' is missing{stay}")
    assert mismatch(bounded(missing)).message.endswith(f"details{stay}")
    assert mismatch([PushIssue("a.t0", "is not in the checkpoint"), missing[0]]).message.endswith("'t0' is missing")


@pytest.mark.parametrize(
    ("num_issues", "words", "metadata"),
    [
        (1, "is missing", {}),
        (20, "; 19 more", {}),
        (21, "; 20 more", {}),
        (25, "; 24 more", {"num_violations": "25"}),
        (999, "; 998 more", {"num_violations": "999"}),
        (1001, "; at least 999 more", {"num_violations": "1000"}),
    ],
)
def test_issues_that_are_not_named_are_counted(num_issues: int, words: str, metadata: dict[str, str]) -> None:
    """And the line that counts them is none."""
    error = mismatch(bounded(PushIssue(f"t{number}", "is missing") for number in range(num_issues)))
    assert words in error.message
    assert error.metadata == metadata


def test_a_name_without_end_is_cut() -> None:
    """In the message and in the details."""
    error = mismatch([PushIssue("n" * 300, "is missing")])
    name = "n" * 256
    assert f"'{name}'" in error.message
    assert error.violations[0].field == f'header.manifest.tensors["{name}"]'


@pytest.mark.parametrize(("lora", "limit"), [(False, 4 * 2 + 1024), (True, 2 * (4 * 2 + 1024))])
def test_a_manifest_may_have_so_many_tensors_and_no_more(lora: bool, limit: int) -> None:
    """Four times those of the checkpoint and 1024, so that the error for a mistake can name them; an adapter has two
    for each. One more is refused before it is read."""
    check_num_tensors(limit, CHECKPOINT, lora=lora)
    with refuses(ManifestMismatchError, says=f"{limit + 1} "):
        check_num_tensors(limit + 1, CHECKPOINT, lora=lora)
    if not lora:
        named = Manifest.end_to_end((f"t{number:05}", "U8", (1,), 1) for number in range(limit + 1))
        assert examine(Manifest(named.tensors[:limit], limit), "", CHECKPOINT)[0] != ""
        with refuses(ManifestMismatchError, says=f"{limit + 1} "):
            examine(named, "", CHECKPOINT)
