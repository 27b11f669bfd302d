"""Adapters that were pushed to the fleet: which replica lacks one, and how it gets it."""

import asyncio
from typing import Final

from genserve.errors import DeadlineError, NoReplicaError
from genserve.fleet.deadlines import ASK_S
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.relay import relay
from genserve.fleet.upstream import Upstream
from genserve.forward.upstream import frames_of
from genserve.routing.replica import ReplicaState
from genserve.v1 import control_pb2, weights_pb2

_BRING_S: Final = 300.0


async def ask_loras(upstream: Upstream) -> None:
    """Reads which adapters a replica has loaded."""
    answer = await upstream.ask(upstream.control.ListLoras, control_pb2.ListLorasRequest(), ASK_S)
    upstream.member.told_loras(answer.loras)


async def bring_pushed_lora(fleet: Fleet, upstream: Upstream, name: str, push_id: str) -> None:
    """Loads an adapter on a replica from another one that has it. Raises NoReplicaError if nobody does, and the error
    of either."""
    await ask_loras(upstream)  # what it told last may be older than what it was told to load
    if upstream.member.pushed_loras.get(name) == push_id:
        return
    others = [each for each in fleet.in_state(ReplicaState.READY, ReplicaState.DRAINING) if each is not upstream]
    source = next((each for each in others if each.member.pushed_loras.get(name) == push_id), None)
    if source is None:
        raise NoReplicaError(f"it lacks adapter {name!r}, and no other replica has it: push it again")
    try:
        async with asyncio.timeout(_BRING_S):
            await _hand(source, upstream, name, push_id)
    except TimeoutError:
        raise DeadlineError(f"adapter {name!r} was not loaded within {_BRING_S:g} s") from None
    await ask_loras(upstream)
    if upstream.member.pushed_loras.get(name) == push_id != fleet.desired.pushed_loras.get(name):
        # It was unloaded, or replaced, meanwhile: nobody would take away what has come too late.
        await upstream.ask(upstream.control.UnloadLora, control_pb2.UnloadLoraRequest(lora_name=name), ASK_S)
        await ask_loras(upstream)


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
