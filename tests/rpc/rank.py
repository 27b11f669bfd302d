"""A rank of a trainer on the CPU, with gloo, that takes part in pushes: run as a program.

    python -m tests.rpc.rank SCENARIO ADDRESS STORE RANK

STORE is a file that the two ranks meet at. Prints, as JSON, what each call of the scenario answered. Its tensors are
those of `weights`, which the test computes as well.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from genserve.client import AsyncClient, Client
from genserve.errors import GenserveError

NUM_RANKS = 2
PLACEMENTS: dict[str, Placement | None] = {
    "columns": Shard(1), "even": Shard(0), "experts": Shard(1), "plain": None, "replicated": Replicate(),
    "scalar": Replicate(), "short": Shard(0), "uneven": Shard(0),
}  # fmt: skip
SHAPES = {
    "columns": (4, 6), "even": (6, 4), "experts": (3, 5, 2), "plain": (3,), "replicated": (2, 3), "scalar": (),
    "short": (1, 4), "uneven": (5, 3),
}  # fmt: skip


def weights(version: int) -> dict[str, torch.Tensor]:
    """Whole tensors, in other values for each version; one row of "short", so that a rank has none of it."""
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) + 100 * version + index / 8
        found[name] = values.to(torch.bfloat16) if name in ("experts", "uneven") else values
    return found


class Model(torch.nn.Module):
    """A head that is the embedding, of an odd number of rows, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))


def stepped(model: Model) -> Model:
    """After a step of an optimiser, as it were."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def sharded(version: int) -> dict[str, torch.Tensor]:
    """`weights` as they are spread over the ranks."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    tensors = weights(version)
    return {
        name: tensors[name] if placement is None else distribute_tensor(tensors[name], mesh, [placement])
        for name, placement in PLACEMENTS.items()
    }


Push = Callable[..., Any]


def placements(push: Push, rank: int) -> None:
    """Every placement; then on several streams, one frame for a few bytes."""
    push(sharded(1), version=1, push_id="p1")
    push(sharded(2), version=2, push_id="p2", streams=3, chunk_bytes=5)
    push(sharded(2), version=2, push_id="p2")  # a repeat


def fsdp(push: Push, rank: int) -> None:
    """A module before and after a step."""
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (NUM_RANKS,)))
    push(model, version=1, push_id="p1")
    push(stepped(model).state_dict(), version=2, push_id="p2")


def refused(push: Push, rank: int) -> None:
    """What cannot be sent as it lies is refused on every rank before anything is sent; redistributed it is sent."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    rows = torch.arange(20000.0).reshape(10000, 2)
    columns = {"rows": distribute_tensor(rows, mesh, [Shard(1)])}
    push(columns, version=1, push_id="p1")
    push({"sum": DTensor.from_local(rows, mesh, [Partial()])}, version=1, push_id="p1")
    push({"w": distribute_tensor(torch.ones(2), mesh, [Shard(0)])}, version=1)
    push({"rows": columns["rows"].redistribute(placements=[Shard(0)])}, version=1, push_id="p1")


def other_version(push: Push, rank: int) -> None:
    """Rank 1 brings version 3 under the id of version 1."""
    push(sharded(1), version=1 + 2 * rank, push_id="p", timeout_s=6)


def other_tensors(push: Push, rank: int) -> None:
    """Rank 1 has a tensor less."""
    tensors = sharded(1)
    if rank == 1:
        del tensors["plain"]
    push(tensors, version=1, push_id="p", timeout_s=6)


def dies(push: Push, rank: int) -> None:
    """Rank 1 is killed after its first bytes; rank 0 goes on, alone, until its deadline."""
    tensors = sharded(1)
    if rank == 1:
        asyncio.run(die_pushing(tensors))
    push(tensors, version=1, push_id="p", timeout_s=6)


async def die_pushing(tensors: dict[str, torch.Tensor]) -> None:
    """Ends this process between two frames of its push: on the event loop that sends them. In a blocking client it goes
    on sending while another thread is told of the progress, and may be done by then."""
    async with AsyncClient(sys.argv[2]) as client:
        await client.push_weights(tensors, version=1, push_id="p", chunk_bytes=8, progress=lambda progress: os._exit(9))


def answer(client: Client, *arguments: Any, **options: Any) -> None:
    """Pushes, and prints what came of it."""
    sent: list[int] = [0]
    options.setdefault("progress", lambda progress: sent.append(progress.sent_bytes))
    try:
        result = client.push_weights(*arguments, **options)
    except (GenserveError, ValueError) as error:
        told: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
    else:
        told = {"version": result.applied and result.applied.active_version, "sent": sent[-1]}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    scenario, address, store, rank = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=NUM_RANKS)
    with Client(address) as client:
        globals()[scenario](partial(answer, client), int(rank))
    os._exit(0)  # the other rank may be gone, which destroy_process_group would wait for
