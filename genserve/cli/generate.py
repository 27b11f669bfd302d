"""`genserve generate`: streams the answer to one prompt as text or JSON."""

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from genserve.cli.options import Subparsers, add_connection_options, add_timeout, open_client, to_the_same
from genserve.cli.streams import print_json, read_input
from genserve.errors import GenserveError, InvalidFieldError
from genserve.observe.notices import say
from genserve.settings.flags import seconds

if TYPE_CHECKING:
    from genserve.client import Client, Generation, PromptLike

# Flag, type and help of the options that are passed on under the name they have in the client.
_PASSED_ON: Final[tuple[tuple[str, Any, str], ...]] = (
    ("temperature", float, "0 = greedy"),
    ("top-p", float, "nucleus sampling"),
    ("top-k", int, "sample from this many most likely tokens; 0 = all"),
    ("min-p", float, "minimum probability, relative to the most likely token"),
    ("presence-penalty", float, "in [-2, 2]"),
    ("frequency-penalty", float, "in [-2, 2]"),
    ("repetition-penalty", float, "1 = none"),
    ("seed", int, "random seed of this request"),
    ("n", int, "number of sequences"),
    ("max-tokens", int, "maximum number of output tokens of a sequence"),
    ("min-tokens", int, "minimum number of output tokens of a sequence"),
    ("logprobs", int, "alternatives per token in --json; 0 = the sampled token only"),
    ("json-schema", str, "restrict the output to a JSON schema"),
    ("regex", str, "restrict the output to a regular expression"),
    ("grammar", str, "restrict the output to an EBNF grammar"),
    ("lora-name", str, "LoRA adapter"),
    ("priority", int, "requests with smaller values run first"),
    ("min-weight-version", int, "refuse the request while an older version is served"),
    ("request-id", str, "name of the request"),
    ("session-id", str, "requests with the same one go to the same replica of a fleet"),
)
# Reasons why a sequence ends early that the request did not ask for: an Abort or a shutdown, a pause in mode abort.
_ENDED_BY_OTHERS: Final = frozenset(("aborted", "paused"))

