"""The server: imports what a daemon and its engine import, or what clients do, then forks a process for each `Launch`.

    python -m tests.support.warm.server DESCRIPTOR engine|client

The fork happens where nothing runs but its loop: no thread, no event loop, no engine. The new process is forked twice,
and the one between ends at once: an orphan goes to the nearest ancestor that takes orphans in, which is the process
that asked. So that one may wait for it and is told its status, as of any child.
"""

import gc
import importlib
import os
import signal
import socket
import sys
from functools import partial

from setproctitle import setproctitle

from tests.support.warm import child, wire

ENGINE_MODULES = (
    "genserve.cli.serve",
    "genserve.daemon.serve",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""What the processes of an engine import, as far as that does not depend on the model. Left out is what does something
when it is imported: genserve.worker.extension ties a worker to its daemon."""
CLIENT_MODULES = ("genserve.client", "torch.distributed")
"""What programs import that have no engine: seconds less."""
# Out of the way of the numbers under which new processes are to have their files.
_CONTROL = 900


def main() -> None:
    """Imports, then serves. In a process that it has forked it returns when that process's program has ended."""
    # It finds the memory for titles beside the first environment: too late once that has been replaced.
    setproctitle("python -m tests.support.warm.server")
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in ENGINE_MODULES if sys.argv[2] == "engine" else CLIENT_MODULES:
        importlib.import_module(name)
    if (count := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{count} threads run after the imports, and a fork would lose all but one")
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy what it walks
    serve(control, depth=0)


def serve(control: socket.socket, depth: int) -> None:
    """Forks processes until the one that asks for them has ended; `depth` is how many servers have forked this one.
    Returns in a process that it has forked, when that one's program has ended."""
    with control:
        os.dup2(control.fileno(), _CONTROL, inheritable=False)
    control = socket.socket(fileno=_CONTROL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # who reads the pipes of a process waits until the last one has closed them
        os.dup2(null, fd)
    os.close(null)
    for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # they are for the process that asks
        signal.signal(each, signal.SIG_IGN)
    while (received := wire.receive(control)) is not None:
        launch, files = received
        told, tell = os.pipe()
        ended, held = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid != 0:
                if launch.process_group is not None:
                    os.setpgid(pid, launch.process_group)
                os.write(tell, pid.to_bytes(8, "little"))
                os._exit(0)
            control.close()
            for fd in (told, tell, held):
                os.close(fd)
            os.read(ended, 1)  # returns when the process between has ended, and this one is the asker's child
            os.close(ended)
            child.become(launch, files, partial(_own_server, files, depth + 1) if depth < child.MAX_DEPTH else None)
            return
        for fd in (ended, held, tell, *files):
            os.close(fd)
        os.waitpid(between, 0)
        wire.answer(control, int.from_bytes(os.read(told, 8), "little"))
        os.close(told)
    os._exit(0)


def _own_server(files: list[int], depth: int) -> socket.socket:
    """Forks a server of this process as it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() != 0:
        theirs.close()
        return ours
    ours.close()
    for fd in files:
        os.close(fd)
    serve(theirs, depth)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
