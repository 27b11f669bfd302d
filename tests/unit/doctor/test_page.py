"""docs/doctor.md says what is checked."""

import re
from pathlib import Path

from genserve.doctor.room import Memory, ModelSize, room_verdicts
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.trial.verdicts import way_verdicts
from genserve.doctor.verdict import Level
from tests.unit.doctor.conftest import GB, snapshot, way
from tests.unit.doctor.machine.bad_machines import BAD as BAD_MACHINES
from tests.unit.doctor.trial.bad_daemons import BAD as BAD_DAEMONS

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_every_check_is_in_the_table() -> None:
    """And nothing else is; the devices are numbered."""
    model = ModelSize("m", GB, GB, 1)
    computed = [*room_verdicts(Memory(None, GB), ServeFlags(), model)]
    checks = {check for check, *_ in BAD_MACHINES} | {check for check, *_ in BAD_DAEMONS}
    checks |= {verdict.check for verdict in computed if verdict.level is not Level.INFO}
    checks.add("temporary files")
    table = PAGE.read_text().split("\n## The checks\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted({re.sub(r"device \d", "device N", check) for check in checks})


def test_the_example_has_the_checks_of_a_daemon_that_is_well() -> None:
    """As they are printed."""
    verdicts = way_verdicts(way(), {name: snapshot(name) for name in "ab"}, expect_cold=True)
    example = PAGE.read_text().split("\n## An example\n")[1]
    for verdict in verdicts:
        assert re.search(rf"^  \w+ +{re.escape(verdict.check)}  ", example, re.MULTILINE), verdict.check
