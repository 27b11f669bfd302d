"""What a process does first that multiprocessing spawns for the daemon: it runs this module, before it loads what it is
to do, which may take as long as vLLM's import. `lifetime.end_spawned_with_this_process` has it do so."""

import genserve.process.interpreter  # noqa: F401
from genserve.worker.contract.lifetime import end_with_daemon

end_with_daemon()
