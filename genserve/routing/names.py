"""The policies by the names that people know: torchrl's, and where it has none, those of SGLang and vLLM's routers."""

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

from genserve.routing.chain import Chain
from genserve.routing.policies import KvCache, LeastRequests, Policy, PowerOfTwo, RoundRobin, Sessions
from genserve.routing.prefix_aware import OVERLOAD_THRESHOLD, PrefixAware, PrefixIndex

PolicyName: TypeAlias = Literal["session", "prefix-aware", "requests", "kv-cache", "power-of-two", "round-robin"]
"""A policy. torchrl's balancer knows all but session and power-of-two by these names."""

POLICY_NAMES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)
DEFAULT_POLICIES: Final = "session,prefix-aware,requests"
"""For a router, which knows of every request."""
DIRECT_POLICIES: Final = "session,prefix-aware,power-of-two"
"""For clients that call replicas themselves. They hear of each other's requests late, by the reports of the replicas,
and with `requests` they all run to the replica whose report is the oldest. They should ask for a report every 0.25 s or
more often: with one a second, a burst of many clients is uneven under every policy that looks at the load."""
FALLBACK: Final[PolicyName] = "requests"
"""Decides where the policies that were named do not."""

ALIASES: Final[Mapping[str, PolicyName]] = MappingProxyType(
    {
        "prefix": "prefix-aware",
        "cache-aware": "prefix-aware",  # SGLang's router, vLLM's router
        "prefixaware": "prefix-aware",  # vLLM's production stack
        "roundrobin": "round-robin",  # vLLM's production stack
    }
)
"""Other names of the same. `_` counts as `-`."""

_MAY_DECIDE: Final[frozenset[PolicyName]] = frozenset({"session", "prefix-aware"})


def parse_policies(text: str) -> tuple[PolicyName, ...]:
    """Returns the policies of a flag's text, such as "prefix,requests", in order. FALLBACK is added if the last one
    does not decide about every request.

    Raises ValueError, with a text for people, for an unknown or repeated name and for a policy that is never asked.
    """
    names: list[PolicyName] = []
    for written in text.split(","):
        name = _known(written.strip())
        if name in names:
            raise ValueError(f"policy {name} is there twice in {text!r}")
        if names and names[-1] not in _MAY_DECIDE:
            raise ValueError(f"policy {names[-1]} decides about every request, so {name} would never be asked")
        names.append(name)
    return (*names, FALLBACK) if names[-1] in _MAY_DECIDE else tuple(names)


def make_chain(
    names: tuple[PolicyName, ...],
    rng: Random,
    clock: Callable[[], float],
    overload_threshold: float = OVERLOAD_THRESHOLD,
) -> Chain:
    """Returns the chain of these policies. `rng` is their chance, and `clock` gives monotonic seconds."""
    make: dict[PolicyName, Callable[[], Policy]] = {
        "session": lambda: Sessions(clock),
        "prefix-aware": lambda: PrefixAware(PrefixIndex(), overload_threshold),
        "requests": lambda: LeastRequests(rng),
        "kv-cache": lambda: KvCache(rng),
        "power-of-two": lambda: PowerOfTwo(rng),
        "round-robin": lambda: RoundRobin(rng),
    }
    return Chain([make[name]() for name in names])


def _known(written: str) -> PolicyName:
    plain = written.lower().replace("_", "-")
    for name in POLICY_NAMES:
        if name == plain:
            return name
    if plain in ALIASES:
        return ALIASES[plain]
    raise ValueError(f"policy {written!r} is not known: use {', '.join(POLICY_NAMES)}")
