"""What trainers wrap a module in, or its layers, and a group of one rank for those that need one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

Wrap = Callable[[Any], torch.nn.Module]


@contextmanager
def only_rank() -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _layers(model: torch.nn.Module, wrap: Wrap) -> torch.nn.Module:
    """Wraps each layer of each stack of layers."""
    for name, stack in list(model.named_modules()):
        if isinstance(stack, torch.nn.ModuleList) and name.rpartition(".")[2] == "layers":
            for number, layer in enumerate(stack):
                stack[number] = wrap(layer)
    return model


def _sharded(model: torch.nn.Module) -> torch.nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


WRAPPERS: Mapping[str, Wrap] = {
    "plain": lambda model: model,
    "compile": torch.compile,
    "compiled layers": lambda model: _layers(model, torch.compile),
    "compiled in place": lambda model: model.compile() or model,
    "data parallel": DataParallel,
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "fsdp": lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")),
    "fsdp2": _sharded,
    "fsdp2 of compiled layers": lambda model: _sharded(_layers(model, torch.compile)),
    "checkpointing": lambda model: _layers(model, checkpoint_wrapper),
    "compiled checkpointing": lambda model: _layers(model, lambda layer: torch.compile(checkpoint_wrapper(layer))),
    "all of them": lambda model: DistributedDataParallel(
        torch.compile(_layers(model, lambda layer: checkpoint_wrapper(torch.compile(layer))))
    ),
}
