"""Runs scenarios, one after the other, each with every driver."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from clients.conformance.runner import checkpoints
from clients.conformance.runner.daemons import Daemons
from clients.conformance.runner.drivers import results_of
from clients.conformance.runner.expectation import Rule, step_differences
from clients.conformance.runner.link import Meanwhile, link_to
from clients.conformance.runner.scenario import Scenario, filled
from clients.conformance.runner.subject import Subject
from clients.conformance.runner.table import Outcome
from genserve.client import AsyncClient
from genserve.errors import GenserveError

_VERSIONS = {"version", "previous_version", "active_version"}
_VARYING = {"request_id"}  # from run to run, where the scenario gives none
_NOT_IMPLEMENTED = {"error": {"reason": "NOT_IMPLEMENTED"}}
_SPAN = "one of weight_spans"
_NEAR = 0.005  # of a log-probability: two programs compute it in float32, and four decimals are printed


class Run:
    """All drivers against the same daemons."""

    def __init__(self, daemons: Daemons, subject: Subject) -> None:
        self._daemons = daemons
        self._subject = subject
        self._paths = daemons.checkpoints

    @classmethod
    @asynccontextmanager
    async def against(cls, daemons: Daemons) -> AsyncIterator["Run"]:
        """One with a client of its own, which restores and looks at the open daemon."""
        async with AsyncClient(daemons.open) as client:
            yield cls(daemons, Subject(client, daemons.checkpoints))

    async def scenario(
        self, scenario: Scenario, drivers: dict[str, Sequence[str]], mutation: str | None = None
    ) -> dict[str, Outcome]:
        """The outcome of each driver. What one prints that another does not is a difference as well. Between drivers
        and the open daemon is a relay that makes a mistake, if `mutation` names one."""
        outcomes: dict[str, Outcome] = {}
        alike: dict[str, list[Any]] = {}
        for name, command in drivers.items():
            version = 0
            try:
                if scenario.daemon == "open":
                    version = await self._subject.restore()
                outcomes[name] = await self._one(scenario, command, version, mutation)
            except GenserveError as error:
                outcomes[name] = Outcome([f"the runner's own call has failed: {error}"])
            alike[name] = [relative(result, version) for result in outcomes[name].results]
        add_disagreements(outcomes, alike, scenario)
        return outcomes

    async def _one(self, scenario: Scenario, command: Sequence[str], version: int, mutation: str | None) -> Outcome:
        names = {**self._paths, "run": secrets.token_hex(8)}
        steps = scenario.for_driver(names, version)
        is_open = scenario.daemon == "open"
        link = link_to(
            self._daemons.open if is_open else self._daemons.secured,
            scenario.link,
            mutation if is_open else None,
            whole_bytes=checkpoints.num_bytes_of(self._paths["b"]),
            meanwhile=Meanwhile(
                serve=lambda above: self._subject.load("b", above),
                forget=lambda: self._subject.discard(names["run"]),
                received=lambda: self._subject.received_bytes(names["run"]),
            ),
        )
        async with link as (address, events):
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
                if scenario.optional and _NOT_IMPLEMENTED in results:
                    return Outcome(results=results, is_left_out=True)
                found = self._compared(results, scenario, names, version)
            found += [line for each in events for line in each.differences()]
        if is_open:
            found += await self._subject.differences(filled(scenario.after, names, version))
        return Outcome(found, results)

    def _compared(self, results: list[Any], scenario: Scenario, names: dict[str, str], version: int) -> list[str]:
        if len(results) != len(scenario.steps):
            return [f"printed {len(results)} results for {len(scenario.steps)} steps"]
        found = []
        for i, (step, result) in enumerate(zip(scenario.steps, results, strict=True), 1):
            different = step_differences(result, filled(step["expect"], names, version), self._rules(results))
            found += [f"step {i}, {step['do']}: {each}" for each in different]
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
            "$num_bytes": lambda name: checkpoints.num_bytes_of(self._paths[name]),
            "$sha256": lambda name: checkpoints.sha256_of(self._paths[name]),
        }


def relative(value: Any, version: int, key: str = "") -> Any:
    """`value` with versions that are counted from the one at the beginning, without what varies from run to run."""
    if isinstance(value, dict):
        return {name: relative(each, version, name) for name, each in value.items() if name not in _VARYING}
    if isinstance(value, list) and key == _SPAN:
        return [relative(value[0], version, "version"), *value[1:]] if value else value
    if isinstance(value, list):
        return [relative(each, version, _SPAN if key == "weight_spans" else key) for each in value]
    return value - version if key in _VERSIONS and isinstance(value, int) else value


def add_disagreements(outcomes: dict[str, Outcome], alike: dict[str, list[Any]], scenario: Scenario) -> None:
    """Adds what a driver has printed that the first one did not, of those that did as the scenario says: a driver does
    not fail because another one did. `alike`: what each has printed, by its name, with versions that can be compared.
    """
    passed = [name for name, outcome in outcomes.items() if outcome.word == "ok"]
    for name in passed[1:]:
        outcomes[name].differences.extend(_disagreements(alike[name], alike[passed[0]], passed[0], scenario))


def _disagreements(results: list[Any], others: list[Any], name: str, scenario: Scenario) -> list[str]:
    pairs = zip(scenario.steps, results, others, strict=False)
    return [
        f"step {i}, {step['do']}: {name} printed {other}, and this one {result}"
        for i, (step, result, other) in enumerate(pairs, 1)
        if result != other and not step.get("may_differ")
    ]
