"""A KV connector that stores nothing, and writes down when it is asked to drop what it holds."""

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class ResettingConnector(KVConnectorBase_V1):
    """`path` of its extra configuration is the file. While one called "keep" lies beside it, nothing is dropped."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Knows no prefix."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing."""
        return KVConnectorMetadata()

    def reset_cache(self) -> bool:
        """Writes a line down; whether it is dropped."""
        path = Path(self._kv_transfer_config.kv_connector_extra_config["path"])
        with path.open("a") as file:
            file.write("reset\n")
        return not path.with_name("keep").exists()
