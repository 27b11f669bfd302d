"""How the daemon reaches its workers before it can call them: names in vLLM's settings and in the environment."""

EXTENSION = "genserve.worker.extension.WeightExchangeExtension"
"""Qualified name for vLLM's `worker_extension_cls`."""

RESERVING_WORKER = "genserve.worker.update.reserving.ReservingWorker"
"""Qualified name for vLLM's `worker_cls` on a GPU."""

WEIGHT_UPDATE_KEY = "genserve_weight_update"
"""In vLLM's `additional_config`, which workers get before they load the model: --weight-update."""

RANKS_HERE_KEY = "genserve_ranks_here"
"""There as well: how many workers of the engine share the memory of this host."""

DAEMON_PID_VARIABLE = "GENSERVE_DAEMON_PID"
"""In the environment of the engine's processes: the process with which they end."""
