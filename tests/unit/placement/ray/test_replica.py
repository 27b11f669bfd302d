"""A daemon in an actor that fails as a real one does not do on demand; tests/faults/test_up_ray.py has real actors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from genserve.launcher.daemon_process import DaemonFailedError
from genserve.launcher.output import Serving
from genserve.placement.ray.cluster import Ending, Placement, RayFailedError
from genserve.placement.ray.replica import RayDaemon
from tests.support.clocks import leaping_clock
from tests.support.patience import STEP_S, turns

SERVING = Serving("a model", "10.0.0.1:5")


class Method:
    """A method of an actor: each call does the next of the things that were written for it, or waits for ever."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.calls: list[tuple[object, ...]] = []

    def remote(self, *arguments: object) -> Awaitable[object]:
        """As Ray's."""
        self.calls.append(arguments)
        return self._answer()

    async def _answer(self) -> object:
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class ScriptedPlacement:
    """Has one actor, or none, with these methods. `forgotten`: the replicas whose actors are dead."""

    def __init__(self, **methods: Method) -> None:
        defaults = {name: Method(None) for name in ("address", "start", "stop")}
        self.actors: list[Any] = [type("Actor", (), {**defaults, "serving": Method(), "ended": Method(), **methods})()]
        self.forgotten: list[int] = []

    async def actor(self, number: int) -> object:
        """As Placement's."""
        if not self.actors:
            raise RayFailedError("Ray makes no actor: it is busy")
        return self.actors[0]

    async def node_of(self) -> dict[int, str]:
        """Three replicas, two of them on one node."""
        return {0: "a", 1: "b", 2: "a"}

    def forget(self, number: int) -> None:
        """As Placement's."""
        self.forgotten.append(number)


Runs = Callable[[ScriptedPlacement], RayDaemon]


@pytest.fixture
def run() -> Runs:
    """The daemon of replica 2."""
    return lambda placement: RayDaemon(2, ["--model", "m"], cast(Placement, placement))


async def failure_of(daemon: RayDaemon) -> DaemonFailedError:
    """When it has ended without serving."""
    async with asyncio.timeout(STEP_S):
        with pytest.raises(DaemonFailedError) as raised:
            await asyncio.wrap_future(daemon.serving)
        assert await asyncio.wrap_future(daemon.ended) is False
    return raised.value


async def test_a_daemon_serves_and_ends_with_its_own_words(run: Runs) -> None:
    """It is started with its flags and its place among the replicas of its node."""
    ends = Ending("the daemon ended with status 3: the engine has died", 3, was_killed=True)
    placement = ScriptedPlacement(serving=Method(SERVING), ended=Method(ends))
    daemon = run(placement)
    async with asyncio.timeout(STEP_S):
        assert await asyncio.wrap_future(daemon.serving) == SERVING
        assert await asyncio.wrap_future(daemon.ended) is True
    assert placement.actors[0].start.calls == [(["--model", "m"], 1, 2)]
    assert (str(daemon.failure()), daemon.exit_status) == (ends.words, 3)
    assert placement.forgotten == []


async def test_wrong_flags_are_told_by_the_exit_status(run: Runs) -> None:
    """So that no second start is tried."""
    wrong = Ending("the daemon ended with status 2: no such flag", 2)
    failure = await failure_of(run(ScriptedPlacement(serving=Method(None), ended=Method(wrong))))
    assert (str(failure), failure.exit_status) == (wrong.words, 2)


async def test_an_actor_that_is_dead_for_good_is_made_anew(run: Runs) -> None:
    """One that Ray starts again is not."""
    dead = ScriptedPlacement(ended=Method(), serving=Method(ActorDiedError()))
    failure = await failure_of(run(dead))
    assert "died" in str(failure)
    assert (failure.exit_status, dead.forgotten) == (None, [2])
    crashed = ScriptedPlacement(serving=Method(ActorUnavailableError("Socket closed", None)))
    assert "Socket closed" in str(await failure_of(run(crashed)))
    assert crashed.forgotten == []


async def test_an_actor_that_cannot_be_made_is_a_failed_start(run: Runs) -> None:
    """With the words of Ray."""
    placement = ScriptedPlacement()
    placement.actors.clear()
    assert "it is busy" in str(await failure_of(run(placement)))


async def test_an_actor_that_is_started_again_is_waited_for(run: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """That is no failed start. People are told once if it takes long."""
    restarting = [ActorUnavailableError("the actor is restarting", None) for _ in range(100)]
    placement = ScriptedPlacement(address=Method(*restarting, ""), serving=Method(SERVING))
    with leaping_clock():
        daemon = run(placement)
        assert await asyncio.wrap_future(daemon.serving) == SERVING
        assert len(placement.actors[0].address.calls) == 101
        assert capsys.readouterr().err.count("genserve: replica 2: ") == 1
        daemon.kill()
        await turns()


async def test_a_daemon_that_was_not_placed_is_not_waited_for(run: Runs) -> None:
    """It ends with what was reserved for it."""
    daemon = run(ScriptedPlacement(address=Method()))
    await asyncio.sleep(0)
    daemon.stop(60.0)
    async with asyncio.timeout(STEP_S):
        assert await asyncio.wrap_future(daemon.ended) is True


async def test_an_actor_that_does_not_tell_of_the_end_is_given_up(run: Runs) -> None:
    """After the time that the daemon has, and a little more."""
    placement = ScriptedPlacement(serving=Method(SERVING))
    with leaping_clock():
        daemon = run(placement)
        await asyncio.wrap_future(daemon.serving)
        began_s = asyncio.get_running_loop().time()
        daemon.stop(60.0)
        assert await asyncio.wrap_future(daemon.ended) is True
        assert 60 < asyncio.get_running_loop().time() - began_s < 120
    assert placement.actors[0].stop.calls == [(60.0,)]


async def test_a_bug_leaves_nobody_waiting(run: Runs) -> None:
    """Who waits gets it, and what has happened is known. There is nothing to end any more."""
    daemon = run(ScriptedPlacement(serving=Method(KeyError("a bug"))))
    async with asyncio.timeout(STEP_S):
        for future in (daemon.serving, daemon.ended):
            with pytest.raises(KeyError, match="a bug"):
                await asyncio.wrap_future(cast("Any", future))
    daemon.kill()
    assert "a bug" in str(daemon.failure())
