"""What the daemon says is what its client is told: every field is set to a value of its own, and goes over the wire."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from genserve.client import state as told
from genserve.client.generation import results
from genserve.client.generation.options import (
    GenerateOptions,
    OutputOptions,
    SamplingOptions,
    StopOptions,
    generate_request,
)
from genserve.client.weights.lora import Lora
from genserve.client.weights.results import Applied as ToldApplied
from genserve.client.weights.results import Push, PushResult
from genserve.control.leases import PauseLease
from genserve.control.state import EngineState
from genserve.engine.generation import (
    ChatMessage,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Finish,
    GenerationRequest,
    GenerationUpdate,
    Output,
    PromptInfo,
    Sampling,
    SequenceDelta,
    Stop,
)
from genserve.engine.types import EngineInfo, Load, LoadedLora
from genserve.rpc.convert.control import ServerFacts, to_load, to_lora, to_server_info
from genserve.rpc.convert.generation_request import generation_request
from genserve.rpc.convert.generation_response import to_response
from genserve.rpc.convert.listening import ListeningFacts, set_listening
from genserve.rpc.convert.values import to_lease, to_state
from genserve.rpc.convert.weights import to_applied, to_push
from genserve.v1 import generation_pb2, weights_pb2
from genserve.weights.push.types import Applied, PushReport
from tests.unit.rpc.convert.distinct import distinct, said

LEASE_NAMES = {"expire_time_s": "expire_time", "ttl_s": "", "counts": ""}
STARTUP_NAMES = {"step_begin_s": "step_begin_time", "begin_s": "begin_time"}


def sent(message: Any) -> Any:
    """The message as it is on the other side."""
    return type(message).FromString(message.SerializeToString())


def renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """With the client's names; those without one, "", are not told."""
    return {names.get(name, name): value for name, value in fields.items() if names.get(name, name)}


def test_a_lease_and_a_state() -> None:
    """Time to live is told as the time when it ends."""
    lease = distinct(PauseLease)
    expected = renamed(said(lease), LEASE_NAMES)
    assert said(told.PauseLease.of(sent(to_lease(lease)))) == expected
    state = distinct(EngineState)
    load, served = state.load, state.served
    expected = {
        **{name: value for name, value in said(state).items() if name not in ("load", "served")},
        **{"running_requests": load.running, "waiting_requests": load.waiting, **said(served)},
        "pauses": [renamed(said(x), LEASE_NAMES) for x in state.pauses],
        "startup": renamed(said(state.startup), STARTUP_NAMES),
    }
    assert said(told.EngineState.of(sent(to_state(state)))) == expected


def test_the_load() -> None:
    """A rate of tokens is none of hits."""
    load = distinct(Load)
    assert said(told.Load.of(sent(to_load(load)))) == said(load)


def test_what_is_served() -> None:
    """The engine's facts are those of `test_control`; these are the daemon's, and its state."""
    facts, state = distinct(ServerFacts), distinct(EngineState)
    message = sent(to_server_info(distinct(EngineInfo), facts, state))
    assert (message.host_id, tuple(message.ingest_ports)) == (facts.host_id, tuple(facts.ingest_ports))
    info = told.ServerInfo.of(message)
    assert (info.frontend_ports, info.num_frontends_down) == (list(facts.frontend_ports), facts.num_frontends_down)
    assert info.openai_port == facts.openai_port
    assert (info.model, info.features) == (facts.model, list(facts.features))
    assert (info.limits.max_message_bytes, info.limits.max_staging_bytes) == (
        facts.max_message_bytes,
        facts.max_staging_bytes,
    )
    assert info.state == told.EngineState.of(to_state(state))
    assert told_of_ports(info) == facts.listening


def told_of_ports(info: told.ServerInfo) -> ListeningFacts:
    """What a client has been told of the ports."""
    return ListeningFacts(
        max_connections=info.limits.max_connections,
        max_streams=info.limits.max_streams,
        max_metadata_bytes=info.limits.max_metadata_bytes,
        request_rates=info.limits.request_rates,
        write_timeout_s=info.limits.write_timeout_s or 0,
        has_tls=info.protection.tls,
        requires_certificates=info.protection.client_certificates_required,
        has_roles=info.protection.roles,
    )


