"""`refuses`: what a test says of an error that users get. Its class is the reason; `field` is the field or tensor that
is wrong. The words may change; `says` is for what has to be among them, such as the flag of a remedy or a tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from genserve.errors import GenserveError

_Error = TypeVar("_Error", bound=GenserveError)


@contextmanager
def refuses(
    kind: type[_Error], *, field: str | None = None, says: str | None = None
) -> Iterator["pytest.ExceptionInfo[_Error]"]:
    """The block raises `kind` itself and no class derived from it. `field`: the path of exactly one violation, as in
    `google.rpc.BadRequest`. `says`: a part of the message."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__} was raised: {error}"
    fields = [violation.field for violation in error.violations]
    assert field is None or fields == [field], f"violations of {fields}: {error}"
    assert says is None or says in error.message, f"{says!r} is not said: {error}"
