"""The `sglang-fp8mla` command: one table of subcommands, each in its own module.

Imports only the standard library; the chosen subcommand imports the rest, so one that is missing or
broken leaves the others usable.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from . import __version__
from .errors import Fp8MlaError, IncompatibleEnvironment

EXIT_OK = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT

PROG = "sglang-fp8mla"


@dataclass(frozen=True)
class Command:
    """A subcommand and the module of this package that offers `add_parser` for it."""

    name: str
    module: str

    def exists(self) -> bool:
        return importlib.util.find_spec(f"{__package__}.{self.module}") is not None


COMMANDS = (
    Command("demo", "demo"),
    Command("doctor", "doctor"),
    Command("estimate", "estimate"),
    Command("trace", "trace"),
    Command("profile", "profile"),
    Command("selftest", "selftest"),
    Command("bench", "bench"),
    Command("calibrate", "calibrate"),
)

_DESCRIPTION = """\
FP8 KV caches for MLA models on stock SGLang, without casting the whole pool on
every layer. Serve with:
  sglang serve --model-path MODEL --kv-cache-dtype fp8_e4m3 \\
    --attention-backend flashinfer_mla_fp8"""

# (command, line): a line is printed only where its command exists
_EXAMPLES = (
    ("demo", "demo                  see what the backend does, no GPU needed"),
    (
        "estimate",
        "estimate glm-5 --tp 8 what the cast costs you, from a config alone",
    ),
    ("doctor", "doctor                will it run here, which path, and why"),
    (
        "selftest",
        "selftest              stock and ours on this GPU, tokens compared",
    ),
    ("bench", "bench                 each path at the shapes of real models"),
    ("trace", "trace trace.json.gz   is the cast in this profiler trace"),
)

_EXIT_CODES = """\
exit codes:
  0    done, and the answer is yes: it runs, outputs agree, no cast was found
  1    the answer is no, or the environment cannot do what was asked
  2    the command line or a setting is wrong
  3    trace and profile: the cast is there
  130  interrupted with Ctrl-C"""


_Subparsers = argparse._SubParsersAction  # argparse gives this type no public name


def _add_command(subparsers: _Subparsers[argparse.ArgumentParser], command: Command) -> None:
    """Add one subcommand; one that cannot be imported stays listed, and says why when called."""
    try:
        module = importlib.import_module(f"{__package__}.{command.module}")
        add_parser = getattr(module, "add_parser", None)
        if add_parser is not None:
            add_parser(subparsers)
        return
    except ImportError as error:
        reason = str(error)

    def run(args: argparse.Namespace) -> int:
        raise IncompatibleEnvironment(f"{command.name}: cannot be loaded here: {reason}")

    parser = subparsers.choices.get(command.name) or subparsers.add_parser(
        command.name, help=f"(unavailable here: {reason})", add_help=False
    )
    parser.set_defaults(func=run, takes_anything=True)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command, or of the subcommand `only` and no other."""
    commands = [c for c in COMMANDS if c.exists() and only in (None, c.name)]
    names = {c.name for c in commands}
    examples = [f"  {PROG} {line}" for name, line in _EXAMPLES if name in names]
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=_DESCRIPTION,
        epilog="\n".join(["examples:", *examples, "", _EXIT_CODES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for command in commands:
        _add_command(subparsers, command)
    return parser


def _one_line(error: BaseException) -> str:
    return f"{PROG}: error: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    `SystemExit` leaves here only from argparse (`--help`, `--version`, a wrong command line).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    known = {c.name for c in COMMANDS if c.exists()}
    parser = build_parser(words[0] if words and words[0] in known else None)
    args, unknown = parser.parse_known_args(words)
    if unknown and not getattr(args, "takes_anything", False):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = int(args.func(args))
        # a closed pipe shows at the flush; at interpreter exit it could not be caught
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except IncompatibleEnvironment as error:
        print(_one_line(error), file=sys.stderr)
        return EXIT_NO
    except Fp8MlaError as error:
        print(_one_line(error), file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # `| head` closed the pipe: what was read was read; keep the exit flush from failing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
