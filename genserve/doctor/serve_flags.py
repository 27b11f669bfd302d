"""What the doctor must know of the flags that it passes on to `genserve serve`."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from genserve.errors import InvalidFieldError

DEFAULT_UTILIZATION: Final = 0.92  # vLLM 0.32's
_MAX_RANKS: Final = 4096
_MULTIPLIERS: Final = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40
}  # fmt: skip
_OWN: Final = ("--model", "--port", "--host", "--uds", "--weight-update")


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """`passed_on` are all flags. `kv_cache_bytes`, `max_model_len` and `max_requests` (the limit of active requests)
    are None if they are not given."""

    passed_on: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_requests: int | None = None

    @property
    def num_ranks(self) -> int:
        """The number of devices, or processes, over which one model is spread."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_workers(self) -> int:
        """The number of devices, or processes, of all models."""
        return self.num_ranks * self.data_parallel_size

    @classmethod
    def parse(cls, given: Sequence[str], refused: Sequence[str] = _OWN) -> "ServeFlags":
        """Raises InvalidFieldError for an unreadable value, and for flags that the doctor sets itself."""
        if given and re.match("--?[a-zA-Z]", given[0]) is None:
            raise InvalidFieldError.of("SERVE_FLAGS", f"must begin with a flag of `genserve serve`, not {given[0]!a}")
        # As in vLLM's parser, underscores are accepted.
        dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), flag) for flag in given]
        if any(flag.partition("=")[0] == "--config" for flag in dashed):
            raise InvalidFieldError.of(
                "SERVE_FLAGS", "--config: pass the flags themselves, the doctor does not read files"
            )
        # A unique prefix of one of these is taken for it, as in vLLM's parser. If vLLM knows more flags with this
        # prefix, it refuses the prefix: the daemon does not start, and says why.
        parser = _Parser(add_help=False)
        for flag in refused:
            parser.add_argument(flag, action=_Refused)
        parser.add_argument("--tensor-parallel-size", "-tp", type=_count, default=1)
        parser.add_argument("--pipeline-parallel-size", "-pp", type=_count, default=1)
        parser.add_argument("--data-parallel-size", "-dp", type=_count, default=1)
        parser.add_argument("--gpu-memory-utilization", type=_share, default=DEFAULT_UTILIZATION)
        parser.add_argument("--kv-cache-memory-bytes", type=_size, default=None)
        parser.add_argument("--max-model-len", type=_size, default=None)
        parser.add_argument("--max-active-requests", type=_count_of_requests, default=None)
        parser.add_argument("--max-n")  # a complete flag by itself, which would be a prefix of the next one
        parser.add_argument("--max-num-queued-reqs", type=_count_of_requests, default=None)
        read = parser.parse_known_args(dashed)[0]
        return cls(
            tuple(given),
            read.tensor_parallel_size,
            read.pipeline_parallel_size,
            read.data_parallel_size,
            read.gpu_memory_utilization,
            read.kv_cache_memory_bytes,
            read.max_model_len,
            min(filter(None, (read.max_active_requests, read.max_num_queued_reqs)), default=None),
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidFieldError.of("SERVE_FLAGS", message)


class _Refused(argparse.Action):
    def __call__(self, *_: object, **__: object) -> None:
        raise InvalidFieldError.of("SERVE_FLAGS", f"{self.option_strings[0]} is set by the doctor")


def _count_of_requests(text: str) -> int | None:
    """None for a value that the daemon itself refuses."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def _count(text: str) -> int:
    if not (re.fullmatch("[0-9]{1,4}", text) and 0 < int(text) <= _MAX_RANKS):
        raise argparse.ArgumentTypeError(f"{text!a} is not a whole number from 1 to {_MAX_RANKS}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!a} is not a number in (0, 1]")
    return share


def _size(text: str) -> int | None:
    """Reads a number as vLLM does: 2g and 2G, 1.5m; None for auto."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kKmMgGtT]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!a} is not a number such as 8192, 2g or 2G")
    return int(float(match[1]) * _MULTIPLIERS.get(match[2], 1))
