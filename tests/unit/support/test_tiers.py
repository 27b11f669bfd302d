import pytest

from tests.support import tiers
from tests.support.tiers import changed_since, touches

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support import tiers
def pytest_addoption(parser):
    tiers.add_options(parser)
def pytest_configure(config):
    config.addinivalue_line("markers", "long(*subjects): long")
    config.pluginmanager.register(tiers.Tiers(config))
"""
TESTS = """
import pytest
def test_of_every_day(): pass
@pytest.mark.long("genserve/fleet")
def test_that_is_long(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "passed", "left_out"),
    [
        ((".",), 1, 1),
        ((".", "--all"), 2, 0),
        (("test_it.py",), 2, 0),
        (("test_it.py::test_that_is_long",), 1, 0),
        (("-k", "that_is_long"), 1, 1),
    ],
)
def test_long_tests_run_where_they_are_asked_for(
    pytester: pytest.Pytester, arguments: tuple[str, ...], passed: int, left_out: int
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    pytester.runpytest(*arguments).assert_outcomes(passed=passed, deselected=left_out)


@pytest.mark.parametrize(
    ("changed", "passed"), [("genserve/fleet/router.py", 2), ("requirements.lock", 2), ("genserve/rpc/server.py", 1)]
)
def test_long_tests_run_where_what_they_are_about_has_changed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, changed: str, passed: int
) -> None:
    """Another version of vLLM is about all of them."""
    monkeypatch.setattr(tiers, "changed_since", lambda commit: [changed])
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    pytester.runpytest_inprocess(".", "--touched-since", "HEAD~1").assert_outcomes(passed=passed, deselected=2 - passed)


def test_a_subject_is_a_file_or_a_folder() -> None:
    changed = ["genserve/fleet/router.py", "docs/fleet.md"]
    assert touches(changed, ["tests/test_it.py", "genserve/fleet"])
    assert touches(changed, ["docs/fleet.md"])
    assert not touches(changed, ["genserve/fleet/r", "genserve/fleets", "docs/fleet"])
    assert not touches([], ["genserve"])


def test_a_commit_that_does_not_exist_is_named() -> None:
    with pytest.raises(pytest.UsageError, match="no-such-commit"):
        changed_since("no-such-commit")
