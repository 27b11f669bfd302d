"""`genserve status`: shows the state of the daemon, once or on every change; and why a request gets no tokens."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from genserve.cli.options import Subparsers, add_connection_options, open_client
from genserve.cli.quantities import mean_rate, rate_text, share_text, sizes_text
from genserve.cli.replicas import remark, version_row
from genserve.cli.streams import print_json
from genserve.errors import DrainingError, EngineDeadError, GenserveError, NoReplicaError

if TYPE_CHECKING:
    from genserve.client import (
        Client,
        EngineState,
        FleetReplica,
        PauseLease,
        PushInFlight,
        Replicas,
        ServerInfo,
        Status,
    )

_OF_THE_DAEMON: Final = {
    "weightUpdate": "weight_update",
    "weightUpdateReason": "weight_update_reason",
    "frontendPorts": "frontend_ports",
    "numFrontendsDown": "num_frontends_down",
    "openaiPort": "openai_port",
    "modelRunner": "model_runner",
}
"""What GetServerInfo returns, under its names in JSON, and their names in ServerInfo."""
_NO_FAILURES: Final[Mapping[str, str]] = {}


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "status",
        help="show the state of the daemon",
        description="Shows the state of the daemon, once or on every change.",
    )
    parser.add_argument("--watch", action="store_true", help="show every change until Ctrl-C")
    parser.add_argument(
        "--json",
        action="store_true",
        help=f"print each status as one line of protobuf JSON, and with it {', '.join(_OF_THE_DAEMON)}",
    )
    add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table, or JSON lines."""
    with open_client(args) as client:
        info: ServerInfo | None = None
        for number, status in enumerate(_statuses(client, watch=args.watch)):
            info = info or _server_info(client)
            if args.json:
                told = {} if info is None else {name: getattr(info, field) for name, field in _OF_THE_DAEMON.items()}
                print_json(status.message, **told)
                continue
            if number > 0:
                print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="" if sys.stdout.isatty() else "\n")
            replicas = _replicas(client, info)
            print(status_table(status, info, datetime.now(UTC), _failures(client, status), replicas), flush=True)
    return 0


def _failures(client: "Client", status: "Status") -> dict[str, str]:
    """Why pushes failed, by their ids, as the ends of their rows. Leaves out pushes that are gone, and those that the
    caller must not read."""
    found = {}
    for push in status.pushes:
        if push.state == "failed":
            with suppress(GenserveError):
                issues = client.get_push(push.push_id).push.issues
                found[push.push_id] = f": {'; '.join(f'{tensor} {said}'.strip() for tensor, said in issues)}"
    return found


def _server_info(client: "Client") -> "ServerInfo | None":
    """None while the engine starts, or no replica of a router answers, and if it never will have started."""
    try:
        return client.server_info()
    except (DrainingError, EngineDeadError, NoReplicaError):
        return None


def _replicas(client: "Client", info: "ServerInfo | None") -> "Replicas | None":
    """Those of a router; None of a daemon."""
    if info is not None and "fleet" not in info.features:
        return None
    try:
        return client.list_replicas()
    except GenserveError:
        return None


def state_line(state: "EngineState") -> str:
    """The phase, and what is asleep."""
    return f"{state.phase}: {_asleep_row(state)}" if state.asleep_tags else state.phase


