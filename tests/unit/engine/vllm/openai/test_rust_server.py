"""What vLLM's OpenAI server in Rust finds when it begins."""

import multiprocessing
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from genserve.engine.vllm.openai import rust_server
from genserve.engine.vllm.openai.rust_server import RustServer


@pytest.fixture
def few_files() -> Iterator[int]:
    """A process may have 512 files open, unless it asks for more; how many it may have then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        yield 65_535 if hard == resource.RLIM_INFINITY else min(65_535, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_gets_its_key_and_may_have_thousands_of_connections(few_files: int, tmp_path: Path) -> None:
    """As with `vllm serve`, whatever limit the daemon has; and its key as a variable."""
    told, binary = tmp_path / "told", tmp_path / "vllm-rs"
    binary.write_text(f"#!/bin/sh\nulimit -Sn > {told}\necho $VLLM_API_KEY >> {told}\n")
    binary.chmod(0o755)
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    try:
        server = RustServer(os.getpid(), [str(binary)], *sockets, {"VLLM_API_KEY": "secret"})
        process = multiprocessing.get_context("spawn").Process(target=rust_server.run, args=(server,), daemon=True)
        process.start()
        process.join(30)
    finally:
        for each in sockets:
            each.close()
    assert process.exitcode == 0
    assert told.read_text().split() == [str(few_files), "secret"]
