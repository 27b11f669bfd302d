"""Workers of vLLM that have loaded a model on the (fake) GPU, in this process and without an engine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch

from tests.support import models
from tests.support.fake_cuda import runtime
from tests.support.matrix import Kind, kind_named
from tests.support.on_cpu import Digests, digests_of, loaded_worker, vllm_config_of

_UTILIZATION = 0.92
_ALLOCATIONS = "allocation.all.allocated"
_OPTIONS = {"--moe-backend": "moe_backend", "--quantization": "quantization"}


def _large(directory: Path) -> tuple[Path, Path]:
    a = models.tiny_qwen3(directory / "a", seed=0, hidden=1536, num_layers=4)
    return a, models.perturbed(a, directory / "b", seed=1, scale=0.5)


LARGE = Kind("large", _large)
"""Its matrices have megabytes: they go through the pinned ring, more of them than it has slots."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kind of model: `worker` serves checkpoint a, and `cold` is what a cold start of each checkpoint has."""

    kind: Kind
    worker: Any
    checkpoints: dict[str, Path]
    cold: dict[str, Digests]

    @classmethod
    def of(cls, kind: Kind, directory: Path) -> "Loaded":
        """Writes the checkpoints and loads both."""
        checkpoints = dict(zip("ab", kind.make(directory), strict=True))
        config = vllm_config_of(checkpoints["a"], **_options(kind))
        workers = {name: _worker(config, checkpoints[name]) for name in "ba"}  # the configuration stays that of a
        return cls(kind, workers["a"], checkpoints, {name: digests_of(worker) for name, worker in workers.items()})

    def update(self, way: str) -> "Updated":
        """What takes new versions in this way."""
        from genserve.worker.contract.vllm_settings import WEIGHT_UPDATE_KEY
        from genserve.worker.update.choice import make_update

        self.worker.vllm_config.additional_config = {WEIGHT_UPDATE_KEY: way}
        update, chosen = make_update(self.worker)
        update.audit()
        return Updated(self, update, chosen)

    def differing(self, name: str) -> list[str]:
        """The live tensors that are not those of a cold start of this checkpoint."""
        live, cold = digests_of(self.worker), self.cold[name]
        return sorted(each for each in live | cold if live.get(each) != cold.get(each))


@dataclass(frozen=True, slots=True)
class Updated:
    """A loaded model that takes new versions."""

    loaded: Loaded
    update: Any
    chosen: Any

    def prepare(self, name: str) -> None:
        """As a worker's background thread does it."""
        tensors = list(models.load_tensors(self.loaded.checkpoints[name]).items())
        with self.chosen.device.work():
            self.update.prepare(tensors, Event())

    def commit(self) -> None:
        """Exchanges. Raises AssertionError if it allocates memory of the device, of the driver or of torch's cache."""
        before = torch.cuda.memory_stats()[_ALLOCATIONS]
        with runtime.without_allocations():
            self.update.commit()
        if self.chosen.placement.way != "inplace":  # which loads in the pause, in the memory of the pool
            made = torch.cuda.memory_stats()[_ALLOCATIONS] - before
            assert made == 0, f"the pause allocates {made} times"

    def push(self, name: str) -> list[str]:
        """Prepares, exchanges and frees; the live tensors that differ from a cold start then."""
        self.prepare(name)
        self.commit()
        self.update.discard()
        return self.loaded.differing(name)


@contextmanager
def engine(directory: Path) -> Iterator[None]:
    """What vLLM needs of a process before it loads models."""
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    torch.cuda.set_device(0)
    init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
    # With experts first vLLM makes the process groups that all kinds need, and it makes them once.
    vllm_config_of(kind_named("experts").make(directory)[0])
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


def _options(kind: Kind) -> dict[str, Any]:
    flags = dict(zip(kind.flags[::2], kind.flags[1::2], strict=True))
    options: dict[str, Any] = {_OPTIONS[name]: value for name, value in flags.items() if name in _OPTIONS}
    if "--speculative-config" in flags:
        options["speculative_config"] = json.loads(flags["--speculative-config"])
    return options


def _worker(config: Any, checkpoint: Path) -> Any:
    """With what vLLM's GPU worker has before it sizes its KV cache."""
    worker = loaded_worker(config, checkpoint)
    _, total = torch.cuda.mem_get_info()
    worker.device = torch.device("cuda", 0)
    worker.cache_config = config.cache_config
    worker.requested_memory = int(_UTILIZATION * total)
    worker.init_snapshot = SimpleNamespace(free_memory=total)
    worker.model_runner.kv_caches = []
    return worker
