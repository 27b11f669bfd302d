"""Runs scenarios, one after the other, each with every driver."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from clients.conformance.runner import checkpoints
from clients.conformance.runner.cancelled import CancelledCalls
from clients.conformance.runner.corrupted import CorruptChunk
from clients.conformance.runner.cut import CutLink
from clients.conformance.runner.daemons import Daemons
from clients.conformance.runner.deadline import Deadline
from clients.conformance.runner.drivers import results_of
from clients.conformance.runner.expectation import Rule, differences
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.push_meanwhile import PushMeanwhile
from clients.conformance.runner.relay import Relay
from clients.conformance.runner.scenario import Scenario, filled
from clients.conformance.runner.subject import Subject
from clients.conformance.runner.table import Outcome
from genserve.client import AsyncClient
from genserve.errors import GenserveError

_VERSIONS = {"version", "previous_version"}
_SPAN = "one of weight_spans"
_NEAR = 0.005  # of a log-probability: two programs compute it in float32, and four decimals are printed

Fault = CutLink | CorruptChunk | CancelledCalls | Deadline | PushMeanwhile


class Run:
    """All drivers against the daemons, through a relay that makes a mistake if `mutation` names one."""

    def __init__(self, daemons: Daemons, subject: Subject, paths: dict[str, str], mutation: str | None) -> None:
        self._daemons = daemons
        self._subject = subject
        self._paths = paths
        self._mutation = mutation

    async def scenario(self, scenario: Scenario, drivers: dict[str, Sequence[str]]) -> dict[str, Outcome]:
        """The outcome of each driver. What one prints that another does not is a difference as well."""
        outcomes: dict[str, Outcome] = {}
        first: tuple[str, list[Any]] | None = None
        for name, command in drivers.items():
            version = 0
            try:
                if scenario.daemon == "open":
                    version = await self._subject.restore()
                outcome = await self._one(scenario, command, version)
            except GenserveError as error:
                outcome = Outcome([f"the runner's own call has failed: {error}"])
            alike = [_relative(result, version) for result in outcome.results]
            if first is None:
                first = name, alike
            else:
                outcome.differences.extend(_disagreements(alike, first[1], first[0], scenario))
            outcomes[name] = outcome
        return outcomes

    async def _one(self, scenario: Scenario, command: Sequence[str], version: int) -> Outcome:
        names = {**self._paths, "run": secrets.token_hex(8)}
        steps = scenario.for_driver(names, version)
        async with self._link(scenario) as (address, link):
            given: dict[str, Any] = {"address": address, "steps": steps}
            if scenario.ca:
                given["ca_file"] = self._daemons.ca_files[scenario.ca]
            if scenario.token:
                given["token"] = self._daemons.tokens[scenario.token]
            try:
                results = await results_of(command, given)
            except RuntimeError as error:
                found, results = [str(error)], []
            else:
                found = self._compared(results, scenario, names, version)
            found += [] if link is None else link.differences()
        if scenario.daemon == "open":
            found += await self._subject.differences(filled(scenario.after, names, version))
        return Outcome(found, results)

    def _compared(self, results: list[Any], scenario: Scenario, names: dict[str, str], version: int) -> list[str]:
        if len(results) != len(scenario.steps):
            return [f"printed {len(results)} results for {len(scenario.steps)} steps"]
        found = []
        for i, (step, result) in enumerate(zip(scenario.steps, results, strict=True), 1):
            # Other fields may be more than is expected; an error is never.
            expected = {"error": {"$absent": True}, **filled(step["expect"], names, version)}
            found += [f"step {i}, {step['do']}: {each}" for each in differences(result, expected, self._rules(results))]
        return found

    def _rules(self, results: list[Any]) -> dict[str, Rule]:
        def greedy(asked: dict[str, Any]) -> checkpoints.Greedy:
            return checkpoints.greedy(self._paths[asked.get("weights", "a")], asked["prompt"], asked["num"])

        def printed(asked: dict[str, Any]) -> Any:
            result = results[asked["step"] - 1]
            return result.get(asked["field"]) if isinstance(result, dict) else None

        return {
            "$greedy": lambda asked: greedy(asked).token_ids,
            "$greedy_text": lambda asked: greedy(asked).text,
            "$greedy_logprobs": lambda asked: [
                {"$between": [each - _NEAR, each + _NEAR]} for each in greedy(asked).logprobs
            ],
            "$printed": printed,
            "$sha256": lambda name: checkpoints.sha256_of(self._paths[name]),
        }

    @asynccontextmanager
    async def _link(self, scenario: Scenario) -> AsyncIterator[tuple[str, Fault | None]]:
        """The address for the driver, and what is to happen on the way from there to the daemon."""
        if scenario.daemon == "secured":
            yield self._daemons.secured, None
            return
        async with AsyncExitStack() as stack:
            address = self._daemons.open
            if self._mutation is not None:
                address = (await stack.enter_async_context(Relay(address, MUTATIONS[self._mutation]))).address
            fault = self._fault(scenario.link, address)
            if isinstance(fault, CutLink | PushMeanwhile):
                await stack.enter_async_context(fault)
            if isinstance(fault, CutLink):
                address = fault.address
            elif fault is not None:
                address = (await stack.enter_async_context(fault.relay(address))).address
            yield address, fault

    def _fault(self, link: dict[str, int], address: str) -> Fault | None:
        match link:
            case {"corrupt_chunk": number}:
                return CorruptChunk(number, "push")
            case {"corrupt_pulled_chunk": number}:
                return CorruptChunk(number, "pull")
            case {"cancelled_calls": num_calls}:
                return CancelledCalls(num_calls)
            case {"deadline_ms": timeout_ms}:
                return Deadline(timeout_ms)
            case {"push_at_tokens": num_tokens}:
                return PushMeanwhile(num_tokens, lambda: self._subject.load("b"))
            case {"cut_at_bytes": num_bytes}:
                return CutLink(address, num_bytes, checkpoints.num_bytes_of(self._paths["b"]))
        return None


@asynccontextmanager
async def subject_of(daemons: Daemons, paths: dict[str, str]) -> AsyncIterator[Subject]:
    """The open daemon."""
    async with AsyncClient(daemons.open) as client:
        yield Subject(client, paths)


def _relative(value: Any, version: int, key: str = "") -> Any:
    """`value` with versions that are counted from the one at the beginning."""
    if isinstance(value, dict):
        return {name: _relative(each, version, name) for name, each in value.items()}
    if isinstance(value, list) and key == _SPAN:
        return [_relative(value[0], version, "version"), *value[1:]] if value else value
    if isinstance(value, list):
        return [_relative(each, version, _SPAN if key == "weight_spans" else key) for each in value]
    return value - version if key in _VERSIONS and isinstance(value, int) else value


def _disagreements(results: list[Any], others: list[Any], name: str, scenario: Scenario) -> list[str]:
    pairs = zip(scenario.steps, results, others, strict=False)
    return [
        f"step {i}, {step['do']}: {name} printed {other}, and this one {result}"
        for i, (step, result, other) in enumerate(pairs, 1)
        if result != other and not step.get("may_differ")
    ]
