"""The gRPC server: every service under one address.

Receiving processes send to a second server, which listens only on their socket, because gRPC registers a service for
all addresses of a server.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine, GeneratingEngine
from genserve.engine.types import EngineInfo
from genserve.frontends.processes import FrontEnds
from genserve.ingest import relay as ingest_relay
from genserve.ingest.processes import IngestProcesses
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.memory.host import host_id
from genserve.rpc.access import AccessInterceptor, Callers
from genserve.rpc.control import ControlServicer
from genserve.rpc.convert.control import ServerFacts
from genserve.rpc.convert.listening import ListeningFacts
from genserve.rpc.frames.push import Frame, frame_parser
from genserve.rpc.generation import Abort, EngineBoard, GenerationServicer, abort_with
from genserve.rpc.grpc_services import add_grpc_services
from genserve.rpc.handlers import method_handler
from genserve.rpc.health import Serving
from genserve.rpc.listener import add_port, bind, make_inner_server, make_server
from genserve.rpc.observed import CallObserver
from genserve.rpc.received import receiver
from genserve.rpc.services import ServiceTable
from genserve.rpc.status_answers import StatusAnswers, add_starting
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.rpc.weights import WeightServicer
from genserve.security.caller import Caller
from genserve.security.roles import METHODS
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, generation_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import add_ControlServiceServicer_to_server
from genserve.v1.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from genserve.v1.weights_pb2_grpc import add_WeightServiceServicer_to_server
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.kept.keeper import Keeper
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import ResidentStore
from genserve.weights.vllm_transfer import TransferUpdates

SERVICES = tuple(
    service
    for file in (generation_pb2, weights_pb2, control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)
SERVICE_NAMES = tuple(service.full_name for service in SERVICES)
FEATURES = ("generate_many", "push", "pull", "pause", "sleep", "structured_outputs")


@dataclass(frozen=True, slots=True)
class ServerParts:
    """What the services serve. `max_staging_bytes` is what the registry allows; `config` has no port 0 for HTTP; `stop`
    ends the daemon, as `Stopped.stop`."""

    config: ServeConfig
    engine: Engine
    board: StateBoard
    pauses: PauseController
    sleeps: SleepController
    pushes: PushRegistry
    resident: ResidentStore
    transfers: TransferUpdates
    loras: LoraLoader
    checkpoint: CheckpointIndex | None
    max_staging_bytes: int
    stop: Callable[[str, float | None], None]
    ingest: IngestProcesses | None = None
    processes: DaemonProcesses = field(default_factory=DaemonProcesses)
    frontends: FrontEnds | None = None
    callers: Callers | None = None
    peers: Caller = field(default_factory=Caller)
    observers: Sequence[CallObserver] = ()
    keeper: Keeper | None = None

    @property
    def takes_segments(self) -> bool:
        """Whether trainers on this host may send shared memory."""
        return not self.config.no_shared_memory


class DaemonServer:
    """Listens from the start of the daemon to its end. `address` is the one for clients: the TCP address if there is
    one."""

    def __init__(self, server: grpc.aio.Server, table: ServiceTable, early: StatusAnswers, address: str) -> None:
        """The server has started. `early`: answers those who watched before the engine was there."""
        self._early = early
        self._table = table
        self._servers = [server]
        self.address = address

    @classmethod
    async def open(
        cls,
        config: ServeConfig,
        board: StateBoard,
        callers: Callers | None = None,
        observers: Sequence[CallObserver] = (),
    ) -> Self:
        """Starts listening. Until `serve` it answers with the progress of the start. Raises OSError naming an address
        that cannot be used, and CertificateError."""
        table = ServiceTable(board.membership)
        early = add_starting(table, SERVICES, board)
        add_grpc_services(table.as_server, SERVICE_NAMES, board, with_channelz=config.channelz)
        server = make_server(config, table, callers, observers)
        address = bind(server, config.host, config.port, config.uds, config.certificate)
        await server.start()
        return cls(server, table, early, address)

    async def serve(self, parts: ServerParts) -> None:
        """Every method is served from now on. Raises OSError if there is no address for receiving processes."""
        weights = weights_of(parts)
        if parts.ingest is not None:
            relay = _relay_server(parts, weights)
            add_port(relay, parts.ingest.address)
            await relay.start()
            self._servers.append(relay)
        self._table.become(services_of(parts, weights))
        self._early.tell_in_flight(parts.pushes.live.in_flight)

    async def stop(self, grace_s: float) -> None:
        """Accepts no more calls, and ends the running ones after `grace_s` seconds."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


class FrontendState(EngineBoard, Serving, Protocol):
    """What a front end sees of the daemon's state."""


def frontend_server(
    engine: GeneratingEngine,
    state: FrontendState,
    abort: Abort,
    config: ServeConfig,
    callers: Callers | None,
    observers: Sequence[CallObserver] = (),
) -> grpc.aio.Server:
    """A server with GenerationService alone, and its health and reflection. It is bound to no address yet."""
    names = tuple(service.full_name for service in generation_pb2.DESCRIPTOR.services_by_name.values())
    table = ServiceTable()
    servicer = GenerationServicer(engine, state, abort, tuple, WriteDeadline(config.write_timeout_s))
    _add_generation(table, servicer, engine.info.max_request_bytes)
    add_grpc_services(table.as_server, names, state)
    return make_server(config, table, callers, observers)


