"""vLLM's GPU worker, which takes what pushes need of the device before vLLM sizes its KV cache by what is left.

A class of its own, as an extension cannot take part in `load_model`: what the model's loading left is known then, and
`determine_available_memory`, which counts all that the process has taken, comes next.
"""

from vllm.v1.worker.gpu_worker import Worker

from genserve.worker.update.choice import Chosen, choose


class ReservingWorker(Worker):
    """`genserve_chosen`: how this worker takes new versions."""

    genserve_chosen: Chosen

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model, and chooses."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.genserve_chosen = choose(self)
