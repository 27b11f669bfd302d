"""The default type of the thread that builds a version, which the rest of the process must not notice."""

import threading

import torch

from genserve.worker.update.shadow import default_dtype_here


def test_compiled_code_runs_and_keeps_the_process_default_dtype() -> None:
    """vLLM post-processes some fp8 weights by a compiled function. torch's compiler puts back the default type that it
    found, for the whole process."""
    found: list[object] = []

    @torch.compile(backend="eager")
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    def build() -> None:
        with default_dtype_here(torch.bfloat16):
            found.append(torch.get_default_dtype())
            try:
                found.append(halved(torch.ones(2)).tolist())
            except AssertionError as error:
                found.append(error)

    try:
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        assert found == [torch.bfloat16, [0.5, 0.5]]
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
