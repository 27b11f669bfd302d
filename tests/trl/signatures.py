"""Prints what differs between TRL's released client and ours, a line each; run in the environment with TRL."""

import inspect
from collections.abc import Iterator
from inspect import Parameter

import trl
from trl.generation.vllm_client import VLLMClient as Released

from genserve.integrations.trl import VLLMClient as Ours

# Where a client looks for its server unless told: each server has an address of its own.
OWN_DEFAULTS = {"host", "server_port"}


def differences() -> Iterator[str]:
    """Public methods and parameters of TRL's that ours lacks, or has at another place, of another kind or default."""
    for name, method in inspect.getmembers(Released, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        ours = getattr(Ours, name, None)
        if ours is None:
            yield f"{name} is missing"
            continue
        wanted = list(inspect.signature(method).parameters.values())
        found = list(inspect.signature(ours).parameters.values())
        # What ours has beside: by keyword alone, so that it is in nobody's way.
        found = [each for each in found if each.kind not in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)]
        if [each.name for each in found] != [each.name for each in wanted]:
            yield f"{name} takes {[each.name for each in found]}, TRL's {[each.name for each in wanted]}"
            continue
        for mine, theirs in zip(found, wanted, strict=True):
            if mine.kind != theirs.kind or (mine.default != theirs.default and mine.name not in OWN_DEFAULTS):
                yield f"{name}: {mine}, TRL's: {theirs}"


if __name__ == "__main__":
    print(f"compared with TRL {trl.__version__}")
    for difference in differences():
        print(difference)