_WHY_FIRST_S: Final = 1.0
"""Time without a token after which a person reads why; then every `_WHY_NEXT_S`."""
_WHY_NEXT_S: Final = 5.0
_STATUS_TIMEOUT_S: Final = 5.0


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "generate",
        help="generate from a prompt",
        description="Generates from a prompt and prints text or JSON as it comes.",
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text; default: standard input")
    parser.add_argument("--chat", action="store_true", help="treat the prompt as a user message of a chat")
    parser.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    parser.add_argument("--json", action="store_true", help="print each message as one line of protobuf JSON")
    parser.add_argument("--stats", action="store_true", help="print tokens, speed and weight versions on stderr")
    sampling = parser.add_argument_group("generation")
    for flag, kind, text in _PASSED_ON:
        sampling.add_argument(f"--{flag}", type=kind, metavar=kind.__name__.upper(), help=text)
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="string that ends a sequence; may be repeated"
    )
    sampling.add_argument(
        "--choice", action="append", metavar="TEXT", help="an allowed answer; repeat the flag for each"
    )
    sampling.add_argument("--json-object", action="store_true", default=None, help="restrict the output to JSON")
    sampling.add_argument(
        "--ignore-eos", action="store_true", default=None, help="continue after the end-of-sequence token"
    )
    sampling.add_argument(
        "--time-budget",
        type=seconds,
        dest="time_budget_s",
        metavar="TIME",
        help="end the request after this time, such as 2s",
    )
    add_timeout(parser)
    add_connection_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Streams to stdout; Ctrl-C ends the request in the daemon."""
    from genserve.client import Generation

    prompt = _prompt(args)
    passed_on = [flag.replace("-", "_") for flag, _, _ in _PASSED_ON]
    passed_on += ["stop", "choice", "json_object", "ignore_eos", "time_budget_s"]
    options: Any = {name: getattr(args, name) for name in passed_on}
    generation = Generation()
    started_at = time.monotonic()
    first_token_s: float | None = None
    with (
        open_client(args) as client,
        _ending_the_line(generation, is_printed=not args.json and args.n in (None, 1)),
        telling_why(client, args) as begun,
    ):
        for delta in client.stream(prompt, timeout_s=args.timeout, **options):
            begun.set()
            generation.add(delta)
            if first_token_s is None and any(output.token_ids for output in delta.outputs):
                first_token_s = time.monotonic() - started_at
            if args.json:
                print_json(delta.message)
            elif args.n is None or args.n == 1:
                print(delta.text, end="", flush=True)
    if not args.json:
        _print_rest(generation)
    if early := sorted({each.finish_reason for each in generation.sequences} & _ENDED_BY_OTHERS):
        say(f"the answer is not complete: {', '.join(early)}")
    if args.stats:
        _print_stats(generation, time.monotonic() - started_at, first_token_s)
    return 0


def _prompt(args: argparse.Namespace) -> "PromptLike":
    text = args.prompt if args.prompt is not None else _read_prompt()
    if not args.chat and args.system is None:
        return str(text)
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _read_prompt() -> str:
    if sys.stdin.isatty():
        say("reading the prompt from the terminal; Ctrl-D on an empty line ends it")
    if (text := read_input()) == "":
        raise InvalidFieldError.of(
            "prompt", "none was given: write it behind the command, or pipe it into standard input"
        )
    return text


@contextmanager
def _ending_the_line(generation: "Generation", *, is_printed: bool) -> Iterator[None]:
    """An error of a stream has a line of its own, also after a part of the answer."""
    try:
        yield
    except GenserveError:
        if is_printed and generation.sequences and not generation.text.endswith("\n"):
            print(flush=True)
        raise


def _print_rest(generation: "Generation") -> None:
    """Ends the line of one sequence, which has been printed; prints several, which would have been mixed."""
    if len(generation.sequences) <= 1:
        if not generation.text.endswith("\n"):
            print()
        return
    for sequence in generation.sequences:
        print(f"[{sequence.index}] {sequence.text}")


def _print_stats(generation: "Generation", elapsed_s: float, first_token_s: float | None) -> None:
    num_tokens = sum(len(sequence.token_ids) for sequence in generation.sequences)
    num_prompt_tokens = generation.prompt.num_tokens if generation.prompt is not None else 0
    reasons = ", ".join(sequence.finish_reason for sequence in generation.sequences)
    spans = [span for sequence in generation.sequences for span in sequence.weight_spans]
    versions = sorted({span.version for span in spans})
    of_adapter = sorted({span.lora_version for span in spans} - {0})
    parts = [
        f"{num_prompt_tokens} prompt tokens",
        f"{num_tokens} output tokens ({reasons})",
        f"{num_tokens / elapsed_s:.1f} tok/s",
        f"first token after {first_token_s * 1000:.0f} ms" if first_token_s is not None else "no token",
        f"weights {', '.join(map(str, versions))}",
        *([f"adapter {', '.join(map(str, of_adapter))}"] if of_adapter else []),
    ]
    print(" | ".join(parts), file=sys.stderr)


@contextmanager
def telling_why(client: "Client", args: argparse.Namespace) -> "Iterator[threading.Event]":
    """Says on a terminal's stderr, while the block runs and the event is not set, what keeps the daemon from
    generating: after a second, and again when it is something else."""
    begun = threading.Event()
    if not sys.stderr.isatty():
        yield begun
        return
    telling = threading.Thread(target=_tell, args=(client, begun, args), name="genserve-waiting", daemon=True)
    telling.start()
    try:
        yield begun
    finally:
        begun.set()


def _tell(client: "Client", begun: threading.Event, args: argparse.Namespace) -> None:
    from genserve.cli.status import why_waiting

    said, wait_s = "", _WHY_FIRST_S
    while not begun.wait(wait_s):
        wait_s = _WHY_NEXT_S
        try:
            why = why_waiting(client.status(timeout_s=_STATUS_TIMEOUT_S))
        except (GenserveError, RuntimeError):  # the call that waits says it
            continue
        if why and not begun.is_set() and _subject(why) != said:
            said = _subject(why)
            why = to_the_same(why, args)
            say("waiting: " + "".join(each if each.isprintable() else "?" for each in why))  # others give the names


def _subject(why: str) -> str:
    """Without the numbers, which change all the time."""
    return "".join(each for each in why if not each.isdigit())