def weights_of(parts: ServerParts) -> WeightServicer:
    """WeightService of a daemon, which receiving processes call as well."""
    return WeightServicer(
        parts.pushes,
        parts.resident,
        parts.transfers,
        parts.engine,
        parts.pauses,
        parts.board,
        parts.checkpoint,
        parts.processes,
        parts.peers,
        parts.keeper,
        takes_segments=parts.takes_segments,
    )


def services_of(parts: ServerParts, weights: WeightServicer) -> ServiceTable:
    """All services of a daemon whose engine is there."""
    table = ServiceTable(parts.board.membership)
    frontends = parts.frontends
    fixed = ServerFacts(
        parts.engine.info.model,
        parts.config.max_message_bytes,
        parts.max_staging_bytes,
        parts.config.max_active_requests,
        _features(parts.engine.info),
        host_id() if parts.takes_segments else "",
        openai_port=max(parts.config.openai_port, 0),
        listening=ListeningFacts.of(parts.config, parts.config.write_timeout_s),
    )

    def facts() -> ServerFacts:
        now = fixed if parts.ingest is None else replace(fixed, ingest_ports=parts.ingest.ports)
        if frontends is None:
            return now
        return replace(now, frontend_ports=frontends.live_ports(), num_frontends_down=frontends.num_down())

    generation = GenerationServicer(
        parts.engine,
        parts.board,
        abort_with(parts.engine, parts.board),
        frontends.live_ports if frontends is not None else tuple,
        WriteDeadline(parts.config.write_timeout_s),
    )
    _add_generation(table, generation, parts.engine.info.max_request_bytes)
    _add_weights(table, weights)
    add_ControlServiceServicer_to_server(
        ControlServicer(
            parts.engine, parts.pauses, parts.sleeps, parts.board, parts.loras, parts.pushes, facts, parts.stop
        ),
        table.as_server,
    )
    add_grpc_services(table.as_server, SERVICE_NAMES, parts.board, with_channelz=parts.config.channelz)
    return table


def _relay_server(parts: ServerParts, weights: WeightServicer) -> grpc.aio.Server:
    """A server only for what receiving processes pass on, and ask: they do not know who may push."""
    service = ingest_relay.SERVICE
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if parts.callers is not None:
        push = f"/{service}/{ingest_relay.METHOD}"  # called after ADMIT, over a socket that is ours alone
        needed = {f"/{service}/{ingest_relay.ADMIT}": METHODS["/genserve.v1.WeightService/PushWeights"]}
        interceptors = [AccessInterceptor(parts.callers, {push}, parts.config.rates, needed, _passed_on_sans)]
    relayed: grpc.RpcMethodHandler[Frame, bytes] = grpc.stream_stream_rpc_method_handler(
        weights.relayed_push, request_deserializer=frame_parser(weights.max_header_bytes)
    )
    admitted: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_admitted)
    table = ServiceTable()
    table.add_registered_method_handlers(service, {ingest_relay.METHOD: relayed, ingest_relay.ADMIT: admitted})
    return make_inner_server(parts.config.max_message_bytes, table, interceptors, parts.observers)


async def _admitted(request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
    return b""


def _passed_on_sans(context: "grpc.aio.ServicerContext[Any, Any]") -> list[str]:
    """The names that a receiving process has found in the certificate of its caller."""
    metadata = context.invocation_metadata() or ()
    sans = (value for key, value in metadata if key == ingest_relay.SAN_KEY)
    return [san.decode(errors="replace") for san in sans if isinstance(san, bytes)]


def _features(info: EngineInfo) -> tuple[str, ...]:
    optional = {"weight_transfer": bool(info.weight_transfer), "lora": info.max_loras > 0}
    return (*FEATURES, *(name for name, there in optional.items() if there))


def _add_generation(table: ServiceTable, servicer: GenerationServicer, max_request_bytes: int) -> None:
    """Adds the service with requests that are parsed where their size is known: the handler that is registered last is
    used."""
    add_GenerationServiceServicer_to_server(servicer, table.as_server)
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    handlers = {
        method.name: method_handler(
            method, getattr(servicer, method.name), receiver(GetMessageClass(method.input_type), max_request_bytes)
        )
        for method in service.methods
    }
    table.add_registered_method_handlers(service.full_name, handlers)


def _add_weights(table: ServiceTable, servicer: WeightServicer) -> None:
    """Adds the service with frames that are not protobuf objects: the handler that is registered last is used."""
    add_WeightServiceServicer_to_server(servicer, table.as_server)
    push = grpc.stream_unary_rpc_method_handler(
        servicer.PushWeights,
        request_deserializer=frame_parser(servicer.max_header_bytes),
        response_serializer=weights_pb2.PushWeightsResponse.SerializeToString,
    )
    pull: grpc.RpcMethodHandler[weights_pb2.PullWeightsRequest, bytes] = grpc.unary_stream_rpc_method_handler(
        servicer.PullWeights, request_deserializer=weights_pb2.PullWeightsRequest.FromString
    )
    service = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
    table.add_registered_method_handlers(service, {"PushWeights": push, "PullWeights": pull})
