"""How many streams may watch one thing, and whose."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context

import pytest

from genserve.errors import QueueFullError
from genserve.rpc.watchers import MAX_WATCHERS, RESERVE, Watchers
from genserve.security.access import Principal, tell_calling
from genserve.security.roles import Role
from tests.support.refusals import refuses

LIMITS = {
    (): MAX_WATCHERS // 2,
    (Role.GENERATE,): MAX_WATCHERS,
    (Role.TRAINER,): MAX_WATCHERS + RESERVE,
    (Role.OPERATOR,): MAX_WATCHERS + 2 * RESERVE,
    (Role.GENERATE, Role.TRAINER, Role.OPERATOR): MAX_WATCHERS + 2 * RESERVE,
}


@contextmanager
def joined(watchers: Watchers, *roles: Role) -> Iterator[int]:
    """All streams that somebody with these roles may have, during the block: how many."""
    with ExitStack() as streams:

        def fill() -> int:
            tell_calling(Principal("somebody", frozenset(roles)) if roles else None)
            for number in range(2 * MAX_WATCHERS):
                try:
                    streams.enter_context(watchers.joined())
                except QueueFullError:
                    return number
            raise AssertionError("there is no limit")

        yield copy_context().run(fill)


@pytest.mark.parametrize("roles", LIMITS)
def test_each_role_has_its_streams(roles: tuple[Role, ...]) -> None:
    """Whoever has several has those of the highest."""
    with joined(Watchers("health", "ask"), *roles) as number:
        assert number == LIMITS[roles]


def test_those_above_have_room_whatever_those_below_have() -> None:
    """In this order, and the other way round: nobody takes what is another one's."""
    watchers = Watchers("health", "ask")
    generate, train, operate = (joined(watchers, role) for role in Role)
    with generate, train as trainers, operate as operators:
        assert (trainers, operators) == (RESERVE, RESERVE)
    with joined(watchers, Role.OPERATOR), joined(watchers, Role.GENERATE) as workers:
        assert workers == MAX_WATCHERS


def test_where_no_callers_are_listed_there_is_one_limit() -> None:
    """For everybody, who may come again in a second; and each stream that ends makes room."""
    watchers = Watchers("health", "ask", 4)
    with ExitStack() as streams:
        for _ in range(4 + 2 * RESERVE):
            streams.enter_context(watchers.joined())
        with refuses(QueueFullError, says="ask") as full:
            streams.enter_context(watchers.joined())
        assert full.value.retry_after_s == 1.0
    with watchers.joined():
        pass
