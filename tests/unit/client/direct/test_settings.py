"""What may be given as `direct`, and what `Direct` may be given."""

import pytest

from genserve.client import AsyncClient, Direct
from genserve.errors import InvalidFieldError
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"policies": "best"}, "direct.policies"),
        ({"policies": ["session"]}, "direct.policies"),
        ({"report_interval_s": 0.01}, "direct.report_interval_s"),
        ({"silence_s": 0.3}, "direct.silence_s"),
        ({"keep_s": 1.0}, "direct.keep_s"),
        ({"wait_ready_s": -1.0}, "direct.wait_ready_s"),
        ({"connect_timeout_s": "x"}, "direct.connect_timeout_s"),
        ({"overload_threshold": 0.5}, "direct.overload_threshold"),
    ],
)
def test_settings_are_checked_where_they_are_given(settings: dict[str, object], field: str) -> None:
    """By name."""
    with refuses(InvalidFieldError, field=field):
        Direct(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("direct", [None, 1, "yes", {"keep_s": 30.0}, Direct])
def test_what_is_no_setting_is_refused_where_it_is_given(direct: object) -> None:
    """Not by the first request, and with what may be given."""
    with refuses(InvalidFieldError, field="direct", says="True, False or a Direct"):
        AsyncClient("127.0.0.1:1", direct=direct)  # type: ignore[arg-type]
