"""TRL's client of its generation server, on a genserve daemon: the same methods, arguments and answers.

Follows `VLLMClient` in trl/generation/vllm_client.py of TRL 1.16.0; tests/engine/test_trl_release.py compares the two.
Neither TRL nor torch is imported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Unpack, cast
from urllib.parse import urlsplit

from genserve.client.generation.options import GenerateOptions, PromptLike
from genserve.client.sync_client import Client
from genserve.errors import DeadlineError, UnsupportedError
from genserve.integrations.host_copies import HostCopies, whole
from genserve.integrations.trl_answers import Completions, SequenceLogprobs, completions, sequence_logprobs, vllm_config
from genserve.transport.settings import ConnectionSettings, tls_of
from genserve.transport.timeouts import Timeouts

_TIMEOUTS: Final = Timeouts(generate_s=3600.0, push_s=3600.0)  # TRL's own has none
_OPENAI_NAMES: Final = {"include_stop_str_in_output": "include_stop"}


class VLLMClient:
    """Stands where TRL makes its `VLLMClient`; `base_url` is the daemon's address, as http://HOST:PORT or HOST:PORT.

    New weights are one push. `update_named_param` copies a tensor to the host and applies nothing. What was copied is
    applied, all of it or nothing, when a `weight_update` block ends, by `update_named_params` and
    `update_model_params` outside of one, and by `reset_prefix_cache`, which is what TRL's trainers call after their
    loop. A push has to bring every tensor of the checkpoint (tied ones once): after a loop that broke off
    `reset_prefix_cache` raises ManifestMismatchError, and the version before is served, unless `partial` allows it. A
    `weight_update` block that is left by an exception, and a push that fails, forget what was copied. Generation goes
    on meanwhile, and `generate` may be called from another thread.

    The copies take the weights' size of host memory, which is kept for the next update until `close_communicator`.
    `group_port` and the device of `init_communicator` have no meaning here: there is no second connection. Images
    raise UnsupportedError. `settings` are those of `Client`; calls have an hour unless `timeouts` says otherwise.

    Raises ConnectionError when no daemon is ready within `connection_timeout` seconds.
    """

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "127.0.0.1",
        server_port: int = 50051,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        *,
        partial: bool = False,
        **settings: Unpack[ConnectionSettings],
    ) -> None:
        url = urlsplit(base_url if base_url and "://" in base_url else f"http://{base_url or f'{host}:{server_port}'}")
        if url.hostname is None or url.port is None:
            raise ValueError(f"base_url must be http://HOST:PORT, is {base_url}")
        settings.setdefault("timeouts", _TIMEOUTS)
        if url.scheme == "https":
            settings |= {**tls_of(url.netloc, settings), "tls": True}
        self.base_url = f"{url.scheme}://{url.netloc}"
        self.host, self.server_port, self.group_port = url.hostname, url.port, group_port
        self._partial = partial
        self._copies = HostCopies()
        self._in_update = False
        self._client = Client(url.netloc, **settings)
        try:
            self.check_server(connection_timeout)
            self.model = self._client.server_info().model
        except BaseException:
            self._client.close()
            raise

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Waits until the daemon serves. Raises ConnectionError if it does not within `total_timeout` seconds, or
        within `retry_interval` if that is more."""
        try:
            self._client.wait_ready(max(total_timeout, retry_interval))
        except DeadlineError as error:
            raise ConnectionError(f"{error}; is `genserve serve` running?") from error

    def get_world_size(self) -> int:
        """Number of the daemon's workers."""
        info = self._client.server_info()
        return info.tensor_parallel_size * info.pipeline_parallel_size * info.data_parallel_size

    def get_server_info(self) -> dict[str, Any]:
        """The part of vLLM's `VllmConfig` that a daemon reports, as a JSON tree under vLLM's names."""
        return vllm_config(self._client.server_info())

    def image_features(
        self, images: Sequence[Sequence[Any] | None], max_concurrent_requests: int = 64
    ) -> list[dict[str, Any] | None]:
        """None for each prompt without images. Raises UnsupportedError for a prompt with images."""
        _refuse_images(images)
        return [None] * len(images)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        features: Sequence[Any] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        *,
        images: Sequence[Any] | None = None,
    ) -> Completions:
        """Completions of texts or token ids.

        `logprobs`: how many alternatives are returned besides the token itself; None = no log-probabilities.
        `generation_kwargs` override the other arguments. Those that are not options of `Client.generate` must be fields
        of vLLM's SamplingParams. TRL needs a daemon started with `--logprobs-mode processed_logprobs`.
        """
        _refuse_images(features)
        _refuse_images(images)
        given = {
            "n": n,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "regex": structured_outputs_regex,
            **(generation_kwargs or {}),
        }
        return self._complete(prompts, given)

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, str]]],
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template: str | None = None,
        max_concurrent_requests: int = 64,
    ) -> Completions:
        """Completions of chats, whose messages have a role and a text; otherwise as `generate`.

        `tools` are JSON schemas, which the model's template renders. A `chat_template` in the request needs a daemon
        with `--trust-request-chat-template`. All chats go over one stream, so `max_concurrent_requests` has no effect.
        """
        if any(callable(tool) for tool in tools or ()):
            raise TypeError("tools must be JSON schemas: transformers.utils.get_json_schema makes them from functions")
        template_params = dict(chat_template_kwargs or {})
        if tools:
            template_params["tools"] = list(tools)
        if chat_template is not None:
            template_params["chat_template"] = chat_template
        given = {
            "n": n,
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "regex": structured_outputs_regex,
            "template_params": template_params or None,
            **(generation_kwargs or {}),
        }
        return self._complete(messages, given)

    def _complete(self, prompts: Sequence[PromptLike], given: Mapping[str, Any]) -> Completions:
        options = _options(given)
        options["prompt_token_ids"], options["text"] = True, False
        generations = self._client.generate_many(prompts, **options)
        return completions(generations, with_logprobs=options.get("logprobs") is not None)

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
        chunk_size: int = 0,
        max_concurrent_requests: int = 4,
    ) -> SequenceLogprobs:
        """Scores token ids without generating. The `top_logprobs` of a token are padded with -inf and token 0.

        All sequences go over one stream, so `chunk_size` and `max_concurrent_requests` have no effect.
        """
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        generations = self._client.generate_many(
            sequences, max_tokens=1, temperature=temperature, prompt_logprobs=top_logprobs, text=False
        )
        return sequence_logprobs(generations, sequences, prompt_lengths, top_logprobs)

    def init_communicator(self, device: Any = 0) -> None:
        """Forgets tensors that were copied and not applied. Weights use the connection that exists."""
        self._copies.forget()

    @contextmanager
    def weight_update(self) -> Iterator[None]:
        """Applies exactly the tensors of the block, in one push at its end; nothing if an exception leaves the
        block."""
        self._copies.forget()
        self._in_update = True
        try:
            yield
        except BaseException:
            self._copies.forget()
            raise
        finally:
            self._in_update = False
        self._apply()

    def update_named_param(self, name: str, weights: Any) -> None:
        """Copies a whole tensor under its name in the checkpoint. The class docstring says when it is applied."""
        self._copies.add(name, weights)

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, Sequence[int]]], named_params: Iterable[tuple[str, Any]]
    ) -> None:
        """Copies the tensors that `metadata` announces, as (name, dtype, shape), and applies them; in a `weight_update`
        block the end of the block applies them. Raises ValueError for tensors that were not announced."""
        with nullcontext() if self._in_update else self.weight_update():
            for (name, _, shape), (given_name, weights) in zip(metadata, named_params, strict=True):
                if (name, tuple(shape)) != (given_name, tuple(weights.shape)):
                    raise ValueError(f"{name}{list(shape)} is announced, {given_name}{list(weights.shape)} came")
                self._copies.add(name, weights)

    def update_model_params(self, model: Any) -> None:
        """Applies all parameters of a torch module without copying them; in a `weight_update` block the end of the
        block applies them."""
        tensors = {name: whole(name, parameter) for name, parameter in model.named_parameters()}
        if not self._in_update:
            self._copies.forget()
            self._push(tensors)
            return
        for name, tensor in tensors.items():
            self._copies.add(name, tensor)

    def reset_prefix_cache(self) -> None:
        """Applies the copied tensors, which resets the cache; only drops the cache if there are none."""
        if self._copies.fresh and not self._in_update:
            self._apply()
        else:
            self._client.reset_cache()

    def close_communicator(self) -> None:
        """Forgets tensors that were copied and not applied, and frees their memory. All other calls still work."""
        self._copies = HostCopies()

    def close(self) -> None:
        """Closes the connection. Tensors that were copied and not applied are dropped."""
        self.close_communicator()
        self._client.close()

    def _apply(self) -> None:
        try:
            if self._copies.fresh:
                self._push(self._copies.fresh)
        finally:
            self._copies.forget()

    def _push(self, tensors: Mapping[str, Any]) -> None:
        served_version = self._client.status().state.weight_version
        self._client.push_weights(
            tensors, version=served_version + 1, expected_version=served_version, partial=self._partial
        )


def _refuse_images(images: Sequence[Any] | None) -> None:
    """`images`: for each prompt its images or their features, None without any."""
    if any(images or ()):
        raise UnsupportedError("the daemon accepts text and token ids, not images")


def _options(given: Mapping[str, Any]) -> GenerateOptions:
    """The options under genserve's names; others are passed on to vLLM."""
    named = {_OPENAI_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    options: dict[str, Any] = {name: named.pop(name) for name in GenerateOptions.__annotations__ if name in named}
    if named:
        options["engine_params"] = {**options.get("engine_params", {}), **named}
    return cast(GenerateOptions, options)
