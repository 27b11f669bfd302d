"""torchrl's vLLM engine on genserve: the methods of `AsyncVLLM` over a fleet, or over one daemon.

Follows torchrl 0.14.1; tests/engine/test_torchrl_release.py holds the two together. Neither vLLM nor, before an engine
is made, torchrl is imported.
"""

import random
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Unpack

from genserve.client import ClientClosedError
from genserve.client.fleet import FleetReplica, Replicas
from genserve.client.generation.options import GenerateOptions
from genserve.client.state import Load
from genserve.client.sync_client import Client
from genserve.errors import DeadlineError, NoReplicaError, UnsupportedError
from genserve.integrations.host_copies import whole
from genserve.integrations.torchrl_balancer import LoadBalancer
from genserve.integrations.torchrl_conversion import (
    RequestOutput,
    generate_options,
    plain_prompt,
    prompt_list,
    request_output,
)
from genserve.net import DEFAULT_TARGET
from genserve.tensors.dtypes import FRAMEWORK_NAMES
from genserve.transport.settings import ConnectionSettings
from genserve.transport.timeouts import Timeouts

__all__ = ["AsyncVLLM", "LoadBalancer"]
_TIMEOUTS: Final = Timeouts(generate_s=3600.0, push_s=3600.0)


class AsyncVLLM:
    """Stands where torchrl has its `AsyncVLLM`: in `vLLMWrapper` and `vLLMUpdaterV2`. `target` is the address of a
    router or of a daemon, and `actors` are the replicas.

    It is an `RLvLLMEngine`, if torchrl is installed. There is no NCCL group: `update_weights` is a push, which all
    replicas apply or none. It has to bring every tensor of the checkpoint (tied ones once) unless `partial`.
    `settings` are those of `Client`; generations and pushes have an hour unless `timeouts` says otherwise. May be used
    from several threads at once. A copy in another process, by pickle, has a connection of its own.
    """

    # vLLMWrapper knows its engines by the names of their classes and modules.
    __module__ = "torchrl.modules.llm.backends.vllm.genserve"

    def __init__(
        self, target: str = DEFAULT_TARGET, *, partial: bool = False, **settings: Unpack[ConnectionSettings]
    ) -> None:
        settings.setdefault("timeouts", _TIMEOUTS)
        self.target = target
        self._partial = partial
        self._settings = settings
        self._direct = ReplicaClients(settings)
        self._client = Client(target, **settings)
        try:
            self.model_name = self._client.server_info().model
            """From which vLLMWrapper loads a tokenizer if it is given none."""
            self._is_fleet = self._has_fleet()
            _register()
        except BaseException:
            self._client.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return _connected, (self.target, self._partial, self._settings)

    def replicas(self) -> Replicas:
        """The replicas as the router reports them now, in order of their addresses; a daemon is its own only one."""
        if self._is_fleet:
            return self._client.list_replicas()
        status = self._client.status()
        max_num_seqs = self._client.server_info().limits.max_num_seqs
        alone = FleetReplica(self.target, "ready", "", status.state, status.load, 0, max_num_seqs, "", "")
        return Replicas([alone], status.state.weight_version, {}, status.message)

    @property
    def actors(self) -> list[str]:
        """Addresses of the replicas. An `actor_index` is a place in this list, which changes when replicas join or
        leave."""
        return [each.address for each in self.replicas().replicas]

    @property
    def num_replicas(self) -> int:
        """Number of the replicas, ready or not."""
        return len(self.actors)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Completions of text, token ids or vLLM's TextPrompt and TokensPrompt: a list of them for a list of prompts.

        `sampling_params`: vLLM's, or a mapping of its fields; without it 16 tokens. `lora_request`: vLLM's, of which
        the name counts. The router chooses a replica for each prompt, unless `actor_index` says which one; that one is
        called directly, by the address that the router has for it. `use_tqdm` has no effect.

        Raises UnsupportedError for other inputs than text and token ids, and for the two arguments that vLLM has given
        up; NoReplicaError if the replica at `actor_index` is not ready; TimeoutError after `timeout_seconds`.
        """
        if prompt_adapter_request is not None or guided_options_request is not None:
            raise UnsupportedError("use lora_request, and structured_outputs in sampling_params")
        given, are_many = prompt_list(prompts, prompt_token_ids)
        plain = [plain_prompt(each) for each in given]
        options = generate_options(sampling_params)
        options["prompt_token_ids"] = True
        if lora_request is not None:
            options["lora_name"] = getattr(lora_request, "lora_name", lora_request)
        if timeout_seconds is not None and timeout_seconds <= 0:
            timeout_seconds = None  # as in torchrl
        try:
            with self._client_for(actor_index, options) as client:
                if timeout_seconds is None:
                    generations = client.generate_many(plain, **options)
                else:
                    generations = client.generate_many(plain, timeout_s=timeout_seconds, **options)
        except DeadlineError as error:
            raise TimeoutError(str(error)) from error
        outputs = [
            request_output(generation, prompt if isinstance(prompt, str) else None, lora_request)
            for generation, prompt in zip(generations, plain, strict=True)
        ]
        return outputs if are_many else outputs[0]

    def get_tp_size(self) -> int:
        """Tensor-parallel ranks of a replica."""
        return self._client.server_info().tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[Any, Any]]:
        """(torch.dtype, torch.Size) of every tensor of the checkpoint, by its name: what an update brings."""
        torch = import_module("torch")
        tensors = self._client.get_weights().tensors
        return {each.name: (getattr(torch, FRAMEWORK_NAMES[each.dtype]), torch.Size(each.shape)) for each in tensors}

    def get_master_address(self) -> str:
        """ "localhost". Nothing listens there, because there is no group."""
        return "localhost"

    def get_master_port(self) -> int:
        """0: there is no group."""
        return 0

    def init_weight_update_group(self) -> None:
        """Does nothing: weights go over the connection that exists."""

    def update_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Pushes tensors, under their names in the checkpoint, as the served version plus 1, and returns when it is
        served. Generation goes on meanwhile. Raises as `Client.push_weights`; then the version before is served."""
        tensors = {name: whole(name, tensor) for name, tensor in weights}
        served_version = self._client.status().state.weight_version
        self._client.push_weights(
            tensors, version=served_version + 1, expected_version=served_version, partial=self._partial
        )

    def reset_prefix_cache(self) -> None:
        """Drops the prefix caches. A push has done that already."""
        self._client.reset_cache()

    def create_load_balancer(self, strategy: str | Sequence[str] | None = None, **kwargs: Any) -> LoadBalancer:
        """A balancer over the replicas, for callers who pass what it selects as `actor_index`. Without an
        `actor_index` the policies of the router decide, whatever balancer was made."""
        return LoadBalancer(self, strategy, **kwargs)

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """How many sequences run or wait, of each replica or of one."""
        loads = self._loads()
        numbers = [0 if load is None else load.running + load.waiting for load in loads]
        return numbers if actor_index is None else numbers[_checked(actor_index, len(numbers))]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Share of the KV cache that is in use, in [0, 1], of each replica or of one."""
        usages = [0.0 if load is None else load.kv_usage for load in self._loads()]
        return usages if actor_index is None else usages[_checked(actor_index, len(usages))]

    def get_random_actor_index(self) -> int:
        """Any place in `actors`."""
        return random.randrange(self.num_replicas)

    def shutdown(self) -> None:
        """Closes the connections. The replicas and their router go on. May be repeated."""
        self._client.close()
        self._direct.close()

    def _has_fleet(self) -> bool:
        try:
            self._client.list_replicas()
        except UnsupportedError:
            return False
        return True

    @contextmanager
    def _client_for(self, actor_index: int | None, options: GenerateOptions) -> Iterator[Client]:
        """The client of the replica at this place, which must serve the version of the fleet at least; the router's for
        None."""
        if actor_index is None:
            yield self._client
            return
        listed = self.replicas()
        replica = listed.replicas[_checked(actor_index, len(listed.replicas))]
        if replica.state != "ready":
            raise NoReplicaError(f"{replica.address} is {replica.state}: {replica.reason}")
        options["min_weight_version"] = listed.weight_version
        if not self._is_fleet:
            yield self._client
            return
        with self._direct.using(replica.address, {each.address for each in listed.replicas}) as client:
            yield client

    def _loads(self) -> list[Load | None]:
        return [each.load for each in self.replicas().replicas]


def _checked(actor_index: int, num_actors: int) -> int:
    """The index. Raises IndexError for one that is not in the list, counted from its end too."""
    if not 0 <= actor_index < num_actors:
        raise IndexError(f"actor_index must be in [0, {num_actors}), is {actor_index}")
    return actor_index


def _connected(target: str, partial: bool, settings: ConnectionSettings) -> AsyncVLLM:
    return AsyncVLLM(target, partial=partial, **settings)


def _register() -> None:
    """Makes the engine an instance of torchrl's interface. By name: the client's package does not depend on torchrl."""
    if find_spec("torchrl") is not None:
        import_module("torchrl.modules.llm.backends.vllm.base").RLvLLMEngine.register(AsyncVLLM)


@dataclass(slots=True)
class _Direct:
    client: Client
    num_calls: int = 0


class ReplicaClients:
    """A client for each replica that is called, from any thread. `settings` are those of each."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._direct: dict[str, _Direct] = {}
        self._is_closed = False

    @property
    def addresses(self) -> list[str]:
        """Those of the clients that are open."""
        with self._lock:
            return [*self._direct]

    @contextmanager
    def using(self, address: str, present: Collection[str]) -> Iterator[Client]:
        """The client of this replica, for calls within the block. Clients of replicas that are not `present` any more
        are closed when their calls have ended: a replica that is started again has another address. Raises
        ClientClosedError after `close`."""
        with self._lock:
            if self._is_closed:
                raise ClientClosedError("the engine is shut down")
            gone = [each for each, direct in self._direct.items() if each not in present and not direct.num_calls]
            unused = [self._direct.pop(each).client for each in gone]
            if address not in self._direct:
                self._direct[address] = _Direct(Client(address, **self._settings))
            direct = self._direct[address]
            direct.num_calls += 1
        try:
            for client in unused:
                client.close()
            yield direct.client
        finally:
            with self._lock:
                direct.num_calls -= 1

    def close(self) -> None:
        """Closes all, with the calls that run. May be repeated."""
        with self._lock:
            self._is_closed = True
            clients = [each.client for each in self._direct.values()]
        for client in clients:
            client.close()
