"""vLLM's `VLLMWeightSyncClient` over gRPC, with which vLLM's trainer engines (NCCL, IPC, ...) drive an inference
engine.

The protocol is structural, so vLLM is not imported.
"""

import base64
import pickle
from typing import Any, Unpack

from genserve.client.sync_client import Client
from genserve.errors import InvalidFieldError
from genserve.transport.settings import ConnectionSettings
from genserve.transport.streams import Closing

UpdateInfo = dict[str, Any] | list[dict[str, Any]]


class GenserveWeightSyncClient(Closing):
    """The four methods, for the daemon at `target`; `settings` as for `Client`. Use it with `with`, or call `close`.

    `ttl_s`: how long the daemon waits for the next call of an update before it undoes it; a trainer that gathers a
    large model between two calls needs more than the default. `call_timeout_s`: longest time of one call.

    Every method raises a class of `genserve.errors`, see `TransferCalls`. `client` is what the calls go through: it
    generates and pushes as well.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        ttl_s: float = 60.0,
        call_timeout_s: float = 300.0,
        **settings: Unpack[ConnectionSettings],
    ) -> None:
        self.client = Client(target, **settings)
        self._ttl_s = ttl_s
        self._call_timeout_s = call_timeout_s
        self._update_id = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Has every worker connect with the trainer."""
        self.client.init_weight_transfer(init_info, timeout_s=self._call_timeout_s)

    def start_weight_update(self) -> None:
        """Pauses generation until `finish_weight_update`."""
        started = self.client.start_weight_update(ttl_s=self._ttl_s, timeout_s=self._call_timeout_s)
        self._update_id = started.update_id

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Has every worker receive tensors. vLLM's IPC handles are pickled, which workers take only with
        VLLM_ALLOW_INSECURE_SERIALIZATION=1 in the daemon's environment."""
        plain = [_plain(each) for each in update_info] if isinstance(update_info, list) else _plain(update_info)
        self.client.update_weights(plain, update_id=self._update_id, timeout_s=self._call_timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serves what was received; None = the served version plus 1. Raises InvalidFieldError if the version is not a
        number."""
        if weight_version is not None and not weight_version.isdecimal():
            raise InvalidFieldError.of("weight_version", f"must be a number, is {weight_version!r}")
        version = None if weight_version is None else int(weight_version)
        self.client.finish_weight_update(update_id=self._update_id, version=version, timeout_s=self._call_timeout_s)

    def close(self) -> None:
        """Closes the connection. May be repeated."""
        self.client.close()


def _plain(update_info: dict[str, Any]) -> dict[str, Any]:
    """Values that JSON can hold. IPC handles are tuples of bytes and more, encoded as in vLLM's own HTTP client."""
    if update_info.get("ipc_handles") is None:
        return update_info
    pickled = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
    rest = {key: value for key, value in update_info.items() if key != "ipc_handles"}
    return {**rest, "ipc_handles_pickled": pickled}
