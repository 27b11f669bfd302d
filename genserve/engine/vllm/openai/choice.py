"""Which of vLLM's two OpenAI servers runs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

USE_VARIABLE: Final = "VLLM_USE_RUST_FRONTEND"
PATH_VARIABLE: Final = "VLLM_RUST_FRONTEND_PATH"
_BINARY: Final = "vllm-rs"
_AUTO: Final = ("", "auto", "1", "true")  # as vLLM reads PATH_VARIABLE


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """`binary`: of the server in Rust, or "" for the one in Python. `reason`: why not the other one, for people."""

    binary: str
    reason: str

    def __str__(self) -> str:
        return f"vLLM's {'Rust' if self.binary else 'Python'} server ({self.reason})"


def choose(environment: Mapping[str, str], package: Path) -> ServerChoice:
    """The server in Rust, which takes less CPU time for a token, if there is one. `package`: vLLM's directory.
    Raises ValueError if the environment asks for one that is not there."""
    use = environment.get(USE_VARIABLE, "")
    if use == "0":
        return ServerChoice("", f"{USE_VARIABLE}=0")
    path = environment.get(PATH_VARIABLE, "")
    asked = path.lower() not in _AUTO
    binary = path if asked else str(package / _BINARY)
    if os.path.isfile(binary) and os.access(binary, os.X_OK):
        return ServerChoice(binary, f"{PATH_VARIABLE}={path}" if asked else f"the installed vLLM brings {_BINARY}")
    if asked:
        raise ValueError(f"{PATH_VARIABLE}={path}: no program there")
    if use:
        raise ValueError(f"{USE_VARIABLE}={use}: the installed vLLM has no {_BINARY}")
    return ServerChoice("", f"the installed vLLM has no {_BINARY}")
