"""`genserve push`: sends the weights of a file or directory to the daemon, which applies them while it serves."""

import argparse
import sys
import time
from typing import TYPE_CHECKING, TextIO

from genserve.cli.options import (
    Subparsers,
    add_apply_options,
    add_connection_options,
    add_timeout,
    apply_options,
    connection_flags,
    count,
    open_client,
)
from genserve.cli.streams import print_json
from genserve.settings.flags import seconds

if TYPE_CHECKING:
    from genserve.client import ApplyOptions, Client, PushProgress, PushResult
    from genserve.wire.literals import PushAction

    class _EveryPush(ApplyOptions):
        action: PushAction
        prepared_ttl_s: float
        force: bool


_ACTIONS = {
    "validate": "check only names, types and shapes; send no bytes",
    "stage": "send the bytes; `genserve commit` applies them later",
    "prepare": "send the bytes and build the version beside the served one; `genserve commit` exchanges them",
}


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "push",
        help="push weights from a checkpoint",
        description="Pushes weights into the daemon, which applies them while it serves.",
    )
    parser.add_argument("path", metavar="PATH", help="a .safetensors file or a checkpoint directory")
    parser.add_argument("--partial", action="store_true", help="allow missing tensors, which keep their present values")
    parser.add_argument("--streams", type=count, default=1, metavar="N", help="number of parallel streams (default: 1)")
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        help="send the weights through shared memory, or never (default: if the daemon can use it)",
    )
    add_push_options(parser, default="the served one + 1")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pushes, with progress on stderr and the outcome on stdout."""
    from genserve.errors import InvalidFieldError

    with open_client(args) as client:
        version, progress = version_of(args, client), ProgressDisplay(sys.stderr)
        try:
            result = client.push_weights(
                args.path,
                version=version,
                streams=args.streams,
                shared_memory=args.shared_memory,
                partial=args.partial,
                progress=progress.show,
                timeout_s=args.timeout,
                **push_options(args),
            )
        except ValueError as error:  # the file is not what it claims to be
            raise InvalidFieldError(str(error)) from error
        finally:
            progress.end()
    return print_result(result, args)


def add_push_options(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Adds the options that all commands for pushes share: --version, --force, the `action` (--validate, --stage,
    --prepare), how the push is applied, --timeout and --json. `default` describes the version without --version."""
    parser.add_argument("--version", type=int, metavar="N", help=f"version of the weights (default: {default})")
    parser.add_argument("--force", action="store_true", help="accept a version that is not above the served one")
    parser.set_defaults(action="apply")
    only = parser.add_mutually_exclusive_group()
    for action, text in _ACTIONS.items():
        only.add_argument(f"--{action}", action="store_const", dest="action", const=action, help=text)
    parser.add_argument(
        "--prepared-ttl",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="how long --prepare waits for `genserve commit` (default: 60s)",
    )
    add_apply_options(parser)
    add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as protobuf JSON")
    add_connection_options(parser)


def push_options(args: argparse.Namespace) -> "_EveryPush":
    """The options of `add_push_options` as keyword arguments of the client."""
    return {
        **apply_options(args),
        "action": args.action,
        "prepared_ttl_s": args.prepared_ttl,
        "force": args.force,
    }


def version_of(args: argparse.Namespace, client: "Client") -> int:
    """The version from --version, or the one after the served one."""
    asked: int | None = args.version
    return client.status().state.weight_version + 1 if asked is None else asked


def print_result(result: "PushResult", args: argparse.Namespace) -> int:
    """Prints the outcome of a push, as the options say. Returns the exit status."""
    if args.json:
        print_json(result.message)
    else:
        print_outcome(result)
        if result.push.state in ("staged", "prepared"):
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + args.prepared_ttl))
            limit = f"  # before {until}, when it is discarded" if result.push.state == "prepared" else ""
            print(f"genserve commit {result.push.push_id}{connection_flags(args)}{limit}")
    return 1 if result.push.issues else 0


class ProgressDisplay:
    """Bytes, share, speed and time left: one line that is redrawn on a terminal, or a line every few seconds."""

    _REDRAW_S = 0.1
    _LINE_S = 5.0

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._redraws = output.isatty()
        self._shown_at = 0.0
        self._open_line = False

    def show(self, progress: "PushProgress") -> None:
        """Shows the progress, unless it was shown a moment ago."""
        now = time.monotonic()
        done = progress.sent_bytes >= progress.total_bytes
        if not done and now - self._shown_at < (self._REDRAW_S if self._redraws else self._LINE_S):
            return
        self._shown_at = now
        line = progress_line(progress)
        if self._redraws:
            self._output.write(f"\r\x1b[K{line}")
            self._open_line = True
        else:
            self._output.write(f"{line}\n")
        self._output.flush()

    def end(self) -> None:
        """Ends the line that is redrawn."""
        if self._open_line:
            self._output.write("\n")
            self._open_line = False


def progress_line(progress: "PushProgress") -> str:
    """` 42 %  1.26 / 3.00 GB  1.10 GB/s  2 s left`; GB are 10^9 bytes."""
    share = progress.sent_bytes / progress.total_bytes if progress.total_bytes > 0 else 1.0
    speed = progress.sent_bytes / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
    left_s = (progress.total_bytes - progress.sent_bytes) / speed if speed > 0 else 0.0
    sizes = f"{progress.sent_bytes / 1e9:.2f} / {progress.total_bytes / 1e9:.2f} GB"
    resumes = f"  resumed {progress.num_resumes}x" if progress.num_resumes > 0 else ""
    return f"{share:4.0%}  {sizes}  {speed / 1e9:.2f} GB/s  {left_s:.0f} s left{resumes}"


def print_outcome(result: "PushResult") -> None:
    """Prints the outcome of a push for people."""
    for tensor, description in result.push.issues:
        print(f"  {tensor}: {description}")
    if result.applied is None:
        print(f"version {result.push.weight_version}: {result.push.state}; serving {result.state.weight_version}")
        return
    applied = result.applied
    for step, duration_s in applied.step_s.items():
        print(f"  {step:<8} {duration_s * 1000:10.1f} ms")
    if applied.paused_s > 0:
        kept, ended = applied.requests_kept, applied.requests_aborted
        print(f"paused for {applied.paused_s * 1000:.1f} ms; requests kept: {kept}, ended: {ended}")
    # longest_wait and discard are known later: GetPush returns them.
    print(f"tokens to recompute: {'unknown' if applied.recomputed_tokens is None else applied.recomputed_tokens}")
    print(f"weights {applied.previous_version} -> {applied.active_version}")
