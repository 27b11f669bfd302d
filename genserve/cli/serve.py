"""genserve serve: runs the daemon."""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import genserve.process.interpreter  # noqa: F401
from genserve.cli.config_file import with_config_file
from genserve.cli.options import unrecognized
from genserve.installed_engine import EngineNotUsableError, InstalledEngine, installed_engine

if TYPE_CHECKING:
    from genserve.settings.config import ServeConfig

_SAYS_CONFIG: Final = re.compile("--(hf-config-path|config-format|hf-overrides)([=.]|$)")
"""vLLM's flags that say where the model's configuration is, what it looks like, or what is in it."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command. The daemon parses its flags, because they include vLLM's and only the daemon imports vLLM."""
    parser = subparsers.add_parser("serve", help="run the daemon (takes vLLM's engine flags)", add_help=False)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the daemon until a signal or a failure; the exit status."""
    if _asks_for_own_help(args.flags):
        print(_own_help(), end="")
        return 0
    try:
        args.flags = with_config_file(with_model_flag(args.flags), switches())
    except ValueError as error:
        print(f"genserve serve: error: {error}", file=sys.stderr)
        return 2
    try:
        engine = installed_engine()
    except EngineNotUsableError as error:
        return _failed(str(error))
    if "--check" in args.flags:
        return _check(args.flags, engine)
    config = check_flags(args.flags, "genserve serve")
    try:
        _require_free(config)
    except OSError as error:
        return _failed(str(error))
    _quiet()
    try:
        from genserve.daemon import serve as daemon
    except (ImportError, OSError, RuntimeError) as error:
        return _failed(engine.import_failure(error))
    return daemon.main(args.flags)


def _failed(message: str) -> int:
    print(f"genserve: {message}", file=sys.stderr)
    return 1


def _check(flags: Sequence[str], engine: InstalledEngine) -> int:
    """Prints a line for each check; the exit status."""
    from genserve.doctor.verdict import Finding
    from genserve.settings.config import ServeConfig

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = check_flags(flags, "genserve serve") or ServeConfig()
    except SystemExit:
        print(Finding("flags", False, said.getvalue().removeprefix("genserve serve: error: ")))
        return 1
    return print_findings(config, flags, engine)


def print_findings(config: "ServeConfig", flags: Sequence[str], engine: InstalledEngine) -> int:
    """Prints a line for each check of a start with these flags, which are valid as far as `check_flags` knows; the exit
    status."""
    _quiet()
    status = 0
    try:
        from genserve.doctor.start_checks import Start, findings

        for finding in findings(Start(config, tuple(flags), _model_of(flags))):
            print(finding, flush=True)
            status = status if finding.is_ok else 1
    except ImportError as error:
        return _failed(engine.import_failure(error))
    return status


def _model_of(flags: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", nargs="?")  # check_flags refuses one without a value
    model: str | None = parser.parse_known_args(list(flags))[0].model
    return model


def _quiet() -> None:
    # vLLM logs a lot while it starts. The daemon prints what matters; VLLM_LOGGING_LEVEL=INFO shows the rest.
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_LOGS", "-all")  # errors alone
        os.environ.setdefault(
            "PYTHONWARNINGS", "ignore::FutureWarning,ignore::UserWarning"
        )  # in the engine's processes
        warnings.simplefilter("ignore", FutureWarning)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _asks_for_own_help(flags: Sequence[str]) -> bool:
    # As in vLLM's parser: of several the last one counts, and case does not.
    from genserve.settings.config import FLAG_GROUP

    asked = [flag for flag in flags if flag.startswith("--help=")]
    return bool(asked) and asked[-1].lower() == f"--help={FLAG_GROUP}"


def _own_help() -> str:
    """Each of genserve's flags. vLLM's parser would say the same, seconds later."""
    from genserve.settings.config import ServeConfig

    # Without a usage, which would hide that vLLM's flags are taken too.
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    ServeConfig.add_flags(parser)
    return parser.format_help()


def with_model_flag(arguments: Sequence[str]) -> list[str]:
    """Flags alone: the model may be the first argument, without --model. Raises ValueError if both are there, and say
    different things."""
    if not arguments or arguments[0].startswith("-"):
        return list(arguments)
    model, *flags = arguments
    if (named := _model_of(flags)) not in (None, model):
        raise ValueError(f"two models are named: {model}, and --model {named}")
    return ["--model", model, *flags]


def check_flags(flags: Sequence[str], prog: str, others_of_prog: Collection[str] = ()) -> "ServeConfig | None":
    """Refuses invalid values of genserve's flags, a model that does not exist, and flags that neither genserve nor vLLM
    has, before vLLM is imported to parse the others, which takes seconds. Exits as argparse does, naming the command
    `prog`, which has `others_of_prog`, too. Returns the settings; None if only the daemon knows them, or prints
    help."""
    from genserve.settings.config import MODEL_COMES_FIRST, OPENAI_FLAGS, ServeConfig, check_model

    # As in vLLM's parser: underscores are accepted.
    dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), flag) for flag in flags]
    parser = _OwnFlags(prog=prog, add_help=False, allow_abbrev=False)
    ServeConfig.add_flags(parser)
    parser.add_argument("--model")
    try:
        known, others = parser.parse_known_args(dashed)
        config = ServeConfig.from_flags(vars(known))
        if known.model is not None:
            check_model(known.model, has_config_elsewhere=any(map(_SAYS_CONFIG.match, others)))
        if others and not others[0].startswith("-"):  # no value of a flag of vLLM's
            raise ValueError(f"{unrecognized(others[:1], ())}; {MODEL_COMES_FIRST}")
        openai = [f"--{name.replace('_', '-')}" for name in OPENAI_FLAGS]
        if unknown := unknown_flags(others, openai):
            own = [*parser._option_string_actions, *others_of_prog]
            raise ValueError(unrecognized(unknown, [*own, *openai, *_vllm_flags()]))
    except ValueError as error:
        parser.error(str(error))
    return None if any(re.match("(-h|--help)(=|$)", flag) for flag in others) else config


def switches() -> list[str]:
    """Genserve's flags without a value."""
    from genserve.settings.config import ServeConfig
    from genserve.settings.flags import switches_of

    return switches_of(ServeConfig)


