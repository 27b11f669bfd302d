"""Words that processes share."""

import os
import subprocess
import sys

from genserve.memory.words import SharedWords


def test_a_child_reads_what_the_parent_writes_and_the_other_way_round() -> None:
    """As integers and as floating-point numbers, also negative and large ones."""
    words = SharedWords.create(3, "test")
    assert list(words.ints) == [0, 0, 0]
    words.ints[0], words.floats[1] = -(2**63), 0.1
    program = (
        "from genserve.memory.words import SharedWords\n"
        f"words = SharedWords({words.fd})\n"
        "assert (words.ints[0], words.floats[1]) == (-(2**63), 0.1)\n"
        "words.ints[2] = 2**63 - 1\n"
    )
    subprocess.run([sys.executable, "-c", program], pass_fds=[words.fd], check=True, timeout=60)
    assert words.ints[2] == 2**63 - 1


def test_words_stay_usable_through_a_view_after_close() -> None:
    """Closing frees the descriptor only: what still counts at the end may be counted."""
    words = SharedWords.create(2, "test")
    ints, fd = words.ints, words.fd
    words.close()
    words.close()
    ints[1] = 5
    assert ints[1] == 5
    assert not os.path.exists(f"/proc/self/fd/{fd}") or "genserve-test" not in os.readlink(f"/proc/self/fd/{fd}")
