"""A backend for vLLM's own weight transfer that works on the CPU: tensors go through files. None of vLLM's does.

The worker's half is registered where the worker imports this module: `--worker-extension-cls
tests.engine.file_transfer.FileTransferExtension`. The trainer's half goes by the names that
clients/python/vllm_trainer.py imports: from here, that program drives this backend.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from genserve.integrations.vllm_sync import GenserveWeightSyncClient
from genserve.worker.extension import WeightExchangeExtension
from tests.support.patience import slow

__all__ = ["FileTransferExtension", "GenserveTrainerInitInfo", "GenserveWeightSyncClient"]


class FileTransferExtension(WeightExchangeExtension):
    """genserve's extension, and this module with it."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Where the files lie."""

    directory: str


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """One file. `fails_before`: a tensor that cannot be read; `takes_s`: seconds that receiving takes at least;
    `fails_to_finish`: so does the update."""

    file: str
    names: list[str] = field(default_factory=list)
    fails_before: str = ""
    takes_s: float = 0.0
    fails_to_finish: bool = False


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """The worker's half, as NCCL's and IPC's are: over vLLM's layerwise reload."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Remembers the directory."""
        if not Path(init_info.directory).is_dir():
            raise ValueError(f"there is no directory {init_info.directory}")
        self._directory = Path(init_info.directory)

    def start_weight_update(self) -> None:
        """Takes the live layers apart."""
        self._fails_to_finish = False
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class's waits for an accelerator, and fails without one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Loads a file."""
        asyncio.run(slow(update_info.takes_s))
        self._fails_to_finish = update_info.fails_to_finish
        tensors = load_file(self._directory / update_info.file)

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name in update_info.names:
                if name == update_info.fails_before:
                    raise RuntimeError(f"ordered to fail before {name}")
                yield name, tensors[name]

        self.model.load_weights(read())

    def finish_weight_update(self) -> None:
        """Puts the layers together again."""
        if self._fails_to_finish:
            raise RuntimeError("ordered to fail to finish")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Holds nothing."""


@dataclass
class GenserveTrainerInitInfo(TrainerInitInfo):
    """The trainer's half needs nothing but its rank."""

    backend: ClassVar[str] = "file"


class FileTrainerEngine(TrainerWeightTransferEngine[GenserveTrainerInitInfo]):
    """The trainer's half: two files for each update."""

    init_info_cls = GenserveTrainerInitInfo

    @classmethod
    def trainer_init(cls, init_info: GenserveTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Tells the workers where the files will lie."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._directory = tempfile.TemporaryDirectory()
        client.init_weight_transfer_engine(asdict(FileInitInfo(engine._directory.name)))
        return engine

    def send_weights(self) -> None:
        """The four-phase protocol."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.source}
        names = list(tensors)
        self.client.start_weight_update()
        for number, part in enumerate((names[::2], names[1::2])):
            file = f"{number}.safetensors"
            save_file({name: tensors[name] for name in part}, Path(self._directory.name) / file)
            self.client.update_weights(asdict(FileUpdateInfo(file, part)))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Removes the files."""
        self._directory.cleanup()

    _directory: "tempfile.TemporaryDirectory[str]"


WeightTransferEngineFactory.register_engine("file", FileTransferEngine)
WeightTransferTrainerFactory.register_engine("file", FileTrainerEngine)
