"""How genserve's modules log in processes of its own."""

import json
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from genserve.observe.log_lines import as_text

LOG = """
logging.getLogger("genserve.engine.vllm.heartbeat").warning("no answer for %.1f s", 5)
logging.getLogger("genserve.rpc.status").info("not shown")
logging.getLogger("another").error("as before")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("genserve.rpc.status").exception("failed")
"""


@pytest.mark.parametrize(
    ("configured", "first"),
    [
        ("", "genserve: warning: no answer for 5.0 s"),
        ("logging.basicConfig(format='mine: %(message)s')", "mine: no answer for 5.0 s"),
        ("logging.getLogger('genserve').addHandler(logging.StreamHandler())", "no answer for 5.0 s"),
    ],
)
def test_a_logged_line_has_the_form_of_the_daemons_others(configured: str, first: str) -> None:
    """Once, with its level; unless the user configures logging."""
    program = (
        f"import logging\nfrom genserve.observe.log_lines import write_log_lines\n{configured}\nwrite_log_lines()\n"
    )
    done = subprocess.run([sys.executable, "-c", f"{program}write_log_lines()\n{LOG}"], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert lines[0] == first
    assert lines[1].endswith("as before") and not lines[1].startswith("genserve")
    assert lines[2] == first.replace("warning", "error").replace("no answer for 5.0 s", "failed")
    assert lines[-1] == "ZeroDivisionError: division by zero"


def json_lines(program: str) -> list[dict[str, str]]:
    """What a program writes to stderr, each line of which is an object."""
    begin = (
        "import logging, warnings\nfrom genserve.observe.log_lines import write_log_lines\nwrite_log_lines('json')\n"
    )
    # Whatever a library has put into PYTHONWARNINGS of this process.
    python = [sys.executable, "-W", "default::UserWarning", "-c"]
    done = subprocess.run([*python, begin + program], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_as_json_each_line_is_one_object_with_what_the_call_is_about() -> None:
    """Notices and tracebacks as well; two tasks do not see what the other one is about."""
    found = json_lines("""
import asyncio
from genserve.observe.log_lines import METHOD, PUSH_ID, about
from genserve.observe.notices import say

log = logging.getLogger("genserve.rpc.status")

async def call(number):
    METHOD.set("/s/m")
    PUSH_ID.set(f"p{number}")
    await asyncio.sleep(0)
    with about("r" * 1000):
        log.warning("call %d\\nsecond line", number)
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("failed")

async def main():
    await asyncio.gather(call(1), call(2))
    say("ready, and \u00e9")
    warnings.warn("old")

asyncio.run(main())
""")
    first, second = found[0], found[2]
    assert list(first) == ["time", "level", "logger", "message", "method", "request_id", "push_id"]
    assert (first["level"], first["logger"]) == ("WARNING", "genserve.rpc.status")
    assert [each["message"] for each in (first, second)] == ["call 1\nsecond line", "call 2\nsecond line"]
    assert [each["push_id"] for each in (first, second)] == ["p1", "p2"]
    assert first["request_id"] == "r" * 256
    assert "ZeroDivisionError" in found[1]["exception"] and "request_id" not in found[1]
    assert (found[4]["level"], found[4]["logger"], found[4]["message"]) == ("INFO", "genserve", "ready, and \u00e9")
    assert (found[5]["logger"], "old" in found[5]["message"]) == ("py.warnings", True)
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_json_whatever_stderr_can_write(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any text, and what libraries log that nobody has configured."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    found = json_lines("""
logging.getLogger("genserve.a").warning("\\xe9 \\U0001f600 \\u2028 \\udc80")
logging.getLogger("opentelemetry.exporter").error("two\\nlines")
""")
    assert [(each["logger"], each["message"]) for each in found] == [
        ("genserve.a", "\xe9 \U0001f600 \u2028 \\udc80"),
        ("opentelemetry.exporter", "two\nlines"),
    ]


@pytest.mark.parametrize(
    ("said", "level", "message"),
    [
        ("ready", "INFO", "ready"),
        ("warning: --auth-file a: is not TOML", "WARNING", "--auth-file a: is not TOML"),
        ("error: no room", "ERROR", "no room"),
    ],
)
def test_as_json_a_notice_has_the_level_that_it_begins_with(said: str, level: str, message: str) -> None:
    """And reads as it would have been as text where it is shown to people."""
    (found,) = json_lines(f"from genserve.observe.notices import say\nsay({said!r})")
    assert (found["level"], found["message"]) == (level, message)
    assert as_text(json.dumps(found)) == f"genserve: {said}"


def test_a_process_that_is_started_writes_what_its_starter_writes() -> None:
    """Workers and front ends are given no flags of ours."""
    (found,) = json_lines("""
import subprocess, sys
program = "import logging; from genserve.observe.log_lines import write_log_lines as w; w(); "
program += "logging.getLogger('genserve.worker').error('no memory')"
subprocess.run([sys.executable, "-c", program], check=True)
""")
    assert (found["level"], found["logger"], found["message"]) == ("ERROR", "genserve.worker", "no memory")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"logger": "genserve", "level": "INFO", "message": "ready"}', "genserve: ready"),
        ('{"logger": "genserve.rpc", "level": "WARNING", "message": "m"}', "genserve: warning: m"),
        ('{"logger": "vllm.engine", "level": "ERROR", "message": "m"}', None),
        ('{"logger": 1, "level": "ERROR", "message": "m"}', None),
        ('{"message": "m"}', None),
        ("{no json", None),
        ('{"message": ' + "[" * 100_000, None),
        ("genserve: ready", None),
    ],
)
def test_what_starts_daemons_reads_their_lines_in_either_form(line: str, text: str | None) -> None:
    """Other lines stay as they are."""
    assert as_text(line) == (line if text is None else text)
