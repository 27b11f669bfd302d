"""Starts one engine for several processes that send it requests: the clients, as vLLM calls them.

The daemon is one of them. It owns the engine's processes and everything that concerns all requests. The others join
later, each at its own place, and only submit and abort requests of their own. EngineCore sends the outputs of a request
to the client that it came from, with the version of the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.network_utils import ZmqListener
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger

from genserve.engine.vllm.requests.outputs import StreamingLLM
from genserve.engine.vllm.start.failure import EngineStartError

_SHUTDOWN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of the engine: the daemon is number 0, to which EngineCore sends its statistics after a step without
    outputs; then comes the OpenAI server, if there is one, then `num_frontends` front ends. `if_possible`: nobody has
    asked for the front ends, so they are left out where they are not possible."""

    num_frontends: int = 0
    with_openai: bool = False
    if_possible: bool = False

    @property
    def count(self) -> int:
        """How many they are."""
        return 1 + self.with_openai + self.num_frontends

    @property
    def frontends(self) -> range:
        """The numbers of the front ends."""
        return range(OPENAI + self.with_openai, self.count)


DAEMON: Final = 0
"""The number of the daemon."""
OPENAI: Final = 1
"""The number of the OpenAI server, if there is one."""
ALONE = Clients()
"""The daemon is the only client."""


def possible(config: VllmConfig, clients: Clients) -> Clients:
    """The clients that an engine of this configuration can have. Raises EngineStartError if these were asked for and
    are not possible."""
    parallel = config.parallel_config
    is_elsewhere = parallel.data_parallel_size_local < parallel.data_parallel_size
    if clients.count == 1 or not (
        is_elsewhere or parallel.local_engines_only or parallel.data_parallel_backend == "ray"
    ):
        return clients
    if clients.if_possible and not clients.with_openai:
        return ALONE
    flag = "--openai-port" if clients.with_openai else "--frontends"
    raise EngineStartError(
        f"{flag} cannot be used with data-parallel engines on other hosts, on Ray or behind an external load "
        "balancer: the processes that send requests reach engines through sockets of this host"
    )


@dataclass(frozen=True, slots=True)
class ClientPlace:
    """Where client `index` of `count` joins. The listeners are bound and listen; a process that joins inherits them.
    `stats_address`: of the coordinator of data-parallel engines, if there is one."""

    index: int
    count: int
    requests: ZmqListener
    outputs: ZmqListener
    stats_address: str | None

    def close(self) -> None:
        """Closes the listeners of this process and removes their files."""
        self.requests.cleanup()
        self.outputs.cleanup()


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """The daemon's client, and the places of all clients, by their numbers. A client alone has no place."""

    llm: StreamingLLM
    places: tuple[ClientPlace, ...] = ()


def start(
    config: VllmConfig, args: AsyncEngineArgs, stat_loggers: Sequence[Any], clients: Clients, counters: Any
) -> StartedEngine:
    """Starts the engine's processes, and returns when they are ready. Call on the event loop. `stat_loggers`: of the
    daemon's client; `counters`: memory of all clients in which vLLM counts their unfinished requests."""
    logging = {"enable_log_requests": args.enable_log_requests, "disable_log_stats": args.disable_log_stats}
    if clients.count == 1:
        return StartedEngine(StreamingLLM.from_vllm_config(config, stat_loggers=list(stat_loggers), **logging))
    # internal: as vllm.entrypoints.cli.serve.run_multi_api_server.
    listeners = bind_engine_zmq_listeners(config, clients.count)
    engine = coordinator = None
    try:
        with launch_core_engines(config, Executor.get_class(config), True, listeners.addresses) as launch:
            engine, coordinator = launch.engine_manager, launch.coordinator
        stats_address = launch.addresses.frontend_stats_publish_address
        places = tuple(
            ClientPlace(index, clients.count, requests, outputs, stats_address)
            for index, (requests, outputs) in enumerate(zip(listeners.inputs, listeners.outputs, strict=True))
        )
        own = places[DAEMON]
        addresses = {
            "input_address": own.requests.address,
            "output_address": own.outputs.address,
            "input_listener": own.requests.socket,
            "output_listener": own.outputs.socket,
            "stats_update_address": stats_address,
            "tensor_queue": launch.tensor_queue,
            "mp_admission_counters": counters,
        }
        llm = StreamingLLM.from_vllm_config(
            config,
            stat_loggers=list(stat_loggers),
            client_addresses=addresses,
            client_count=clients.count,
            client_index=DAEMON,
            **logging,
        )
    except BaseException:
        if engine is not None:
            engine.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
        if coordinator is not None:
            coordinator.shutdown()
        listeners.cleanup()
        raise
    # internal: a client that has launched the engine itself owns its processes in the same way, and ends them.
    llm.engine_core.resources.engine_manager = engine
    llm.engine_core.resources.coordinator = coordinator
    llm.engine_core.start_engine_core_monitor()
    listeners.inputs, listeners.outputs = [], []  # `places` has them now; vLLM closes them when this is collected
    return StartedEngine(llm, places)


class NoSeries(PrometheusStatLogger):
    """Counts nothing. vLLM adds its own logger unless there is one of this class, also with --disable-log-stats:
    a client's row needs the statistics."""

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] | None = None) -> None:
        pass

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Nothing."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing."""

    def log_engine_initialized(self) -> None:
        """Nothing."""


class BoundedSeries(PrometheusStatLogger):
    """vLLM's, but without the names of LoRA adapters, which are up to clients: each set of them that was ever used
    would stay a series."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        self.gauge_lora_info = None  # internal: where vLLM sets it only if it is there


def stat_loggers(row: Any, *, with_series: bool) -> list[Any]:
    """The loggers that get vLLM's statistics: a client's row, and a counter of vLLM's series (`vllm:*`), which counts
    nothing unless they are wanted."""
    return [row, BoundedSeries if with_series else NoSeries]
