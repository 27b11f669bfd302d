"""The command line of scripts/conformance: what cannot be right is refused before daemons start."""

import pytest

from clients.conformance.runner.__main__ import parsed
from clients.conformance.runner.drivers import DRIVERS


def test_all_drivers_take_part_unless_others_are_named() -> None:
    assert parsed([]).drivers == DRIVERS
    named = parsed(["--driver", "go=env A=1 'a b'", "--driver", "c=true", "--only", "cancel, stream"])
    assert named.drivers == {"go": ["env", "A=1", "a b"], "c": ["true"]}
    assert [each.name for each in named.scenarios] == ["cancel", "stream"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "cancel,nonesuch"], "no scenario is named 'nonesuch'; there are cancel, "),
        (["--driver", "go"], "'go' is not NAME=COMMAND"),
        (["--driver", "go= "], "'go= ' is not NAME=COMMAND"),
        (["--driver", "=true"], "'=true' is not NAME=COMMAND"),
        (["--driver", "go='true"], "No closing quotation"),
        (["--driver", "go=nonesuch --fast"], "there is no program 'nonesuch'"),
        (["--driver", "go=true", "--driver", "go=false"], "there are two drivers 'go'"),
        (["--mutate", "reason", "--only", "tls-wrong-token"], "--mutate changes nothing in scenarios of the secured"),
        (["--mutate", "nonesuch"], "invalid choice"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(arguments)
    assert said in capsys.readouterr().err
