"""Settings of all tests: how many run at a time, and what is started before them and ended after."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import (
    costs,
    daemon_process,
    failure_evidence,
    known_secrets,
    memory_files,
    once_more,
    standstills,
    tiers,
    time_limits,
    vllm_plugin,
    worker_errors,
)
from tests.support.warm import process

# No property is about time, and a machine that does something else meanwhile is no defect.
settings.register_profile("genserve", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("genserve")

MAX_CORES = 2
"""That tests use: they have bounds on time, which hold with the processes of pytest that this makes."""
FLAKY_RECORD = Path(__file__).with_name("flaky.tsv")
_WITH_DAEMONS = tuple(Path(__file__).with_name(each) for each in ("engine", "faults"))
"""Folders whose tests start real daemons."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of scripts/test, .ci/run and scripts/flaky."""
    tiers.add_options(parser)
    parser.extra_info["legs of scripts/test, its first argument"] = "--quick --runner-v2 --vllm-next --fake-cuda"
    parser.addoption("--once-more", action="store_true", help="try failed tests once more, alone (three at most)")
    parser.addoption("--costs", action="store_true", help="print what folders and tests cost")
    standstills.add_option(parser)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`, which scripts/test asks for: several for whole directories, and pytest itself for chosen files or
    tests, and beside a GPU, which there may be one of."""
    if tiers.is_choice(config) or _has_gpu():
        return 0
    num_cores = min(MAX_CORES, len(os.sched_getaffinity(0)))
    chosen = [Path(each).absolute() for each in config.args]
    engines = any(each.is_relative_to(path) or path.is_relative_to(each) for path in chosen for each in _WITH_DAEMONS)
    # With engines, one of them waits while the others compute; without, tests wait for sockets half of the time.
    return 2 * num_cores - 1 if engines else 2 * num_cores


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugins, and gives each process of pytest a core for its engines."""
    config.pluginmanager.register(failure_evidence.FailureEvidence())
    config.pluginmanager.register(memory_files.GivenBack())
    config.pluginmanager.register(time_limits)
    config.pluginmanager.register(tiers.Tiers(config))
    config.pluginmanager.register(once_more)
    if config.option.once_more and not hasattr(config, "workerinput"):
        config.pluginmanager.register(once_more.OnceMore(config, FLAKY_RECORD))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(worker_errors.WorkerErrors())
    if config.option.costs:
        config.pluginmanager.register(costs.Costs())
    standstills.register(config)
    if not _has_gpu():  # whose tests tell times of vLLM as it is
        vllm_plugin.load_in_engines()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:  # vLLM would bind all engines to the first core
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", str(cores[int(worker.removeprefix("gw")) % min(MAX_CORES, len(cores))])
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to import what daemons do, while tests run that need none. Collections of garbage need not walk what was
    imported here: torch alone makes one take a second."""
    gc.collect()
    gc.freeze()
    if any(_starts_daemons(item) for item in session.items):
        process.warm_up()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives clients of real daemons a token, which is told by nothing: see `daemons_that_have_ended`."""
    if _starts_daemons(item):
        os.environ.setdefault(known_secrets.VARIABLE, known_secrets.known_token())
    else:
        os.environ.pop(known_secrets.VARIABLE, None)


def _starts_daemons(item: pytest.Item) -> bool:
    return any(item.path.is_relative_to(each) for each in _WITH_DAEMONS)  # tests/unit/engine starts none


@pytest.fixture(scope="session", autouse=True)
def daemons_that_have_ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Those that were asked to end and not waited for. No secret is in what all daemons have written."""
    yield
    try:
        daemon_process.wait_ended()
    finally:
        known_secrets.check_files(tmp_path_factory.getbasetemp())
