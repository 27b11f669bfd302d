"""A daemon that takes updates through a transfer backend of vLLM's, `file_transfer`."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from genserve.client import AsyncClient
from tests.support import models
from tests.support.daemon_process import DaemonProcess

BACKEND = "file"
FLAGS = (
    "--worker-extension-cls",
    "tests.engine.file_transfer.FileTransferExtension",
    "--weight-transfer-config",
    f'{{"backend": "{BACKEND}"}}',
)
STRANGER = "stranger.weight"
"""A tensor that the model does not have, in every file."""

Digests = dict[tuple[str, str], str]


@dataclass
class TransferSubject:
    """The daemon, its client, and two checkpoints. Their heads are not tied: on the CPU vLLM's reload leaves a tied
    head as it was (test_vllm_trap)."""

    daemon: DaemonProcess
    client: AsyncClient
    checkpoints: dict[str, Path]
    directory: Path

    async def next_version(self) -> int:
        """One above the served version."""
        return (await self.client.get_weights()).weight_version + 1

    async def digests(self) -> Digests:
        """Of every live tensor."""
        return (await self.client.get_weights(include_digests=True)).digests

    async def push(self, name: str) -> Digests:
        """A clean push of a checkpoint; the digests afterwards."""
        await self.client.push_weights(self.checkpoints[name], version=await self.next_version())
        return await self.digests()

    async def init(self) -> None:
        """Tells the workers where the files lie."""
        await self.client.init_weight_transfer({"directory": str(self.directory)})

    async def send(self, name: str, *, timeout_s: float = 60.0, **orders: Any) -> None:
        """All tensors of a checkpoint, in the update that is open; `orders` as in `FileUpdateInfo`."""
        info = {"file": f"{name}.safetensors", "names": self.save(name), **orders}
        await self.client.update_weights(info, timeout_s=timeout_s)

    def save(self, name: str) -> list[str]:
        """Writes the file of a checkpoint, unless it is there; the names of its tensors."""
        path = self.directory / f"{name}.safetensors"
        if not path.exists():
            save_file({**models.load_tensors(self.checkpoints[name]), STRANGER: torch.zeros(2, 2)}, path)
        with safe_open(path, "pt") as file:
            return sorted(set(file.keys()) - {STRANGER})

    async def update(self, name: str, **orders: Any) -> None:
        """An update to a checkpoint, from start to finish."""
        await self.client.start_weight_update()
        await self.send(name, **orders)
        await self.client.finish_weight_update()

    async def until_running(self) -> None:
        """Waits until the engine generates again."""
        async with asyncio.timeout(60), self.client.watch_status() as statuses:
            async for status in statuses:
                if status.state.phase == "running":
                    return
