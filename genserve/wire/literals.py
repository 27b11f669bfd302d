"""The words in which callers say what they want: for the client and the command line alike. It loads nothing, because
`genserve --help` loads it."""

from typing import Literal

PauseMode = Literal["keep", "wait", "abort"]
"""What a pause does to requests in flight: freeze them, let them finish first, or end them."""

KvPolicy = Literal["reuse", "recompute"]
"""What happens to the KV cache: keep it, or prefill again under the weights that are served then."""

PrepareMode = Literal["running", "paused"]
"""Whether generation runs or is paused while a version is prepared."""

PushAction = Literal["apply", "stage", "prepare", "validate"]
"""What a push does when every byte has arrived. `stage` and `prepare` wait for a commit, `validate` checks only the
manifest and sends no bytes."""

SleepTag = Literal["weights", "kv_cache", "scheduling"]
"""A part of the engine that sleeps and wakes up."""

FRONTEND_PORTS_KEY = "genserve-frontend-ports"
"""Initial metadata of a call of GenerationService that the daemon itself serves: the ports of its front ends, joined by
commas. Absent if there are none."""

ROUTER_ID_KEY = "genserve-router-id"
"""Metadata of all calls of a router to its replicas: which run of a router they come from."""

FIRST_SLOT_KEY = "genserve-first-slot"
"""Metadata of a call of GenerateMany: where the numbers of its sequences in columns begin; default 0. Whoever joins the
answers of several daemons into one stream gives each of them its own SLOTS_PER_CALL numbers."""

SLOTS_PER_CALL = 1 << 16
"""As many sequences of a call of GenerateMany can have a number at once. The output of others comes as items."""
