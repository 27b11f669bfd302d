"""How genserve's modules log in processes of its own."""

import subprocess
import sys

import pytest

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
    program = f"import logging\nfrom genserve.log_lines import write_log_lines\n{configured}\nwrite_log_lines()\n"
    done = subprocess.run([sys.executable, "-c", f"{program}write_log_lines()\n{LOG}"], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert lines[0] == first
    assert lines[1].endswith("as before") and not lines[1].startswith("genserve")
    assert lines[2] == first.replace("warning", "error").replace("no answer for 5.0 s", "failed")
    assert lines[-1] == "ZeroDivisionError: division by zero"
