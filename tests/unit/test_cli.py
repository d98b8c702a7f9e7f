"""The command: what it advertises, what it imports, and how every kind of end looks to a shell."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import sglang_fp8mla
from sglang_fp8mla import cli
from sglang_fp8mla.errors import Fp8MlaError, IncompatibleEnvironment, InvalidArgument

ROOT = Path(__file__).parents[2]


def run_cli(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_fp8mla.cli", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", **environ},
        timeout=120,
    )


@pytest.fixture
def one_command(monkeypatch):
    """A command line whose only subcommand, `work`, runs the function that the test sets."""
    module = types.ModuleType("sglang_fp8mla._work")

    def add_parser(subparsers: argparse._SubParsersAction) -> None:
        subparsers.add_parser("work").set_defaults(func=lambda args: module.work())

    module.add_parser = add_parser
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # find_spec asks a loaded module for its spec
    module.__spec__ = types.SimpleNamespace(name=module.__name__)
    monkeypatch.setattr(cli, "COMMANDS", (cli.Command("work", "_work"),))
    return module


def test_imports_nothing_heavy():
    """`sglang-fp8mla --help` must be quick and must work where nothing else is installed."""
    code = (
        "import sys, sglang_fp8mla.cli as c; c.build_parser();"
        "heavy = {'torch', 'triton', 'sglang', 'flashinfer', 'numpy', 'matplotlib', 'rich'};"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_advertises_only_what_exists(monkeypatch):
    """A command without its module is neither listed nor used in an example."""
    absent = cli.Command("absent", "no_such_module")
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, absent))
    monkeypatch.setattr(cli, "_EXAMPLES", (*cli._EXAMPLES, ("absent", "absent --now")))
    text = cli.build_parser().format_help()
    assert "absent" not in text
    assert "demo" in text
    with pytest.raises(SystemExit) as end:
        cli.main(["absent"])
    assert end.value.code == cli.EXIT_USAGE


def test_broken_module_leaves_the_others_usable(monkeypatch, capsys):
    """One subcommand that cannot be imported is named as such; `--help` and the others go on."""
    real = cli.importlib.import_module

    def import_module(name: str) -> types.ModuleType:
        if name.endswith(".doctor"):
            raise ImportError("No module named 'frobnicator'")
        return real(name)

    monkeypatch.setattr(cli.importlib, "import_module", import_module)
    monkeypatch.setattr(
        cli, "COMMANDS", (cli.Command("doctor", "doctor"), cli.Command("demo", "demo"))
    )
    monkeypatch.setattr(cli.Command, "exists", lambda self: True)
    assert "unavailable here: No module named 'frobnicator'" in cli.build_parser().format_help()
    assert cli.main(["doctor", "--json"]) == cli.EXIT_NO
    assert capsys.readouterr().err == (
        "sglang-fp8mla: error: doctor: cannot be loaded here: No module named 'frobnicator'\n"
    )
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--help"])
    assert end.value.code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IncompatibleEnvironment("no GPU"), cli.EXIT_NO),
        (InvalidArgument("x must be y, got z"), cli.EXIT_USAGE),
        (Fp8MlaError("something else"), cli.EXIT_USAGE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_our_errors_are_one_line(one_command, capsys, error, code):
    def work() -> int:
        raise error

    one_command.work = work
    assert cli.main(["work"]) == code
    assert capsys.readouterr() == ("", f"sglang-fp8mla: error: {error}\n")


def test_bugs_keep_their_traceback(one_command):
    """Only our own errors are shortened: a bug must show where it is."""

    def work() -> int:
        raise ZeroDivisionError

    one_command.work = work
    with pytest.raises(ZeroDivisionError):
        cli.main(["work"])


def test_interrupt_exits_130(one_command, capsys):
    def work() -> int:
        raise KeyboardInterrupt

    one_command.work = work
    assert cli.main(["work"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_exit_code_of_the_command_is_passed_on(one_command):
    one_command.work = lambda: 1
    assert cli.main(["work"]) == 1


def test_closed_pipe_is_silent():
    """`sglang-fp8mla estimate glm-5 --json | head -1` must not end in a traceback."""
    command = f"{sys.executable} -m sglang_fp8mla.cli estimate glm-5 --json"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_version():
    done = run_cli("--version")
    assert (done.returncode, done.stdout) == (0, f"sglang-fp8mla {sglang_fp8mla.__version__}\n")


@pytest.mark.parametrize("words", [(), ("no-such-command",), ("demo", "--pool", "many")])
def test_usage_errors_exit_2(words):
    done = run_cli(*words)
    assert done.returncode == cli.EXIT_USAGE
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_every_command_teaches():
    """Each `--help` has an example line that starts with the command itself."""
    for command in cli.COMMANDS:
        if not re.search(rf"\n    {command.name}\b", cli.build_parser().format_help()):
            continue
        done = run_cli(command.name, "--help")
        assert done.returncode == 0, done.stderr
        assert f"sglang-fp8mla {command.name}" in done.stdout.split("options:")[-1], command.name


@pytest.mark.parametrize("name", ["", "demo", "doctor", "estimate"])
def test_help_fits_80_columns(name):
    lines = run_cli(*filter(None, [name]), "--help").stdout.splitlines()
    assert [line for line in lines if len(line) > 82] == []
