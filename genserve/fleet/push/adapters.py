"""Adapters of the fleet: loaded on all replicas from a directory, or pushed and brought to those that lack one."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from genserve.errors import (
    DeadlineError,
    LoraNotFoundError,
    NoReplicaError,
    PushConflictError,
    PushNotFoundError,
    UnavailableError,
)
from genserve.fleet.everywhere import everywhere, of_all, write_record
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.spread import relay
from genserve.fleet.upstream import ASK_S, Upstream, load_lora_s
from genserve.forward.upstream import frames_of
from genserve.routing.replica import ReplicaState
from genserve.v1 import control_pb2, weights_pb2

_BRING_S: Final = 300.0


async def ask_loras(upstream: Upstream) -> None:
    """Reads which adapters a replica has loaded."""
    answer = await upstream.ask(upstream.control.ListLoras, control_pb2.ListLorasRequest(), ASK_S)
    upstream.member.reported_loras(answer.loras)


async def bring_pushed_lora(fleet: Fleet, upstream: Upstream, name: str, push_id: str) -> None:
    """Loads an adapter on a replica from another one that has it. Raises NoReplicaError if none does, and the error
    of either."""
    await ask_loras(upstream)  # what it told last may be older than what it was told to load
    if upstream.member.pushed_loras.get(name) == push_id:
        return
    others = [each for each in fleet.in_state(ReplicaState.READY, ReplicaState.DRAINING) if each is not upstream]
    sources = [each for each in others if each.member.pushed_loras.get(name) == push_id]
    if not sources:
        raise NoReplicaError(f"it lacks adapter {name!r}, and no other replica has it: push it again")
    random.shuffle(sources)
    try:
        async with asyncio.timeout(_BRING_S):
            await _hand_from_any(sources, upstream, name, push_id)
    except TimeoutError:
        raise DeadlineError(f"adapter {name!r} was not loaded within {_BRING_S:g} s") from None
    await ask_loras(upstream)
    if upstream.member.pushed_loras.get(name) == push_id != fleet.desired.pushed_loras.get(name):
        # It was unloaded, or replaced, meanwhile: nothing else would unload what has come too late.
        await upstream.ask(upstream.control.UnloadLora, control_pb2.UnloadLoraRequest(lora_name=name), ASK_S)
        await ask_loras(upstream)


async def _hand_from_any(sources: Sequence[Upstream], target: Upstream, name: str, push_id: str) -> None:
    """From the first that can send it. Raises the error of the last, or of the target."""
    num_losses = target.member.num_losses
    for number, source in enumerate(sources, 1):
        try:
            await _hand(source, target, name, push_id)
            return
        except (NoReplicaError, PushConflictError, PushNotFoundError, UnavailableError) as error:
            if isinstance(error, PushConflictError):
                # It has a part of it from another source, where the adapter has another version.
                with suppress(PushNotFoundError):
                    request = weights_pb2.DiscardPushRequest(push_id=push_id)  # not what somebody sends
                    await target.ask(target.weights.DiscardPush, request, ASK_S)
            if number == len(sources) or target.member.was_lost_since(num_losses):
                raise


async def _hand(source: Upstream, target: Upstream, name: str, push_id: str) -> None:
    """As a trainer sends it: a pull has the frames of a push."""
    request = weights_pb2.PullWeightsRequest(push_id=push_id).SerializeToString()
    call = source.pull(request, metadata=source.metadata)
    with source.running(call):
        frames = frames_of(call, source)
        header = weights_pb2.PullWeightsResponse.FromString(await anext(frames, b"")).header
        if header.lora.lora_name != name:
            raise NoReplicaError(f"{source.address} does not send adapter {name!r} for push {push_id!r}")
        header.force = True  # it may have another one under this name
        await relay(header, frames, [target], asyncio.Event())


class FleetLoras:
    """Loads and unloads adapters on all replicas that answer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._loading: set[asyncio.Task[control_pb2.Lora]] = set()

    async def load(self, request: control_pb2.LoadLoraRequest) -> control_pb2.Lora:
        """Loads one on all, from the same path on each host; if one fails, the others unload it again, unless they had
        one of this name. What was begun goes on if this is cancelled, as it does on the replicas."""
        await self._fleet.until_known()
        turn = await self._fleet.lora_turns.take(request.lora_name)
        loading = asyncio.create_task(self._load(request, turn), name="load an adapter")
        self._loading.add(loading)
        loading.add_done_callback(self._loaded)
        return await asyncio.shield(loading)

    def _loaded(self, task: "asyncio.Task[control_pb2.Lora]") -> None:
        self._loading.discard(task)
        if not task.cancelled():
            task.exception()  # if nobody waits for it

    async def _load(self, request: control_pb2.LoadLoraRequest, turn: asyncio.Lock) -> control_pb2.Lora:
        """As `load`, for the caller that holds `turn`; releases it."""
        fleet, name, limit_s = self._fleet, request.lora_name, load_lora_s(request)
        desired = fleet.desired
        had: list[Upstream] = []

        async def load_one(upstream: Upstream) -> control_pb2.LoadLoraResponse:
            if name in (upstream.member.lora_names or ()):
                had.append(upstream)
            return await upstream.ask(upstream.control.LoadLora, request, limit_s)

        async def undo(upstream: Upstream) -> None:
            if upstream not in had:
                await _unload_on(upstream, control_pb2.UnloadLoraRequest(lora_name=name))

        try:
            with desired.changing_lora(name), desired.loading(name, request.path):
                answers = await of_all(fleet, load_one, undo)
                await everywhere(fleet.answering, ask_loras)  # before they are taken to lack it, and load it again
            desired.pushed_loras.pop(name, None)
            desired.loras[name] = request.path
            fleet.changed()
        finally:
            fleet.refresh()  # also if it has failed: who lacks the one before gets it
            turn.release()
        await write_record(fleet)
        return together([answer.lora for answer in answers])

    async def unload(self, request: control_pb2.UnloadLoraRequest) -> control_pb2.Lora:
        """Removes one from all that have it. Raises LoraNotFoundError if none has."""
        fleet = self._fleet
        await fleet.until_known()
        missing: list[LoraNotFoundError] = []

        async def unload_one(upstream: Upstream) -> control_pb2.UnloadLoraResponse | None:
            try:
                return await _unload_on(upstream, request)
            except LoraNotFoundError as error:
                missing.append(error)
                return None

        async with fleet.lora_turns.taken(request.lora_name):
            fleet.forget_lora(request.lora_name)  # first: a replica that has unloaded it must not load it again
            try:
                answers = await of_all(fleet, unload_one)
            finally:
                fleet.refresh()  # others are told as well which adapters replicas have
        await write_record(fleet)
        unloaded = [answer.lora for answer in answers if answer is not None]
        if not unloaded:
            raise missing[0].again()
        return together(unloaded)

    async def all(self) -> control_pb2.ListLorasResponse:
        """Those that all replicas have."""
        request = control_pb2.ListLorasRequest()
        answers = await of_all(self._fleet, lambda each: each.ask(each.control.ListLoras, request, ASK_S))
        by_name = [{lora.lora_name: lora for lora in answer.loras} for answer in answers]
        names = sorted(set.intersection(*(set(each) for each in by_name)))
        return control_pb2.ListLorasResponse(
            loras=[together([each[name] for each in by_name]) for name in names],
            max_loras=min(answer.max_loras for answer in answers),
        )


async def _unload_on(upstream: Upstream, request: control_pb2.UnloadLoraRequest) -> control_pb2.UnloadLoraResponse:
    """Unloads one on a replica, which is known not to have it from then on: its next report comes later, and a LoadLora
    that fails takes the adapter away only from those that did not have it before."""
    answer = await upstream.ask(upstream.control.UnloadLora, request, ASK_S)
    upstream.member.unloaded_lora(request.lora_name)
    return answer


def together(loras: list[control_pb2.Lora]) -> control_pb2.Lora:
    """One adapter as all replicas have it: its requests are summed, and its version is the lowest."""
    lora = control_pb2.Lora()
    lora.CopyFrom(loras[0])
    lora.running_requests = sum(each.running_requests for each in loras)
    lora.lora_version = min(each.lora_version for each in loras)
    return lora