@pytest.mark.parametrize("flag", ["has_tls", "requires_certificates", "has_roles"])
def test_what_protects_the_ports(flag: str) -> None:
    """One of them says nothing about the others."""
    facts = ListeningFacts(**{flag: True})
    facts_of_all = distinct(ServerFacts, listening=facts)
    message = sent(to_server_info(distinct(EngineInfo), facts_of_all, distinct(EngineState)))
    assert told_of_ports(told.ServerInfo.of(message)) == facts


def test_the_ports_of_a_router_replace_those_of_the_replica_that_it_asked() -> None:
    """Also what the replica has, and the router has not."""
    message = to_server_info(distinct(EngineInfo), distinct(ServerFacts), distinct(EngineState))
    for facts in (distinct(ListeningFacts), ListeningFacts(max_streams=5)):
        set_listening(message, facts)
        assert told_of_ports(told.ServerInfo.of(sent(message))) == facts


def test_an_adapter() -> None:
    """Requests that use it are those that run. Its push is in its source; where its files lie is nobody's business."""
    lora = distinct(LoadedLora)
    names = {"loaded_at_s": "load_time", "num_requests": "running_requests", "push_id": "", "directory": ""}
    assert said(Lora.of(sent(to_lora(lora)))) == renamed(said(lora), names)


def test_a_push_and_what_applying_it_did() -> None:
    """The digest and the adapter's name are in the message alone."""
    report, applied, state = distinct(PushReport), distinct(Applied), distinct(EngineState)
    message = sent(
        weights_pb2.GetPushResponse(push=to_push(report), applied=to_applied(applied), state=to_state(state))
    )
    result = PushResult.of(message)
    expected = renamed(said(report), {"manifest_digest": "", "lora_name": ""})
    expected["issues"] = [[issue.tensor, issue.description] for issue in report.issues]
    assert said(result.push) == expected
    assert (message.push.manifest_digest, message.push.lora_name) == (report.manifest_digest, report.lora_name)
    assert said(result.applied) == said(applied)
    assert result.state == told.EngineState.of(to_state(state))
    assert Push.of(sent(message.push)) == result.push
    assert to_applied(None) is None and ToldApplied.of(message.applied) == result.applied


@pytest.mark.parametrize("stop", [7, "stop"])
def test_an_update(stop: int | str) -> None:
    """Deltas of every sequence, in their order."""
    finish = distinct(Finish, stop=stop)
    outputs = [distinct(SequenceDelta, finish=finish), distinct(SequenceDelta, index=3, text="other", finish=None)]
    update = distinct(GenerationUpdate, outputs=outputs)
    delta = results.Delta(sent(to_response(update, "r")))
    assert delta.request_id == "r"
    assert said(delta.prompt) == said(update.prompt)
    assert said(delta.usage) == said(update.usage)
    assert [output.index for output in delta.outputs] == [output.index for output in outputs]
    for output, given in zip(delta.outputs, outputs, strict=True):
        assert (output.text, said(output.token_ids)) == (given.text, said(given.token_ids))
        assert (said(output.logprobs), said(output.weight_spans)) == (said(given.logprobs), said(given.weight_spans))
    ended = {key: value for key, value in said(finish).items() if key != "stop"}
    stops = {"stop_token_id": stop if isinstance(stop, int) else None, "stop_string": stop if stop == "stop" else None}
    assert said(delta.outputs[0].finish) == {**ended, **stops}
    assert delta.outputs[1].finish is None


def test_what_was_not_asked_for_is_not_told() -> None:
    """None stays None: an empty list of log-probabilities would say that there were no tokens."""
    prompt = distinct(PromptInfo, token_ids=None, logprobs=None)
    delta = results.Delta(
        sent(to_response(GenerationUpdate(prompt, [distinct(SequenceDelta, logprobs=None)], None), ""))
    )
    assert delta.prompt is not None and delta.prompt.logprobs is None and delta.prompt.token_ids == []
    assert delta.outputs[0].logprobs is None
    assert delta.usage is None and not delta.is_last


