"""Adapters that the router brings to a replica that lacks them, and what is in the way of one."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from genserve.aio import Backoff
from genserve.client import AsyncClient
from genserve.errors import NoReplicaError, UnavailableError
from genserve.fleet import sync
from genserve.fleet.push import adapters
from tests.fleet.routers import HOUR_S, adapting, hold, linked, loaded, over, push, until_reached
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.scripted_adapter import CONFIG, TENSORS, adapter
from tests.support.scripted_engine import Gate


async def test_an_adapter_that_no_replica_has_any_more_is_reported() -> None:
    """Where operators look; nothing is routed to who lacks it."""
    async with adapting() as second, linked(1, opened=adapting) as fleet:
        await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="p")
        fleet.links[0].kill()
        await until(lambda: not fleet.running.router.fleet.ready)
        fleet.running.router.add(second.address)
        await fleet.until_ready(1)
        await until(lambda: "push it again" in fleet.running.router.find(second.address).member.sync_failure)
        (reason,) = [
            each.reason for each in (await fleet.client.list_replicas()).replicas if each.address == second.address
        ]
        assert "'poet'" in reason and "push it again" in reason


async def test_an_adapter_that_nobody_has_any_more_keeps_no_other_one_away() -> None:
    """A replica that joins gets those that somebody has, whatever their names are."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            for name in ("cook", "poet"):
                await fleet.client.push_lora(name, TENSORS, CONFIG, push_id=name)
            daemons[0].engine.loras.unload("cook")
            await fleet.until_reported()
            fleet.running.router.add(daemons[1].address)
            await until(lambda: "poet" in daemons[1].engine.loras.files)


async def test_an_adapter_that_a_replica_cannot_take_keeps_no_other_one_away() -> None:
    """One is too large for it; that is told where operators look."""
    large_a = {name: tensor.repeat(1, 1 << 10) for name, tensor in TENSORS.items() if "lora_A" in name}
    large = TENSORS | large_a
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(adapting())
        second = await stack.enter_async_context(adapting(max_staging_bytes=1 << 12))
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            for name, tensors in (("cook", large), ("poet", TENSORS)):
                await fleet.client.push_lora(name, tensors, CONFIG, push_id=name)
            fleet.running.router.add(second.address)
            await until(lambda: "poet" in second.engine.loras.files)
            member = fleet.running.router.find(second.address).member
            await until(lambda: "--max-staging-bytes" in member.sync_failure)
            assert "cook" not in second.engine.loras.files


async def test_a_replica_that_fails_to_take_an_adapter_is_brought_to_a_version_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no requests until then. The adapter is tried again later: its directory may come."""
    pauses = LongPauses(0.1, 0.1)
    monkeypatch.setattr(sync, "Backoff", lambda *_: pauses)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await push(fleet.running.address, 5)
            (tmp_path / "cook").mkdir()
            await fleet.client.load_lora("cook", adapter(tmp_path / "cook"))
            shutil.rmtree(tmp_path / "cook")
            fleet.running.router.add(daemons[1].address)
            member = fleet.running.router.find(daemons[1].address).member
            await until(lambda: "cook" in member.sync_failure)
            pauses.are_long = True
            await until(lambda: pauses.is_long)
            await push(daemons[1].address, 3, force=True)
            await until(lambda: member.version is not None and member.version.number == 3)
            await until(lambda: hold(5, daemons[1]))


async def test_a_version_that_a_replica_misses_while_it_gets_an_adapter_is_brought_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adapter cannot be had in the end."""
    pauses, is_asked, may_fail = LongPauses(0.1, 0.1), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(sync, "Backoff", lambda *_: pauses)

    async def bring(*_: object) -> None:
        is_asked.set()
        await may_fail.wait()
        raise NoReplicaError("it cannot be had")

    monkeypatch.setattr(sync, "bring_pushed_lora", bring)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await push(fleet.running.address, 5)
            await fleet.client.push_lora("cook", TENSORS, CONFIG, push_id="p")
            fleet.running.router.add(daemons[1].address)
            await is_asked.wait()
            pauses.are_long = True
            member = fleet.running.router.find(daemons[1].address).member
            await push(daemons[1].address, 3, force=True)
            await until(lambda: member.version is not None and member.version.number == 3)
            may_fail.set()
            await until(lambda: hold(5, daemons[1]))


class LongPauses(Backoff):
    """Of an hour, once they `are_long`. `is_long`: one has begun."""

    are_long = is_long = False

    def next_s(self) -> float:
        self.is_long = self.are_long
        return HOUR_S if self.is_long else super().next_s()


