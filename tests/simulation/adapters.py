"""Who pushes adapters to a fleet and unloads them, and what has to be loaded in the end."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from genserve.errors import GenserveError, LoraNotFoundError
from genserve.forward.upstream import may_have_done
from genserve.v1 import control_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from tests.simulation.clients import ASK_S, PUSH_S, Client
from tests.simulation.events import AdapterChange
from tests.simulation.replica import Replica

_NAMES = ("poet", "cook")
_CONFIG = json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["q"]})
_TENSORS = (("base_model.model.q.lora_A.weight", [2, 4], 32), ("base_model.model.q.lora_B.weight", [6, 2], 48))


class Adapters(Client):
    """Pushes adapters, and unloads them."""

    num_pushed = 0
    replicas: Sequence[Replica]

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self.drawn.expovariate(1 / 4.0))
            name = self.drawn.choice(_NAMES)
            if self.drawn.random() < 0.7:
                await self._push(name)
            else:
                await self._unload(name)

    async def _push(self, name: str) -> None:
        self.num_pushed += 1
        change = AdapterChange(name, f"adapter-{self.num_pushed}")
        self.events.adapters.append(change)
        for _ in range(4):
            try:
                stub = WeightServiceStub(self.channel())
                await self.ask(
                    f"{change.push_id} as {name}", stub.PushWeights, self._frames(name, change.push_id), PUSH_S
                )
                change.told_s = self.events.now_s
                return
            except GenserveError as error:
                if not may_have_done(error):
                    return
                await asyncio.sleep(self.drawn.random() * 2)

    async def _unload(self, name: str) -> None:
        change = AdapterChange(name, "")
        self.events.adapters.append(change)
        request = control_pb2.UnloadLoraRequest(lora_name=name)
        for _ in range(4):
            try:
                await self.ask(f"unload {name}", ControlServiceStub(self.channel()).UnloadLora, request, ASK_S)
            except LoraNotFoundError:
                pass  # it is not there, as it should be
            except GenserveError as error:
                if not may_have_done(error):
                    return
                await asyncio.sleep(self.drawn.random() * 2)
                continue
            change.told_s = self.events.now_s
            change.left_at = frozenset(each.address for each in self.replicas if name in each.adapters)
            return

    async def _frames(self, name: str, push_id: str) -> AsyncIterator[weights_pb2.PushWeightsRequest]:
        header = weights_pb2.PushHeader(push_id=push_id)
        header.lora.lora_name, header.lora.config = name, _CONFIG
        for tensor, shape, length in _TENSORS:
            offset = header.manifest.total_bytes
            header.manifest.tensors.add(name=tensor, dtype="F32", shape=shape, offset=offset, length=length)
            header.manifest.total_bytes = offset + length
        yield weights_pb2.PushWeightsRequest(header=header)
        data = push_id.encode().ljust(header.manifest.total_bytes, b".")
        yield weights_pb2.PushWeightsRequest(chunk=weights_pb2.PushChunk(offset=0, data=data))
        await asyncio.sleep(self.drawn.random() * 0.2)
        yield weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd())


def lacking(changes: Sequence[AdapterChange], replicas: Sequence[Replica]) -> list[str]:
    """What is not as the last change of each adapter says that was told as done; one whose outcome nobody was told
    says nothing, and neither does one whose adapter nobody has had since."""
    found = []
    for name in _NAMES:
        last = next((each for each in reversed(changes) if each.lora_name == name), None)
        if last is None or not last.is_told or last.is_lost:
            continue
        for replica in replicas:
            if replica.adapters.get(name, "") != last.push_id and replica.address not in last.left_at:
                there, wanted = replica.adapters.get(name, "none"), last.push_id or "none"
                found.append(f"adapter {name}: {replica.address} has {there} instead of {wanted}")
    return found
