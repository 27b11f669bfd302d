"""Random histories of pushes against a model: what is applied is, byte for byte, what one attempt meant, or nothing.

A launch is one start of a trainer: it means one content, brings it in parts by its ranks, and its attempt has a name or
has none. The contents of launches share parts, so that a version put together from two of them is none that anybody
meant. GENSERVE_PUSH_MODEL_EXAMPLES is how many histories there are.
"""

import asyncio
import os
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from genserve.errors import GenserveError, PushConflictError, PushRolledBackError
from genserve.weights.push.lifecycle import State
from genserve.weights.push.stream import LiveStream
from genserve.weights.push.types import ApplyOptions, PushAction, PushOutcome, PushState
from genserve.weights.registry import PushRegistry
from tests.support.patience import STEP_S, turns
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import build_rig, further, header, num_arenas, num_open_arenas, weights
from tests.unit.weights.push_model import (
    ACTIONS,
    FATES,
    NUM_RANKS,
    PART,
    TTL_S,
    Inline,
    Launch,
    Sender,
    content,
    in_loop,
    pick,
)

_NUMBERS = st.integers(0, 1 << 10)


class Pushes(RuleBasedStateMachine):
    """Trainers that start, break off and start again, beside commits, discards, failures and time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(Inline())
        self.directory = TemporaryDirectory()
        self.now_s = 0.0
        self.launches: list[Launch] = []
        self.senders: list[Sender] = []
        self.parts = [0] * NUM_RANKS
        self.meant: dict[int, set[bytes]] = {0: {weights(0)}}  # by version
        self.told: list[tuple[Sender, PushOutcome]] = []
        self.calls: list[asyncio.Future[Any]] = []
        self.num_arenas = num_open_arenas()
        self.run(self.begin())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, STEP_S))

    async def begin(self) -> None:
        self.rig = build_rig(Path(self.directory.name), 200, lambda: self.now_s)
        self.engine = self.rig.engine
        self.registry: PushRegistry = self.rig.registry

    async def settle(self) -> None:
        """Lets everything happen that can."""
        await turns(40)

    def launch(self, new_id: bool, named: bool, changes: tuple[bool, ...], action: PushAction, per_rank: int) -> Launch:
        """A trainer starts: for the push that another start was at, or for the next version."""
        before = self.launches[-1] if self.launches else None
        if before is None or new_id:
            push_id, version = f"p{len(self.launches)}", max(self.meant) + 1
        else:
            push_id, version = before.push_id, before.version
        attempt = f"a{len(self.launches)}" if named else ""
        if not named:  # an attempt without a name is over when its streams have left
            for sender in [each for each in self.senders if each.launch.attempt == ""]:
                self.run(in_loop(self.leave, sender))
        self.parts = [
            len(self.launches) + 1 if changed else part for changed, part in zip(changes, self.parts, strict=True)
        ]
        data = content(self.parts)
        launch = Launch(push_id, version, attempt, data, action, NUM_RANKS * per_rank)
        self.launches.append(launch)
        self.meant.setdefault(version, set()).add(data)
        return launch

    @rule(number=_NUMBERS, rank=st.integers(0, NUM_RANKS - 1), digest=st.booleans(), cancels=st.booleans())
    def open(self, number: int, rank: int, digest: bool, cancels: bool) -> None:
        """A rank opens a stream; its client may go while it does."""
        unnamed = [launch for launch in self.launches if launch.attempt == ""][-1:]
        if launches := [each for each in self.launches if each.attempt] + unnamed:
            self.open_stream(pick(launches, number), rank, digest=digest, cancels=cancels)

    def open_stream(self, launch: Launch, rank: int, *, digest: bool, cancels: bool) -> None:
        """Opens one, unless it is refused or would have to wait."""
        opened = launch.header()
        if digest and launch.push_id in self.registry.live:
            opened = further(opened)

        async def open_one() -> None:
            opening = asyncio.ensure_future(self.registry.open(opened))
            for turn in range(40):
                await asyncio.sleep(0)
                if cancels and turn == 3:
                    opening.cancel()
            opening.cancel()  # another attempt may be there, for which it waits
            await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                push = self.registry.live.get(launch.push_id)
                takes_part = isinstance(opening.result(), LiveStream) and not (push and push.lifecycle.is_busy)
                self.senders.append(Sender(launch, rank, opening.result(), takes_part))
            elif not opening.cancelled() and not isinstance(opening.exception(), GenserveError):
                raise AssertionError("an internal error") from opening.exception()

        self.run(open_one())

    @rule(
        number=_NUMBERS,
        picked=st.lists(st.integers(0, PART // 4 - 1), max_size=3),
        claims=st.booleans(),
        ends=st.booleans(),
    )
    def send(self, number: int, picked: list[int], claims: bool, ends: bool) -> None:
        """Chunks of the rank's part, all or a few; perhaps in shared memory, perhaps the end."""
        sending = [each for each in self.senders if each.finishing is None]
        if not sending:
            return
        sender = pick(sending, number)
        offsets = [sender.offsets[index] for index in picked] or list(sender.offsets)
        self.send_chunks(sender, offsets, claims=claims, ends=ends)

    @rule(
        new_id=st.sampled_from([True, False, False, False]),
        named=st.booleans(),
        changes=st.tuples(*[st.sampled_from([True, True, False])] * NUM_RANKS),
        action=st.sampled_from(ACTIONS),
        per_rank=st.sampled_from([1, 1, 2]),
        digest=st.booleans(),
        claims=st.booleans(),
        ranks=st.permutations(range(NUM_RANKS)),
        fates=st.one_of(st.just(("ends",) * NUM_RANKS), st.tuples(*[st.sampled_from(FATES)] * NUM_RANKS)),
    )
    def attempt(
        self,
        new_id: bool,
        named: bool,
        changes: tuple[bool, ...],
        action: PushAction,
        per_rank: int,
        digest: bool,
        claims: bool,
        ranks: list[int],
        fates: tuple[str, ...],
    ) -> None:
        """A trainer starts and pushes; something happens to some of its ranks."""
        launch = self.launch(new_id, named, changes, action, per_rank)
        num_streams = launch.num_streams // NUM_RANKS
        for rank, fate in zip(ranks, fates, strict=True):
            for stream in range(num_streams if fate != "is missing" else 0):
                num_senders = len(self.senders)
                self.open_stream(launch, rank, digest=digest, cancels=False)
                if len(self.senders) > num_senders:
                    sender = self.senders[-1]
                    offsets = list(sender.offsets)[stream::num_streams]
                    if fate in ("resumes", "presumes"):
                        offsets = [o for o in offsets if fate == "resumes" and self.is_missing(launch, o)]
                    self.send_chunks(sender, offsets, claims=claims, ends=fate != "breaks")
                    if fate == "breaks":
                        self.run(in_loop(self.leave, sender))
        self.run(self.settle())

    def is_missing(self, launch: Launch, offset: int) -> bool:
        """Whether the daemon says so."""
        missing = self.registry.report(launch.push_id).push.missing
        return any(start <= offset < end for start, end in missing)

    def send_chunks(self, sender: Sender, offsets: list[int], *, claims: bool, ends: bool) -> None:
        """Sends, and ends."""

        async def send_all() -> None:
            try:
                for offset in offsets:
                    piece = sender.launch.data[offset : offset + 4]
                    claim = sender.stream.claim(offset, 4) if claims else None
                    if claim is not None:
                        claim.target[:] = piece
                        sender.stream.settle(claim, written=True)
                    else:
                        sender.stream.write(offset, piece, None)
                    sender.sent.add(offset)
            except GenserveError:
                self.leave(sender)
                return
            if ends:
                sender.finishing = asyncio.ensure_future(sender.stream.finish())
                sender.finishing.add_done_callback(lambda done: self.hear(sender, done))
            await self.settle()

        self.run(send_all())

    @rule(number=_NUMBERS)
    def cut(self, number: int) -> None:
        """A stream breaks."""
        if self.senders:
            self.run(in_loop(self.leave, pick(self.senders, number)))
            self.run(self.settle())

    @rule(number=_NUMBERS, what=st.sampled_from(["commit", "commit", "discard", "force"]))
    def decide(self, number: int, what: str) -> None:
        """Somebody commits a push, or gives it up."""
        if not self.launches:
            return
        push_id = pick(self.launches, number).push_id

        async def act() -> None:
            if what == "commit":
                self.calls.append(asyncio.ensure_future(self.registry.commit(push_id, ApplyOptions())))
            else:
                with suppress(GenserveError):
                    self.registry.discard(push_id, force=what == "force")
            await self.settle()

        self.run(act())

    @rule(what=st.sampled_from(["prepare_weights", "commit_weights", "hold up", "let go", "let go"]))
    def disturb(self, what: str) -> None:
        """The next apply fails at a step, or preparations wait until they are let go."""
        if what == "hold up":
            self.engine.gates.setdefault("prepare_weights", Gate())
        elif what == "let go":
            self.let_go()
        else:
            self.engine.fails[what] = PushRolledBackError("ordered")

    def let_go(self) -> None:
        """What waits goes on."""
        gate = self.engine.gates.pop("prepare_weights", None)
        if gate is not None:
            gate.open.set()
        self.run(self.settle())

    @rule(seconds=st.sampled_from([1.0, TTL_S / 2, TTL_S + 1]))
    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.now_s += seconds

        async def notice() -> None:
            self.registry.live.changed.notify()
            await self.settle()

        self.run(notice())

    def leave(self, sender: Sender) -> None:
        """The stream is over."""
        if sender in self.senders:
            self.senders.remove(sender)
            if sender.finishing is not None:
                sender.finishing.cancel()
            sender.stream.detach()

    def hear(self, sender: Sender, done: "asyncio.Future[PushOutcome]") -> None:
        """What a stream is told, which is the end of it."""
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self.told.append((sender, done.result()))
        elif not isinstance(error, GenserveError):
            raise AssertionError("an internal error") from error
        self.leave(sender)

    @invariant()
    def what_is_live_is_what_one_attempt_meant(self) -> None:
        """The bytes of a version are all of one launch."""
        live = self.engine.live["a"] + self.engine.live["b"]
        assert live in self.meant[self.engine.weight_version], "a torn version is live"
        assert self.engine.misuses == []

    @invariant()
    def workers_hold_what_waits_for_its_commit(self) -> None:
        """One version at most."""
        waiting = [p for p in self.registry.live.values() if p.lifecycle.state is State.PREPARED]
        assert len(waiting) <= 1
        assert not waiting or (self.rig.applier.holds(waiting[0]) and self.engine.prepared)

    @invariant()
    def who_is_told_that_it_is_applied_had_its_bytes_applied(self) -> None:
        """Nobody's bytes are dropped, or taken for others, and reported as live."""
        for sender, outcome in self.told:
            if outcome.push.state is PushState.APPLIED and self.engine.weight_version == sender.launch.version:
                live = self.engine.live["a"] + self.engine.live["b"]
                offsets = range(0, len(live), 4) if sender.takes_part else sender.sent
                assert all(live[o : o + 4] == sender.launch.data[o : o + 4] for o in offsets), "others' bytes are live"
        self.told = [(s, o) for s, o in self.told if s.launch.version >= self.engine.weight_version]

    def teardown(self) -> None:
        self.let_go()
        self.engine.fails.clear()
        self.run(self.end())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.directory.cleanup()
        is_clean = num_open_arenas() == self.num_arenas or num_arenas() == self.num_arenas
        assert is_clean, "memory of a push was left behind"

    async def end(self) -> None:
        """Whatever has happened, the next push works, and nothing is left."""
        for sender in list(self.senders):
            self.leave(sender)
        await asyncio.gather(*self.calls, return_exceptions=True)
        await self.settle()
        fresh = header("fresh", max(self.meant) + 1, attempt="fresh")
        while True:
            try:
                stream = await self.registry.open(fresh)
                break
            except GenserveError as error:  # something staged takes the room
                for push_id in {launch.push_id for launch in self.launches} & self.registry.live.keys():
                    self.registry.discard(push_id, force=True)
                assert not isinstance(error, PushConflictError)
        stream.write(0, weights(7), None)
        assert (await stream.finish()).push.state is PushState.APPLIED
        stream.detach()
        assert self.engine.running
        async with self.rig.applier.between_pushes(30.0):
            assert self.engine.prepared == {}, "workers hold what nobody will use"
        for task in self.rig.background:
            assert not task.done()
            task.cancel()
        await asyncio.wait(self.rig.background)
        await self.registry.close()
        self.rig.resident.release_memory()


TestPushes = pytest.mark.slow(Pushes.TestCase)
TestPushes.settings = settings(
    max_examples=int(os.environ.get("GENSERVE_PUSH_MODEL_EXAMPLES", "200")),
    stateful_step_count=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
