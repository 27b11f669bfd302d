"""Each kind of bug, and what is left alone."""

from pathlib import Path

import pytest

from tools.mutants.loading import probed
from tools.mutants.operators import mutants_of
from tools.mutants.trials import statement_starts


def bugs(tmp_path: Path, source: str) -> set[str]:
    """The line with each bug that the source can have."""
    path = tmp_path / "module.py"
    path.write_text(source)
    return {mutant.after for mutant in mutants_of(path)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {"x = (a <= b)", "x = (a == b)"}),
        ("x = a is b", {"x = (a is not b)"}),
        ("x = a and b", {"x = (a or b)"}),
        ("x = not a", {"x = a"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = 3", {"x = 4", "x = 2"}),
        ("x = True", {"x = False"}),
        ("f(a, b)", {"f(b, a)", "pass"}),
        ("g(max(a, b))", {"pass"}),
        ("f(timeout_s=a)", {"pass"}),
        ("create_task(a, name=b)", {"pass"}),
        ("f(name=b)", {"f()", "pass"}),
        ("x = f(k=a, l=b)", {"x = f( l=b)", "x = f(k=a, )", "x = f(k=b, l=a)"}),
        ("x.y = a", {"pass"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if True]"}),
        ("raise a", {"pass"}),
    ],
)
def test_each_bug_is_one_change_of_one_line(tmp_path: Path, line: str, expected: set[str]) -> None:
    """All of them, and no other."""
    assert bugs(tmp_path, line + "\n") == expected


def test_bugs_in_blocks(tmp_path: Path) -> None:
    """Conditions, handlers, results and defaults."""
    source = (
        "async def f(a=1):\n    try:\n        if a:\n            await g(a)\n    except KeyError:\n        return a\n"
    )
    assert bugs(tmp_path, source) == {
        "async def f(a=2):",
        "async def f(a=0):",
        "if True:",
        "if False:",
        "pass",
        "except StopAsyncIteration:",
        "return None",
    }


@pytest.mark.parametrize(
    "source",
    [
        '"""Text, and 1 + 1."""\n',
        "x: Literal[1]\n",
        "def f(a: Literal[1]) -> Literal[2]: ...\n",
        '__all__ = ["a", "b"]\n',
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    f(a, b)\n",
        'log.error("%s", a + 1)\n',
        'x = f"{a + 1}"\n',
        "Kind = A | B\n",
        "LIMIT_S = 1.5\n",
    ],
)
def test_what_no_test_can_notice_is_left_alone(tmp_path: Path, source: str) -> None:
    """Text, types and log lines."""
    assert bugs(tmp_path, source) == set()


def test_bytes_are_counted_and_not_characters(tmp_path: Path) -> None:
    """A line with an umlaut is changed where the bug is."""
    assert bugs(tmp_path, 'x = "ü", a < b\n') == {'x = "ü", (a <= b)', 'x = "ü", (a == b)'}


def test_a_probed_module_does_the_same_and_says_which_lines_run() -> None:
    """Its docstring stays the first statement."""
    source = b'"""Doc."""\nfrom __future__ import annotations\nx = 1\nif x:\n    y = 2\nelse:\n    y = 3\n'
    seen: list[tuple[int, int]] = []
    names: dict[str, object] = {"_line_runs": seen.append}
    exec(compile(probed(source, 7), "module.py", "exec"), names)
    assert (names["y"], names["__doc__"]) == (2, "Doc.")
    assert seen == [(7, 3), (7, 4), (7, 5)]


def test_a_default_is_tried_with_all_that_call_its_function(tmp_path: Path) -> None:
    """The line itself runs on import, before any test."""
    path = tmp_path / "module.py"
    path.write_text("LIMIT = 3\n\ndef f(a=1):\n    b = a\n    return b\n\ndef g():\n    return LIMIT\n")
    assert [statement_starts(path, line) for line in (3, 4, 1)] == [([4, 5], False), ([4], False), ([4, 5, 8], True)]
