"""Callers, their roles, and their limit of calls per second."""

import re
from collections.abc import Sequence

import pytest

from genserve.security.access import (
    MAX_ENTRIES,
    AccessError,
    Rate,
    parse_environment,
    parse_file,
    token_digest,
)
from genserve.security.roles import Role

TOKEN = "a-token-of-some-length"
EXPIRES = "2026-01-01T00:00:00Z"


def entry(**fields: object) -> bytes:
    """A list with one token."""
    named: dict[str, object] = {"name": "caller", "roles": ["trainer"], "sha256": token_digest(TOKEN).hex(), **fields}
    lines = [f"{key} = {_toml(value)}" for key, value in named.items() if value is not None]
    return "\n".join(["[[token]]", *lines]).encode()


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and value != EXPIRES else str(value)


def test_a_token_is_known_by_its_hash() -> None:
    access = parse_file(entry())
    found = access.of_token(TOKEN, 0.0)
    assert found is not None
    assert (found.name, found.roles) == ("caller", {Role.TRAINER})
    assert access.of_token(TOKEN + "x", 0.0) is None
    assert access.of_token("", 0.0) is None


def test_a_token_ends_when_it_expires() -> None:
    access = parse_file(entry(expires=EXPIRES))
    assert access.of_token(TOKEN, 1767225599.0) is not None
    assert access.of_token(TOKEN, 1767225600.0) is None


@pytest.mark.parametrize(
    ("listed", "presented", "is_found"),
    [
        ("trainer.example", ["trainer.example"], True),
        ("trainer.example", ["other", "trainer.example"], True),
        ("trainer.example", ["trainer.example.evil"], False),
        ("*.example", ["trainer.example"], True),
        ("*.example", ["trainer.example.evil"], False),
        ("spiffe://cluster/rl/*", ["spiffe://cluster/rl/trainer"], True),
        ("spiffe://cluster/rl/*", ["spiffe://cluster/other"], False),
        ("trainer.example", [], False),
    ],
)
def test_a_certificate_is_known_by_a_name_in_it(listed: str, presented: Sequence[str], is_found: bool) -> None:
    access = parse_file(f'[[certificate]]\nname = "c"\nroles = ["generate"]\nsan = "{listed}"'.encode())
    assert (access.of_certificate(presented) is not None) == is_found


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "UTF-8"),
        (b"[[token]", "TOML"),
        (b"tokens = 1", "'tokens'"),
        (b"token = 1", "token"),
        (entry(token="secret-in-the-clear"), "token 1: write the sha256"),
        (entry(sha256="12"), "64 "),
        (entry(sha256=None), "64 "),
        (entry(roles=["admin"]), "generate, trainer, operator"),
        (entry(roles=[]), "role"),
        (entry(roles="trainer"), "roles"),
        (entry(roles=[["trainer"]]), "['trainer']"),
        (entry(name="a b"), "name "),
        (entry(name=None), "name "),
        (entry(expires="soon"), "expires "),
        (entry(more=1), "'more'"),
        (entry() + b"\n" + entry(name="other"), "twice"),
        (b'[[certificate]]\nname = "c"\nroles = ["generate"]\nsan = "*"', "one *"),
        (b'[[certificate]]\nname = "c"\nroles = ["generate"]\nsan = "a*b"', "one *"),
        (b'[[certificate]]\nname = "c"\nroles = ["generate"]', "san "),
    ],
)
def test_what_is_wrong_with_a_list_is_named(content: bytes, says: str) -> None:
    with pytest.raises(AccessError, match=re.escape(says)) as raised:
        parse_file(content)
    assert "secret-in-the-clear" not in str(raised.value)


def test_a_list_is_bounded() -> None:
    entries = b"\n\n".join(entry(name=f"c{i}", sha256=token_digest(str(i)).hex()) for i in range(MAX_ENTRIES + 1))
    with pytest.raises(AccessError, match="1000"):
        parse_file(entries)


def test_the_environment_lists_tokens_with_their_roles() -> None:
    access = parse_environment(f"generate,operator:{TOKEN}  trainer:{TOKEN}2")
    first, second = access.of_token(TOKEN, 0.0), access.of_token(TOKEN + "2", 0.0)
    assert first is not None and first.roles == {Role.GENERATE, Role.OPERATOR}
    assert second is not None and second.roles == {Role.TRAINER}


@pytest.mark.parametrize(
    ("text", "says"),
    [(TOKEN, "ROLE"), ("trainer:short", "16"), (f"admin:{TOKEN}", "admin"), (f"trainer:{TOKEN}é", "ASCII")],
)
def test_what_is_wrong_in_the_environment_is_named_without_the_token(text: str, says: str) -> None:
    with pytest.raises(AccessError, match=says) as raised:
        parse_environment(text)
    assert TOKEN not in str(raised.value)


def test_a_second_has_as_many_calls_as_the_rate_says() -> None:
    rate = Rate(2.0)
    assert [rate.take(10.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert rate.take(10.4) > 0.0
    assert rate.take(10.5) == 0.0
    assert rate.take(10.5) > 0.0


def test_rate_saves_up_at_most_one_second() -> None:
    rate = Rate(2.0)
    rate.take(0.0)
    assert [rate.take(100.0) == 0.0 for _ in range(3)] == [True, True, False]


def test_less_than_one_call_per_second_is_one_at_once() -> None:
    rate = Rate(0.1)
    assert rate.take(0.0) == 0.0
    assert round(rate.take(0.0)) == 10
    assert rate.take(10.0) == 0.0
