"""How much of an invalid request over HTTP is looked at: each list up to its first element that is wrong.

For every wrong element pydantic collects an error of each kind that it might have been. 30 kB took half a minute, in
which nobody else was answered, and 11 GB.
"""

from collections.abc import Iterable
from typing import Any, Final

from pydantic_core import SchemaValidator

_LISTS: Final = ("list", "tuple", "set", "frozenset")


def fail_fast(routes: Iterable[Any]) -> None:
    """For the bodies of requests to these routes of FastAPI."""
    for route in routes:
        for field in getattr(getattr(route, "dependant", None), "body_params", ()):
            # internal: FastAPI's adapter of this parameter of this route. Validators of models that are built already
            # would be taken as they are.
            adapter = field._type_adapter
            adapter.validator = SchemaValidator(_failing_fast(adapter.core_schema), _use_prebuilt=False)


def _failing_fast(schema: Any) -> Any:
    """The same schema of pydantic-core, in which lists fail at once."""
    if isinstance(schema, dict):
        own = {name: _failing_fast(part) for name, part in schema.items()}
        return own | {"fail_fast": True} if schema.get("type") in _LISTS else own
    if isinstance(schema, list):
        return [_failing_fast(part) for part in schema]
    return tuple(map(_failing_fast, schema)) if type(schema) is tuple else schema