async def test_a_directory_that_a_replica_lacks_keeps_no_other_adapter_away(tmp_path: Path) -> None:
    """Each host has its own files."""
    names = ("cook", "poet")
    for name in names:
        (tmp_path / name).mkdir()
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            for name in names:
                await fleet.client.load_lora(name, adapter(tmp_path / name))
            await fleet.client.push_lora("guide", TENSORS, CONFIG, push_id="p")
            shutil.rmtree(tmp_path / "cook")
            fleet.running.router.add(daemons[1].address)
            await until(lambda: daemons[1].engine.loras.files.keys() == {"guide", "poet"})
            member = fleet.running.router.find(daemons[1].address).member
            await until(lambda: "cook" in member.sync_failure)


async def test_an_adapter_that_is_unloaded_while_another_one_loads_is_not_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a replica lacks is looked at again before each."""
    monkeypatch.setattr("random.shuffle", lambda items: None)  # the directory comes first
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("cook", adapter(tmp_path))
            await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="p")
            gate = daemons[1].engine.gates["load_lora"] = Gate()
            fleet.running.router.add(daemons[1].address)
            await until_reached(gate)
            await fleet.client.unload_lora("poet")
            gate.open.set()
            member = fleet.running.router.find(daemons[1].address).member
            await until(lambda: member.lora_names == {"cook"})
            await fleet.until_reported()
            assert member.sync_failure == ""


async def test_an_adapter_comes_from_whoever_can_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the replica that is asked first are gone, say to what tidies up its temporary directory."""
    monkeypatch.setattr("random.shuffle", lambda items: None)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(3)]
        async with over(daemons[:2]) as fleet:
            await fleet.until_ready()
            await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="p")
            first = fleet.running.router.fleet.ready[0].address
            (broken,) = [each for each in daemons if each.address == first]
            shutil.rmtree(broken.engine.loras.files["poet"].directory)
            fleet.running.router.add(daemons[2].address)
            await until(lambda: "poet" in daemons[2].engine.loras.files)
            assert fleet.running.router.find(daemons[2].address).member.sync_failure == ""


async def test_an_adapter_of_another_version_takes_the_place_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica that had begun to send it has lost it, and the next one has it under another number."""
    monkeypatch.setattr("random.shuffle", lambda items: None)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(3)]
        first, second, joining = *sorted(daemons[:2], key=lambda daemon: daemon.address), daemons[2]
        async with AsyncClient(first.address) as alone:
            for number in range(2):
                await alone.push_lora("poet", TENSORS, CONFIG, push_id=str(number))
        frames_of = adapters.frames_of

        async def breaking_off(call: Any, upstream: Any) -> AsyncIterator[bytes]:
            frames = frames_of(call, upstream)
            yield await anext(frames)  # its header
            if upstream.address == first.address:
                await until(lambda: joining.registry.live)
                first.engine.loras.unload("poet")
                raise UnavailableError("it is lost")
            async for frame in frames:
                yield frame

        monkeypatch.setattr(adapters, "frames_of", breaking_off)
        async with over([first, second]) as fleet:
            await fleet.until_ready()
            await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="p")
            assert [loaded(each)[1] for each in (first, second)] == [3, 1]
            fleet.running.router.add(joining.address)
            await until(lambda: "poet" in joining.engine.loras.files)
            assert loaded(joining) == ("push p", 1)


async def test_an_adapter_is_not_sent_again_to_a_replica_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the other replicas that have it, one after the other: each would wait until nobody answers."""
    asked, frames_of = list[str](), adapters.frames_of

    def noted(call: Any, upstream: Any) -> AsyncIterator[bytes]:
        asked.append(upstream.address)
        return frames_of(call, upstream)

    monkeypatch.setattr(adapters, "frames_of", noted)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(3)]
        link = await stack.enter_async_context(BreakableLink(daemons[2].address))
        async with over(daemons[:2]) as fleet:
            await fleet.until_ready()
            await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="p")
            gate = daemons[2].engine.gates["load_lora"] = Gate()
            stack.callback(gate.open.set)
            fleet.running.router.add(link.address)
            await until_reached(gate)
            link.silence()
            upstream = fleet.running.router.find(link.address)
            fleet.running.router.fleet.lost(upstream, "it is silent")
            await until(lambda: "it is silent" in caplog.text)  # a report that has come before forgets the failure
            assert len(asked) == 1
            link.let_go()
