"""Policies by name."""

import ast
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from genserve.routing import names
from genserve.routing.names import (
    ALIASES,
    DEFAULT_POLICIES,
    DIRECT_POLICIES,
    POLICY_NAMES,
    PolicyName,
    make_chain,
    parse_policies,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefix,requests", ("prefix-aware", "requests")),
        ("prefix-aware, kv-cache", ("prefix-aware", "kv-cache")),
        ("requests", ("requests",)),
        ("SESSION,cache_aware,power_of_two", ("session", "prefix-aware", "power-of-two")),
        ("round_robin", ("round-robin",)),
        ("session", ("session", "requests")),
        ("prefix-aware,session", ("prefix-aware", "session", "requests")),
    ],
)
def test_the_names_of_torchrl_sglang_and_vllm_are_understood(text: str, expected: tuple[PolicyName, ...]) -> None:
    """Where the last policy may leave a request undecided, least requests follows."""
    assert parse_policies(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "random",
            "'random'.*: use session, prefix-aware, requests, kv-cache, ",
        ),
        ("", "''"),
        ("requests,", "''"),
        ("prefix,cache-aware", "prefix-aware .*twice"),
        ("requests,prefix", "requests .*prefix-aware .*never"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(text: str, message: str) -> None:
    """At the start, not at the first request."""
    with pytest.raises(ValueError, match=message):
        parse_policies(text)


@pytest.mark.parametrize("name", [*POLICY_NAMES, *ALIASES, DEFAULT_POLICIES, DIRECT_POLICIES])
def test_every_name_makes_a_chain_with_the_policies_of_that_name(name: str) -> None:
    """The statistics use the same names as the flag."""
    parsed = parse_policies(name)
    assert tuple(make_chain(parsed, Random(1), lambda: 0.0).num_decided) == parsed


def test_the_overload_threshold_reaches_its_policy() -> None:
    """1.0 is the least that makes sense."""
    with pytest.raises(ValueError, match=r"overload_threshold .*0\.5"):
        make_chain(parse_policies("prefix"), Random(1), lambda: 0.0, overload_threshold=0.5)


def test_every_policy_has_a_name() -> None:
    """A new policy that no flag can choose would be dead."""
    folder = Path(names.__file__).parent
    classes = [each for path in folder.glob("*.py") for each in ast.walk(ast.parse(path.read_text()))]
    named = {
        str(ast.literal_eval(line.value))
        for each in classes
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == "name"
        if line.value is not None
    }
    assert named == set(get_args(PolicyName))


def test_policies_load_nothing_but_the_standard_library() -> None:
    """A client that calls replicas itself pays for no more than it has. In a fresh interpreter."""
    program = (
        "import sys, genserve; before = {*sys.modules}; import genserve.routing.names\n"
        "loaded = {name.split('.')[0] for name in {*sys.modules} - before} - sys.stdlib_module_names\n"
        "print(sorted(loaded), 'google' in sys.modules, 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['genserve'] False False"
