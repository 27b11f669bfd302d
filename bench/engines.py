"""One configuration for every engine that is measured: those of genserve's daemon on a CPU.

Whatever differs in a comparison is then what serves the engine.
"""

from pathlib import Path

from genserve.demo_model import demo_model_path
from tests.support import models

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
}
_VOCAB = 512
_LAYER_BYTES_PER_HIDDEN_SQUARED = 18  # 9 hidden x hidden matrices' worth, in bfloat16
_HIDDEN = ((32 << 20, 512), (512 << 20, 1024), (1 << 40, 2048))  # up to which size a model is so wide


def flags(*, max_model_len: int = 2048, max_num_seqs: int = 256, kv_cache_bytes: int = 1 << 30) -> list[str]:
    """vLLM's flags; the daemon takes them as they are."""
    return [
        "--max-model-len", str(max_model_len),
        "--max-num-seqs", str(max_num_seqs),
        "--kv-cache-memory-bytes", str(kv_cache_bytes),
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--disable-log-stats",
    ]  # fmt: skip


def model(name: str, directory: Path) -> Path:
    """A checkpoint: `tiny` (hidden 128, 2 layers), `smollm2`, or a random one of so many megabytes."""
    if name == "smollm2":
        return demo_model_path()
    if name == "tiny":
        return models.tiny_qwen3(directory / name)
    return sized_model(int(name) * 1_000_000, directory / f"{name}MB")


def sized_model(size_bytes: int, directory: Path) -> Path:
    """A random Qwen3 of about that size; wider and deeper, as models grow."""
    hidden = next(hidden for limit, hidden in _HIDDEN if size_bytes <= limit)
    num_layers = max(round(size_bytes / (_LAYER_BYTES_PER_HIDDEN_SQUARED * hidden**2)), 1)
    num_heads = hidden // 32
    return models.tiny_qwen3(
        directory, hidden=hidden, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_heads // 2, vocab=_VOCAB
    )


def model_bytes(checkpoint: Path) -> int:
    """Size of its weights."""
    return sum(shard.stat().st_size for shard in checkpoint.glob("*.safetensors"))
