"""What calls of ControlService ask for, defaults and contradictions included, and what they answer about the engine."""

import dataclasses
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration

from genserve.client.state import ServerInfo
from genserve.control.asleep import SleepDepth
from genserve.control.conditions import Phase
from genserve.control.state import EngineState
from genserve.engine.types import EngineInfo, Load, ModelMemory, PauseMode
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.control import (
    ServerFacts,
    load_timeout_s,
    renewed_ttl_s,
    sleep_arguments,
    to_server_info,
    watch_interval_s,
)
from genserve.rpc.convert.values import pause_ttl_s, seconds_or
from genserve.v1 import control_pb2, types_pb2
from genserve.wire.conversions import duration_of
from tests.support.refusals import refuses


def watch(**fields: Any) -> float:
    """The interval for fields as JSON has them."""
    return watch_interval_s(json_format.ParseDict(fields, control_pb2.WatchStatusRequest()))


def test_no_expiry_has_to_be_asked_for() -> None:
    """A program that dies leaves nothing paused. It contradicts a time to live."""
    assert pause_ttl_s(control_pb2.PauseRequest()) == 60.0
    assert pause_ttl_s(control_pb2.PauseRequest(no_expiry=True)) is None
    with refuses(InvalidFieldError, field="ttl"):
        pause_ttl_s(control_pb2.PauseRequest(no_expiry=True, ttl=duration_of(5)))


def test_a_bare_sleep_and_a_bare_load_have_the_contract_s_defaults() -> None:
    """KEEP, level 1, and a minute each; a level of 0 is another one."""
    assert sleep_arguments(control_pb2.SleepRequest()) == (PauseMode.KEEP, SleepDepth(1), 60.0)
    asked = control_pb2.SleepRequest(mode=types_pb2.PAUSE_MODE_WAIT, level=0, tags=["kv_cache"], timeout=duration_of(2))
    assert sleep_arguments(asked) == (PauseMode.WAIT, SleepDepth.of(0, ["kv_cache"]), 2.0)
    assert load_timeout_s(control_pb2.LoadLoraRequest()) == 60.0
    assert load_timeout_s(control_pb2.LoadLoraRequest(timeout=duration_of(2))) == 2.0


def test_a_renewal_without_ttl_keeps_that_of_the_pause() -> None:
    """None says so."""
    assert renewed_ttl_s(control_pb2.RenewPauseRequest(lease_id="l")) is None
    assert renewed_ttl_s(control_pb2.RenewPauseRequest(lease_id="l", ttl=duration_of(2.5))) == 2.5


def test_watching_faster_than_ten_times_a_second_is_refused() -> None:
    """A watcher must not cost what it watches."""
    assert (watch(), watch(interval="0.1s")) == (1.0, 0.1)
    with pytest.raises(InvalidFieldError) as caught:
        watch(interval="0.099s")
    assert caught.value.violations[0].field == "interval"


YEAR_S = 366 * 24 * 3600


@pytest.mark.parametrize(
    "value", [Duration(), Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=YEAR_S, nanos=1000)]
)
def test_a_duration_that_cannot_pass_is_refused(value: Duration) -> None:
    """Zero, negative and beyond a year."""
    with refuses(InvalidFieldError, field="ttl"):
        seconds_or(control_pb2.RenewPauseRequest(ttl=value), "ttl", 1.0)


def test_the_longest_duration_is_a_leap_year() -> None:
    """To the second."""
    assert seconds_or(control_pb2.RenewPauseRequest(ttl=Duration(seconds=YEAR_S)), "ttl", 1.0) == YEAR_S


def test_every_fact_of_the_engine_reaches_the_client_under_its_own_name() -> None:
    """All values differ, so a field that is left out or swapped with another one is found."""
    names = [field.name for field in dataclasses.fields(EngineInfo) if field.name != "versions"]
    texts = {field.name for field in dataclasses.fields(EngineInfo) if field.type in ("str", str)}
    facts: dict[str, Any] = {
        name: f"{name}-value" if name in texts else number for number, name in enumerate(names, start=10)
    }
    facts["model_memory"] = ModelMemory(*range(100, 100 + len(dataclasses.fields(ModelMemory))))
    info = EngineInfo(**facts, versions={"vllm": "1", "torch": "2"})
    state = EngineState("instance", 1, Phase.RUNNING, (), Load(0, 0, 0.0, 0.0, 0.0))
    told = ServerInfo.of(to_server_info(info, ServerFacts("served", 1, 2, 3, ["push"]), state))
    found = {**dataclasses.asdict(told), **dataclasses.asdict(told.limits)}
    # Which adapters fit, and whether it can sleep, is told by `features` and by errors.
    kept_back = {"max_loras", "max_lora_rank", "can_sleep"}
    expected = {**facts, "model": "served", "max_message_bytes": 1, "max_staging_bytes": 2, "features": ["push"]}
    expected |= {"max_active_requests": 3}
    expected["model_memory"] = dataclasses.asdict(facts["model_memory"])
    assert {name: found.get(name) for name in expected if name not in kept_back} == {
        name: value for name, value in expected.items() if name not in kept_back
    }
    assert (told.versions["vllm"], told.versions["torch"]) == ("1", "2")
