"""Every environment variable of the package: typed, documented once, and never guessed at.

A bad value raises, and so does an unknown `SGLANG_FP8MLA_*` name: a typo must not mean the default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidArgument

PREFIX = "SGLANG_FP8MLA_"
DECODE_PATHS = ("auto", "native", "fused", "gather_cast")
EXTEND_PATHS = ("auto", "native", "gather_cast")


@dataclass(frozen=True)
class Variable:
    """One environment variable: `choices` empty means free text."""

    name: str
    default: str
    choices: tuple[str, ...]
    help: str


ENVIRONMENT = (
    Variable(
        "SGLANG_FP8MLA_DECODE_PATH",
        "auto",
        DECODE_PATHS,
        "How decode attends. `auto` takes the fastest path whose probe passed; any other value "
        "forces that path, and the server refuses to start when it cannot run.",
    ),
    Variable(
        "SGLANG_FP8MLA_EXTEND_PATH",
        "auto",
        EXTEND_PATHS,
        "The same for extend: paged prefill, target verify and draft extend.",
    ),
    Variable(
        "SGLANG_FP8MLA_PROFILE",
        "",
        (),
        "Path of a measured table (JSON, written by `sglang-fp8mla calibrate`) that `auto` reads "
        "in place of the one shipped in the package.",
    ),
    Variable(
        "SGLANG_FP8MLA_BATCH_INVARIANT",
        "0",
        ("0", "1"),
        "1 makes the `fused` decode path split every request at fixed lengths, so that a "
        "request's result does not depend, in any bit, on what else is in the batch.",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The variables of one process, parsed."""

    decode_path: str = "auto"
    extend_path: str = "auto"
    profile: str = ""
    batch_invariant: bool = False


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Parse the package's variables.

    Args:
        environ: the mapping to read; `os.environ` when None.

    Raises:
        InvalidArgument: a value is not one of its choices, or a `SGLANG_FP8MLA_*` name is unknown.
    """
    environ = os.environ if environ is None else environ
    known = {variable.name: variable for variable in ENVIRONMENT}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidArgument(
                f"environment: {name} must be one of {', '.join(known)}, got an unknown name{hint}"
            )

    def value(name: str) -> str:
        variable = known[name]
        text = environ.get(name, variable.default).strip() or variable.default
        if variable.choices and text not in variable.choices:
            *head, last = variable.choices
            raise InvalidArgument(f"{name} must be {', '.join(head)} or {last}, got {text!r}")
        return text

    return Settings(
        decode_path=value("SGLANG_FP8MLA_DECODE_PATH"),
        extend_path=value("SGLANG_FP8MLA_EXTEND_PATH"),
        profile=value("SGLANG_FP8MLA_PROFILE"),
        batch_invariant=value("SGLANG_FP8MLA_BATCH_INVARIANT") == "1",
    )
