"""A program in the place of the daemon, for what a real one does not do on demand: it never serves, ends, or does not
end."""

import os
from pathlib import Path

DAEMON = """
import os, signal, subprocess, sys, time

STOPPED_BY = (signal.SIGINT, signal.SIGTERM)
IGNORING = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def say(line):
    print("genserve: " + line, file=sys.stderr, flush=True)


def serve():
    # Kept for `drain`: a signal that comes just before a wait would not end it, nor call a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED_BY)
    print("genserve: serving a model on 127.0.0.1:9", flush=True)


def drain():
    say("drained after " + signal.Signals(signal.sigwait(STOPPED_BY)).name)
    sys.exit(0)


model = sys.argv[sys.argv.index("--model") + 1]
listens = "; 127.0.0.1:9 tells how far it is" if model.startswith("that listens") else ""
say("starting the engine for " + model + listens)
if model == "that listens and exits":
    time.sleep(0.5)
    say("no memory")
    sys.exit(1)
if model == "that exits":
    say("no such model")
    sys.exit(1)
if model == "that raises":
    raise ValueError("no such model")
if model == "that is killed":
    os.kill(os.getpid(), signal.SIGKILL)
if model == "that floods":
    os.write(1, b"x" * (1 << 20))  # without an end of line, as a progress bar
    os.write(1, b"\\n")
if model.startswith("with a child"):
    subprocess.Popen([sys.executable, "-c", IGNORING])
if not model.endswith("that never serves"):
    serve()
if model == "that floods":
    os.write(1, b"y" * (1 << 20))
    say("flooded")
if model == "that fails later":
    time.sleep(0.1)
    say("the engine has died")
    sys.exit(3)
if model == "that is drained":
    time.sleep(0.1)
    say("Drain: draining")
    sys.exit(0)
if not model.endswith("that never serves") and model != "that ignores SIGTERM":
    drain()
while True:
    time.sleep(600)
"""


def install(directory: Path) -> dict[str, str]:
    """The environment in which it is found as genserve."""
    package = directory / "genserve"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(DAEMON)
    return {"PYTHONPATH": os.fspath(package.parent), "PYTHONSAFEPATH": "1"}