def status_table(
    status: "Status",
    info: "ServerInfo | None",
    now: datetime,
    failures: Mapping[str, str] = _NO_FAILURES,
    replicas: "Replicas | None" = None,
) -> str:
    """One line for each of phase, model, load and how new weights are taken, one for vLLM's model runner if the daemon
    tells it, one for front ends, for the OpenAI server and for what is asleep if there are any, one for each pause and
    each push in flight. `now` counts if the daemon does not tell its own time. `failures`: the ends of the rows
    of failed pushes, by their ids. `replicas`: of a router; those that are not ready have a line each."""
    now = now if status.time is None else status.time
    state, load = status.state, status.load
    doing = [("doing", state.startup.described(now))] if state.startup is not None else []
    idle = [("replica", _replica_row(each)) for each in replicas.replicas if each.state != "ready"] if replicas else []
    if info is None:
        return _table([("phase", state.phase), *doing, *idle])
    version = str(state.weight_version) if replicas is None else version_row(replicas).removeprefix("version ")
    rows = [
        ("phase", state.phase),
        *doing,
        ("version", version),
        ("model", info.model),
        *([("runner", f"{info.model_runner}, of vLLM's model runners")] if info.model_runner else []),
        ("load", f"{load.running} running, {load.waiting} waiting, {load.tokens_per_second:.0f} tok/s"),
        ("cache", f"{load.kv_usage:.0%} in use, {load.prefix_cache_hit_rate:.0%} prefix hits"),
        ("updates", f"{info.weight_update}: {info.weight_update_reason}"),
        *([("serving", _frontends_row(info))] if info.frontend_ports or info.num_frontends_down else []),
        *([("openai", f"HTTP on port {info.openai_port}")] if info.openai_port else []),
        *([("asleep", _asleep_row(state))] if state.asleep_tags else []),
        *idle,
        *(("pause", _lease_row(lease, now)) for lease in state.pauses),
        *(("push", _push_row(push, now) + failures.get(push.push_id, "")) for push in status.pushes),
    ]
    return _table(rows)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<8} {value}" for name, value in rows)


def _statuses(client: "Client", *, watch: bool) -> "Iterator[Status]":
    if watch:
        yield from client.watch_status()
    else:
        yield client.status()


def _asleep_row(state: "EngineState") -> str:
    parts = ", ".join(state.asleep_tags)
    if not state.weights_discarded:
        return parts
    push = "push a version" if "weights" not in state.asleep_tags else "wake them up and push a version"
    restored = f"wake up everything, which restores version {state.weight_version}"
    return f"{parts}; the weights were discarded: {push}, or {restored}"


def _replica_row(replica: "FleetReplica") -> str:
    return "  ".join(part for part in (replica.address, replica.state, remark(replica)) if part)


def _frontends_row(info: "ServerInfo") -> str:
    ports = ", ".join(map(str, info.frontend_ports))
    down = f"; {info.num_frontends_down} ended again and again, and stay down" if info.num_frontends_down else ""
    return f"{len(info.frontend_ports)} front ends{f', on ports {ports}' if ports else ''}{down}"


def _lease_row(lease: "PauseLease", now: datetime) -> str:
    left = time_left(lease, now)
    return "  ".join(part for part in (lease.lease_id, lease.mode, left, lease.holder) if part != "")


def _push_row(push: "PushInFlight", now: datetime) -> str:
    adapter = [f"adapter {push.lora_name}"] if push.lora_name else []
    version = [f"version {push.weight_version}"] if push.weight_version else []  # that of an adapter may be given later
    parts = [push.push_id, *adapter, *version, push.state]
    if push.state == "receiving":
        rate = mean_rate(push.received_bytes, push.begin_time, now)
        parts += [share_text(push.received_bytes, push.total_bytes), sizes_text(push.received_bytes, push.total_bytes)]
        parts += [] if rate is None else [rate_text(rate)]
    return "  ".join(parts)


def why_waiting(status: "Status") -> str:
    """The reason why all requests wait now, and for how long; "" if tokens are generated."""
    state = status.state
    now = datetime.now(UTC) if status.time is None else status.time
    if state.startup is not None:
        return state.startup.described(now)
    if state.phase == "sleeping":
        return "the engine is asleep; wake it up: genserve wake-up"
    if state.pauses and state.phase not in ("dead", "tainted"):
        return _paused(state.pauses, now)
    if state.phase not in ("running", "applying"):
        return f"it is {state.phase}"
    return _queued(state) if state.phase == "running" and state.waiting_requests else ""


def time_left(lease: "PauseLease", now: datetime) -> str:
    """How long a pause still lasts, for people."""
    if lease.expire_time is None:
        return "no expiry"
    return f"{max((lease.expire_time - now).total_seconds(), 0):.0f} s left"


def _paused(pauses: "list[PauseLease]", now: datetime) -> str:
    last = max(pauses, key=lambda each: math.inf if each.expire_time is None else each.expire_time.timestamp())
    others = f", and {len(pauses) - 1} more pauses" if len(pauses) > 1 else ""
    who = last.holder or "a holder without a name"
    return f"paused by {who}, {time_left(last, now)}{others}; to end the pause: genserve resume {last.lease_id}"


def _queued(state: "EngineState") -> str:
    return f"{state.running_requests} sequences run, and {state.waiting_requests} wait for their turn"
