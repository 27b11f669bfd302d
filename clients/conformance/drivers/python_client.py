"""A driver on `genserve.client`: reads a scenario from standard input and prints a line of JSON for each step."""

import asyncio
import hashlib
import json
import sys
from typing import Any

from genserve.client import AsyncClient, Generation, PushResult
from genserve.errors import GenserveError

Result = dict[str, Any]
NOT_IMPLEMENTED: Result = {"error": {"reason": "NOT_IMPLEMENTED"}}


class Steps:
    """One method for each step of a scenario."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._leases: dict[str, str] = {}

    async def generate(self, prompt: Result, options: Result) -> Result:
        return generation_of(await self._client.generate(prompt_of(prompt), **client_options(options)))

    async def stream(self, prompt: Result, options: Result, cancel_after_tokens: int | None = None) -> Result:
        generation = Generation()
        async with self._client.stream(prompt_of(prompt), **client_options(options)) as deltas:
            async for delta in deltas:
                generation.add(delta)
                if cancel_after_tokens is not None and len(generation.token_ids) >= cancel_after_tokens:
                    return {"cancelled": True, "num_tokens": len(generation.token_ids)}
        return generation_of(generation)

    async def generate_many(self, requests: list[Result]) -> Result:
        generations: list[Result] = [{}] * len(requests)
        numbers = {}
        async with self._client.stream_many() as many:
            for i, request in enumerate(requests):
                options = client_options(request["options"])
                numbers[await many.submit(prompt_of(request["prompt"]), **options)] = i
            await many.done()
            sums = {request_id: Generation() for request_id in numbers}
            async for item in many:
                if item.error is not None:
                    generations[numbers[item.request_id]] = error_of(item.error)
                elif item.delta is not None:
                    sums[item.request_id].add(item.delta)
                    if item.is_last:
                        generations[numbers[item.request_id]] = generation_of(sums[item.request_id])
        return {"generations": generations}

    async def generate_columns(self, requests: list[Result]) -> Result:
        return await self.generate_many(requests)  # it always asks for them

    async def push(self, checkpoint: str, version: int, push_id: str, lora_name: str = "", **options: Any) -> Result:
        how: Result = {"version": version, "push_id": push_id, "shared_memory": False}
        if lora_name:
            return push_of(await self._client.push_lora(lora_name, checkpoint, **how))
        return push_of(await self._client.push_weights(checkpoint, **how, **options))

    async def push_streams(self, num_streams: int, **push: Any) -> Result:
        return await self.push(**push, streams=num_streams)

    async def commit(self, push_id: str) -> Result:
        return push_of(await self._client.commit_push(push_id))

    async def get_push(self, push_id: str) -> Result:
        return push_of(await self._client.get_push(push_id))

    async def discard(self, push_id: str) -> Result:
        return {"state": (await self._client.discard_push(push_id)).state}

    async def get_weights(self) -> Result:
        served = await self._client.get_weights()
        return {"version": served.weight_version, "tensors": len(served.tensors)}

    async def pull(self, version: int | None = None) -> Result:
        pulled = await self._client.pull_weights(version=version)
        sha256 = {name: hashlib.sha256(tensor.data).hexdigest() for name, tensor in pulled.tensors.items()}
        return {"version": pulled.weight_version, "sha256": sha256}

    async def pause(self, name: str, holder: str, ttl_ms: int) -> Result:
        lease = (await self._client.pause(holder=holder, ttl_s=ttl_ms / 1000)).lease
        self._leases[name] = lease.lease_id
        return {"holder": lease.holder}

    async def renew(self, name: str, ttl_ms: int) -> Result:
        return {"holder": (await self._client.renew_pause(self._leases[name], ttl_s=ttl_ms / 1000)).holder}

    async def resume(self, name: str) -> Result:
        return {"lease_expired": (await self._client.resume(self._leases[name])).lease_expired}

    async def status(self) -> Result:
        state = (await self._client.status()).state
        pauses = [lease.holder for lease in state.pauses]
        return {"phase": state.phase, "version": state.weight_version, "pauses": pauses}

    async def list_loras(self) -> Result:
        loras = await self._client.list_loras()
        return {"names": [lora.name for lora in loras], "versions": [lora.version for lora in loras]}

    async def unload_lora(self, lora_name: str) -> Result:
        await self._client.unload_lora(lora_name)
        return {}


def prompt_of(prompt: Result) -> Any:
    """As `generate` takes it: text, token ids and the messages of a chat differ by their types."""
    (value,) = prompt.values()
    return value


def client_options(options: Result) -> Result:
    """As `generate` takes them."""
    timeout_ms = options.get("timeout_ms")
    named = {name: value for name, value in options.items() if name != "timeout_ms"}
    return named if timeout_ms is None else {**named, "timeout_s": timeout_ms / 1000}


def generation_of(generation: Generation) -> Result:
    sequences = []
    for sequence in generation.sequences:
        finish = sequence.finish
        result: Result = {"token_ids": sequence.token_ids, "text": sequence.text, "finish": sequence.finish_reason}
        # The version of an adapter is there if one has sampled.
        result["weight_spans"] = [list(span if span.lora_version else span[:3]) for span in sequence.weight_spans]
        if finish is not None:
            result["num_tokens"] = finish.num_tokens
            if finish.stop_string is not None:
                result["stop_string"] = finish.stop_string
        if sequence.logprobs is not None:
            result["logprobs"] = [round(value, 4) for value in sequence.logprobs.sampled]
        sequences.append(result)
    summed: Result = {"sequences": sequences, "request_id": generation.request_id}
    if generation.prompt is not None:
        summed["prompt"] = {"num_tokens": generation.prompt.num_tokens}
    if (usage := generation.usage) is not None:
        summed |= {"prompt_tokens": usage.num_prompt_tokens, "output_tokens": usage.num_output_tokens}
    return summed


def push_of(pushed: PushResult) -> Result:
    push, applied = pushed.push, pushed.applied
    result: Result = {"state": push.state, "version": push.weight_version}
    result |= {"received_bytes": push.received_bytes, "total_bytes": push.total_bytes}
    if applied is not None:
        result |= {"previous_version": applied.previous_version, "active_version": applied.active_version}
    return result


def error_of(error: GenserveError) -> Result:
    fields = [violation.field for violation in error.violations]
    return {"error": {"reason": error.reason} | ({"fields": fields} if fields else {})}


async def main() -> None:
    scenario = json.load(sys.stdin)
    settings = {name: scenario[name] for name in ("ca_file", "token") if name in scenario}
    async with AsyncClient(scenario["address"], **{"token": "", **settings}) as client:
        steps = Steps(client)
        for step in scenario["steps"]:
            arguments = {name: value for name, value in step.items() if name != "do"}
            carry_out = getattr(steps, step["do"], None)
            try:
                result = await carry_out(**arguments) if carry_out else NOT_IMPLEMENTED
            except GenserveError as error:
                result = error_of(error)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
