"""The calls of WeightService that drive vLLM's own weight transfer. `vllm_sync` turns them into vLLM's client."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from genserve.client.state import EngineState
from genserve.client.weights.results import Applied
from genserve.transport.connection import RequestT, ResponseT, ServiceCalls
from genserve.transport.fields import build, duration, naming, wire_value
from genserve.v1 import types_pb2, weights_pb2
from genserve.wire.literals import KvPolicy, PauseMode

if TYPE_CHECKING:
    import grpc.aio


@dataclass(frozen=True, slots=True)
class StartedUpdate:
    """An open update, and what its pause did to requests."""

    update_id: str
    requests_kept: int
    requests_aborted: int
    state: EngineState


@dataclass(frozen=True, slots=True)
class FinishedUpdate:
    """A finished update, which is served."""

    applied: Applied
    state: EngineState


class TransferCalls(ServiceCalls):
    """vLLM's own weight transfer. It needs a daemon that was started with --weight-transfer-config, else it raises
    UnsupportedError. `timeout_s` bounds the work of the daemon; the call's own deadline is a little later."""

    async def init_weight_transfer(self, init_info: Mapping[str, Any], *, timeout_s: float = 300.0) -> str:
        """Makes every worker connect to the trainer, as `init_info` says, and returns the name of vLLM's backend.

        Raises PushRolledBackError with vLLM's message, ApplyInProgressError while a push or an update is in progress,
        and DeadlineError. If workers hang in it, the daemon ends soon after `timeout_s`.
        """
        fields = {"init_info": _json(init_info, "init_info"), "timeout": duration(timeout_s, "timeout_s")}
        request = build(weights_pb2.InitWeightTransferRequest, fields)
        response = await self._call(self._connection.weights.InitWeightTransfer, request, timeout_s)
        return response.backend

    async def start_weight_update(
        self,
        *,
        update_id: str = "",
        pause_mode: PauseMode | None = None,
        kv_policy: KvPolicy | None = None,
        pause_lease_id: str = "",
        ttl_s: float = 60.0,
        timeout_s: float = 60.0,
    ) -> StartedUpdate:
        """Pauses generation until the update is finished. The daemon undoes the update if the next call does not come
        within `ttl_s`.

        Defaults: mode keep, KV cache recompute. Raises ApplyInProgressError, EngineTaintedError, PushRolledBackError
        and DeadlineError.
        """
        fields = {
            "update_id": update_id,
            "pause_mode": wire_value(types_pb2.PauseMode, pause_mode, "pause_mode"),
            "kv_policy": wire_value(types_pb2.KvPolicy, kv_policy, "kv_policy"),
            "pause_lease_id": pause_lease_id,
            "ttl": duration(ttl_s, "ttl_s"),
            "timeout": duration(timeout_s, "timeout_s"),
        }
        request = build(weights_pb2.StartWeightUpdateRequest, fields)
        response = await self._call(self._connection.weights.StartWeightUpdate, request, timeout_s)
        return StartedUpdate(
            response.update_id, response.requests_kept, response.requests_aborted, EngineState.of(response.state)
        )

    async def update_weights(
        self,
        update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        update_id: str = "",
        timeout_s: float = 300.0,
    ) -> None:
        """Makes every worker receive what `update_info` names; a list has one entry per worker, by global rank.

        A failure ends the update: PushRolledBackError or DeadlineError if the daemon has undone it, EngineTaintedError
        if it could not. Raises UpdateNotFoundError if the update is not open (any more).
        """
        fields = {
            "update_id": update_id,
            "update_info": _json(update_info, "update_info"),
            "timeout": duration(timeout_s, "timeout_s"),
        }
        request = build(weights_pb2.UpdateWeightsRequest, fields)
        await self._call(self._connection.weights.UpdateWeights, request, timeout_s)

    async def finish_weight_update(
        self, *, update_id: str = "", version: int | None = None, force: bool = False, timeout_s: float = 300.0
    ) -> FinishedUpdate:
        """Serves what was received as `version`; default: the served version plus 1.

        Raises as `update_weights`, and VersionNotNewerError unless `force`; then the update stays open.
        """
        fields = {
            "update_id": update_id,
            "weight_version": version,
            "force": force,
            "timeout": duration(timeout_s, "timeout_s"),
        }
        request = build(weights_pb2.FinishWeightUpdateRequest, fields)
        response = await self._call(self._connection.weights.FinishWeightUpdate, request, timeout_s)
        return FinishedUpdate(Applied.of(response.applied), EngineState.of(response.state))

    async def _call(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]", request: RequestT, timeout_s: float
    ) -> ResponseT:
        return await self._connection.unary(method, request, timeout_s + self._connection.timeouts.undo_slack_s)


def _json(value: Any, option: str) -> str:
    with naming(option):
        return json.dumps(value)