def _require_free(config: "ServeConfig | None") -> None:
    """Raises OSError for an address that the daemon will not be able to listen on."""
    from genserve.net import require_free

    if config is not None and not config.headless:
        require_free(config.host, config.port, config.uds)
        require_free(config.host, config.openai_port, flag="--openai-port")
        require_free(config.host, config.metrics_port, flag="--metrics-port")


def unknown_flags(arguments: Sequence[str], openai: Sequence[str]) -> list[str]:
    """The flags among the arguments that neither vLLM's engine has nor `openai`, its server. Empty if vLLM's flags are
    not known."""
    engines = _vllm_flags()
    if not engines:
        return []
    known = (*openai, *engines, "--help")
    # What has a space in its name is a value.
    names = [re.split("[=.]", each, maxsplit=1)[0] for each in arguments if re.match("--[^ =.]+($|[=.])", each)]
    # vLLM's parser takes the beginning of a name, --no-NAME for some, and --NAME.KEY for a key of a JSON object.
    return [
        name for name in names if not any(flag.startswith((name, name.replace("--no-", "--", 1))) for flag in known)
    ]


def _vllm_flags() -> set[str]:
    """The flags that the source of the installed vLLM names. Empty if vLLM is missing, if its source does not name
    them where the supported version does, or if a plugin may add flags."""
    spec = importlib.util.find_spec("vllm")  # imports nothing
    if spec is None or spec.origin is None or entry_points(group="vllm.platform_plugins"):
        return set()
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    flags = set(re.findall(r'"(--[a-z0-9-]+)"', source.read_text())) if source.is_file() else set()
    return flags if "--model" in flags else set()


class _OwnFlags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, because the usage would list genserve's flags only."""
        self.exit(2, f"{self.prog}: error: {message}\n")
