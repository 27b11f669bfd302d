"""Which trace a call belongs to, and the steps in it."""

import asyncio
from collections.abc import Iterator

import pytest

from genserve.observe import trace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def steps() -> Iterator[list[str]]:
    """Each begin and each end."""
    found: list[str] = []

    def begin(name: str) -> trace.End:
        found.append(f"{name} begins")
        return lambda error: found.append(f"{name} ends with {error!r}")

    trace.trace_steps(begin)
    yield found
    trace.trace_steps(None)


async def kept(*metadata: tuple[str, str | bytes]) -> object:
    """What is known in a task that has seen these metadata, and in those that it starts."""

    async def call() -> object:
        trace.keep_headers(metadata)
        return await asyncio.create_task(asyncio.to_thread(trace.headers))

    return await asyncio.create_task(call())


async def test_a_call_belongs_to_the_trace_that_its_metadata_name() -> None:
    """Two headers are kept, and nothing else of what came; other tasks know nothing of it."""
    state = ("tracestate", "a=b")
    assert await kept(("authorization", "Bearer x"), ("traceparent", PARENT), state) == {
        "traceparent": PARENT,
        "tracestate": "a=b",
    }
    assert trace.headers() is None


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("tracestate", "a=b")],
        [("traceparent", b"\xff")],
        [("traceparent", "0" * 513)],
        [("traceparent", "é")],
        [("traceparent", "x")],
    ],
)
async def test_what_names_no_trace_is_no_header(metadata: list[tuple[str, str | bytes]]) -> None:
    """It would be passed on to whoever cannot take it."""
    assert await kept(*metadata) is None


@pytest.mark.parametrize(
    "state", ["", ",,,", "=", "a," * 200, ",".join(["a=b"] * 33), "A=b", "a=b=c", "a=" + "b" * 511]
)
async def test_a_state_of_another_form_is_left_out(state: str) -> None:
    """OpenTelemetry would write a line of the log for each member."""
    assert await kept(("traceparent", PARENT), ("tracestate", state)) == {"traceparent": PARENT}


async def test_a_state_of_the_standard_is_kept() -> None:
    """With blanks around commas, and keys of tenants."""
    state = ",".join(["a=b , 1t@v=c d", *["a=b"] * 30])
    assert await kept(("traceparent", PARENT), ("tracestate", state)) == {"traceparent": PARENT, "tracestate": state}


def test_steps_are_reported_with_the_error_that_ended_them(steps: list[str]) -> None:
    """One within another."""

    def work(fails: bool) -> None:
        with trace.step("outer"), trace.step("inner"):
            if fails:
                raise ValueError("x")

    work(False)
    with pytest.raises(ValueError, match="x"):
        work(True)
    failure = repr(ValueError("x"))
    inner = ["outer begins", "inner begins", "inner ends with {}", "outer ends with {}"]
    assert steps == [each.format(None) for each in inner] + [each.format(failure) for each in inner]


async def test_steps_cost_nothing_where_nobody_traces_them() -> None:
    """And do the same."""
    with trace.step("alone"):
        pass
    with pytest.raises(KeyError), trace.step("alone"):
        raise KeyError
