"""Where vLLM's loaders put weights, on which a row of the refused settings depends."""

from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader

from tests.unit.engine.vllm.start.load_formats import LOAD_FORMATS_OF_OWN_MEMORY


def test_where_every_load_format_puts_weights_is_known() -> None:
    """A new one of vLLM's is looked at before it is served: is what it makes the worker's own memory, which nobody else
    reads? And what vLLM does without a mode is to share."""
    assert _LOAD_FORMAT_TO_MODEL_LOADER.keys() == {*LOAD_FORMATS_OF_OWN_MEMORY, "ipc_cache", "modelexpress"}
    assert IpcModelLoader(LoadConfig(load_format="ipc_cache")).mode == "zero_copy"
