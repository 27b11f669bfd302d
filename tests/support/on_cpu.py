"""What can be said without a GPU about the kinds of models of the matrix: run as a program, prints JSON.

    python -m tests.support.on_cpu DIRECTORY KIND...

Both checkpoints of a kind are loaded by vLLM, in this process and without an engine. Then pushes of both beside the
live model, and in place, have to leave what vLLM has loaded from them, and the third to need no loader. A kind
that the CPU backend cannot load is built on torch's meta device, and its tensors are loaded there: the names and the
shapes are vLLM's.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from tests.support import models
from tests.support.loader_calls import loader_calls
from tests.support.matrix import KINDS, Kind

_ELSEWHERE = frozenset({"dense", "dense-with-biases", "fp8-online", "gpt-oss-triton"})
"""Kinds whose checkpoints tests of the CPU push, or which another kind has as well."""

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""A tensor that loaders leave alone."""

Digests = dict[str, str]

CHECKED = tuple(kind for kind in KINDS if kind.name not in _ELSEWHERE)


def main(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """What is wrong with each of these kinds, "" if nothing."""
    import torch
    from vllm.distributed import init_distributed_environment

    # vLLM asks for it twice for each model that it loads, and each time all that was imported is walked: a third of
    # this program's time.
    gc.collect = lambda *_: 0
    for name in ("empty_cache", "synchronize"):  # loaders call them, and there is no accelerator
        setattr(torch.accelerator, name, lambda *_: None)
    init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
    # With experts first vLLM makes the process groups that all kinds need.
    asked = [kind for kind in CHECKED if kind.name in names]
    ordered = sorted(asked, key=lambda kind: kind.name != "experts")
    return {kind.name: _findings(kind, directory / kind.name) for kind in ordered}


def _findings(kind: Kind, directory: Path) -> str:
    try:
        return "; ".join((_named if kind.unloaded else _exchanged)(kind, directory))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def vllm_config_of(checkpoint: Path, **options: Any) -> Any:
    """vLLM's settings for it. The process groups that models need are made with the first one."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(model=str(checkpoint), max_model_len=128, **options).create_engine_config()
    if not model_parallel_is_initialized():
        with set_current_vllm_config(config):
            initialize_model_parallel(1, 1)
    return config


def _exchanged(kind: Kind, directory: Path) -> Iterator[str]:
    """What a push leaves that a cold start does not, or the other way round."""
    from genserve.worker.contract.vllm_settings import WEIGHT_UPDATE_KEY
    from genserve.worker.update.choice import make_update

    a, b = kind.make(directory)
    drafts = "--speculative-config" in kind.flags
    config = vllm_config_of(a, **({"speculative_config": json.loads(kind.flags[-1])} if drafts else {}))
    workers = {checkpoint: loaded_worker(config, checkpoint) for checkpoint in (b, a)}
    cold = {checkpoint: digests_of(worker) for checkpoint, worker in workers.items()}
    if cold[a] == cold[b]:
        yield "both checkpoints are the same"
    runner = workers[a].model_runner
    served = [model for model in (runner.get_model(), runner.get_draft_model()) if model is not None]
    for checkpoints, way in (((b, a, b), "beside"), ((a, b, a), "inplace")):
        config.additional_config = {WEIGHT_UPDATE_KEY: way}
        update, _ = make_update(workers[a])
        update.audit()
        for number, checkpoint in enumerate(checkpoints):
            with loader_calls(served) as calls:
                update.prepare(list(models.load_tensors(checkpoint).items()), Event())
                update.commit()
            update.discard()
            found, expected = digests_of(workers[a]), cold[checkpoint]
            wrong = sorted(name for name in expected | found if found.get(name) != expected.get(name))
            if wrong:
                yield f"{way}, {checkpoint.name} leaves {wrong[:4]} ({len(wrong)} in all)"
            if bool(calls) != (number < 2):
                yield f"{way}, push {number} calls vLLM's loader {len(calls)} times"
    yield from _unused(workers[a], models.load_tensors(a))
    if drafts:
        yield from _without_what_drafts(workers[a], cold[a], cold[b], models.load_tensors(b))


def _unused(worker: Any, tensors: dict[str, Any]) -> Iterator[str]:
    """Which tensors of the checkpoint count as not loaded: none but one that no model has."""
    from genserve.tensors.dtypes import SAFETENSORS_NAMES
    from genserve.worker.update.unused import unused_tensors

    described = [
        (name, SAFETENSORS_NAMES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in [*tensors.items(), (INV_FREQ, tensors[next(iter(tensors))])]
    ]
    if (found := unused_tensors(worker, described)) != [INV_FREQ]:
        yield f"as not loaded count {found[:4]} ({len(found)} in all)"


def _without_what_drafts(worker: Any, a: Digests, b: Digests, tensors: dict[str, Any]) -> Iterator[str]:
    """A push of b without the layers that draft, over a: the daemon lets it through if it cannot read the checkpoint's
    names. It changes all but what drafts."""
    from genserve.worker.contract.vllm_settings import WEIGHT_UPDATE_KEY
    from genserve.worker.model.draft import PREFIX
    from genserve.worker.update.choice import make_update

    worker.vllm_config.additional_config = {WEIGHT_UPDATE_KEY: "beside"}
    update, _ = make_update(worker)
    update.prepare([(name, tensor) for name, tensor in tensors.items() if "mtp_layers" not in name], Event())
    update.commit()
    update.discard()
    expected = {name: (a if name.startswith(PREFIX) else b)[name] for name in b}
    if (found := digests_of(worker)) != expected:
        wrong = sorted(name for name in expected | found if found.get(name) != expected.get(name))
        yield f"without what drafts, b leaves {wrong[:4]} ({len(wrong)} in all)"


def loaded_worker(config: Any, checkpoint: Path) -> Any:
    """What stands for a worker of vLLM that has loaded a checkpoint, and what drafts for it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config.compilation_config.static_forward_context.clear()  # layers register there by name
    speculative, draft = config.speculative_config, None
    for each in (config.model_config, *([] if speculative is None else [speculative.draft_model_config])):
        each.model = str(checkpoint)
    with set_current_vllm_config(config):
        live = get_model(vllm_config=config)
        if speculative is not None:
            draft = get_model(vllm_config=config, model_config=speculative.draft_model_config)
            draft.model.embed_tokens, draft.lm_head = live.model.embed_tokens, live.lm_head  # as vLLM's proposers do
    runner = SimpleNamespace(get_model=lambda: live, get_draft_model=lambda: draft)
    return SimpleNamespace(vllm_config=config, model_runner=runner, device=torch.device("cpu"))


def digests_of(worker: Any) -> Digests:
    """Of all live tensors of a worker, those that draft included."""
    from genserve.worker.model.digests import weight_digests, whole
    from genserve.worker.model.draft import draft_digests, draft_of

    draft = draft_of(worker)
    return weight_digests(worker.model_runner.get_model()) | (whole(draft_digests(draft)) if draft is not None else {})


def _named(kind: Kind, directory: Path) -> Iterator[str]:
    """Which parameters the checkpoint does not fill."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.model_loader.utils import initialize_model

    checkpoint, _ = kind.make(directory)
    config = vllm_config_of(checkpoint)
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(vllm_config=config)
        loaded = model.load_weights(models.load_tensors(checkpoint).items())
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            if name not in loaded and not isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
                yield f"no tensor gives a value to {name}"


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    print("KINDS " + json.dumps(main(Path(sys.argv[1]), sys.argv[2:])), flush=True)