def test_every_option_of_a_request() -> None:
    """And none of them as another one."""
    sampling = distinct(Sampling, logit_bias={3: -1.5, 5: 2.25}, allowed_token_ids=[4, 6])
    stop = distinct(Stop, strings=("one", "two"), token_ids=(8, 9))
    output = distinct(Output, token_ids=False, text=True, skip_special_tokens=False)
    prompt = ChatPrompt(
        [ChatMessage("user", "hi"), ChatMessage("assistant", "well")], False, True, {"tools": ["t"], "k": 2}
    )
    expected = distinct(
        GenerationRequest,
        prompt=prompt,
        sampling=sampling,
        stop=stop,
        output=output,
        constraint=Constraint(ConstraintKind.REGEX, "a+"),
        engine_params={"min_tokens_per_x": 1, "flag": True},
    )
    options: dict[str, Any] = {
        **said(sampling),
        **{name: value for name, value in said(stop).items() if name not in ("strings", "token_ids")},
        "stop": list(stop.strings),
        "stop_token_ids": list(stop.token_ids),
        **said(output),
        "regex": "a+",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "template_params": prompt.template_params,
        "engine_params": expected.engine_params,
        **{
            name: getattr(expected, name)
            for name in (
                "request_id",
                "lora_name",
                "priority",
                "data_parallel_rank",
                "cache_salt",
                "min_weight_version",
            )
        },
    }
    assert options.keys() == GenerateOptions.__annotations__.keys() - {
        "json_schema", "grammar", "structural_tag", "choice", "json_object",
        "session_id", "resume",  # for a router
    }  # fmt: skip
    message = sent(generate_request([said(each) for each in prompt.messages], options))  # type: ignore[arg-type]
    info = distinct(EngineInfo, max_model_len=4096, vocab_size=100)
    assert said(generation_request(message, info, "minted")) == said(expected)


TYPESCRIPT = "clients/typescript/src/generation/options.ts"


@pytest.mark.parametrize(
    ("message", "kind", "options", "names"),
    [
        (generation_pb2.Sampling, Sampling, SamplingOptions, {}),
        (generation_pb2.Output, Output, OutputOptions, {}),
        (
            generation_pb2.Stop,
            Stop,
            StopOptions,
            {"strings": "stop", "token_ids": "stop_token_ids", "time_budget": "time_budget_s"},
        ),
    ],
)
def test_every_option_of_the_contract_is_declared_wherever_it_has_to_be(
    message: Any, kind: type, options: type, names: dict[str, str]
) -> None:
    """A field of the proto that one place lacks would be an option that nobody can set, or that the daemon drops. The
    failure names the places."""
    root = Path(__file__).resolve().parents[4]
    declared = re.findall(r"^export interface (\w+) \{\n(.*?)^\}", (root / TYPESCRIPT).read_text(), re.M | re.S)
    (in_typescript,) = (re.findall(r"^  (\w+)\?:", body, re.M) for name, body in declared if name == options.__name__)
    lacking = {
        "genserve/engine/generation.py": set(),
        "genserve/client/generation/options.py": set(),
        TYPESCRIPT: set(),
    }
    for field in message.DESCRIPTOR.fields:
        option = names.get(field.name, field.name)
        if {field.name, option}.isdisjoint(each.name for each in dataclasses.fields(kind)):
            lacking["genserve/engine/generation.py"].add(field.name)
        if option not in options.__annotations__:
            lacking["genserve/client/generation/options.py"].add(option)
        camel = re.sub("_(.)", lambda found: found[1].upper(), option.replace("time_budget_s", "time_budget_ms"))
        if camel not in in_typescript:
            lacking[TYPESCRIPT].add(camel)
    assert not any(lacking.values()), lacking
