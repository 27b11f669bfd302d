from pathlib import Path

import pytest

from tests.support.fixed_sleeps import fixed_sleeps, main

SLEEPS = """
import asyncio, time
async def a(done):
    await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    for _ in range(3):
        time.sleep(0.1)
    while not done():
        await asyncio.sleep(0.1)
    while True:
        if done():
            break
        time.sleep(0.1)
    for _ in range(30):
        if done():
            return lambda: time.sleep(1)
        time.sleep(0.1)
"""


def test_a_sleep_that_polls_nothing_is_found(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(SLEEPS)
    assert list(fixed_sleeps(file)) == [5, 7, 16]


def test_the_exit_status_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import time\ntime.sleep(1)\n")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{file}:2\n"
    file.write_text("")
    assert main([str(tmp_path)]) == 0
