"""`sglang-fp8mla profile URL`: asks a running server for a trace of decode steps, and reads it.

Standard library only; the server is left as it was found, its profiler stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from .errors import IncompatibleEnvironment, InvalidArgument
from .serving import ServerFailed, call, ending_by_signal, generate, make_prompts

# decode steps after the recorded ones: the profiler stops when it sees one more, and the scheduler
# runs up to two ahead
_SPARE_STEPS = 8


def record(
    base: str,
    out: Path,
    *,
    num_steps: int,
    prompts: list[list[int]],
    timeout: float,
    api_key: str = "",
    tick: Callable[[str], None] = lambda what: None,
) -> list[Path]:
    """Record `num_steps` decode steps of one batch and return the trace files, one per rank.

    Args:
        base: the server's address, `http://host:port`.
        out: folder for the traces; the *server* writes there, so it must see the same file system.
        prompts: token ids of the batch to decode.
        timeout: seconds for the whole recording.
        api_key: sent with every request, where the server wants one.

    Raises:
        ServerFailed: the server refused, died, or wrote nothing that we can see.
    """
    out.mkdir(parents=True, exist_ok=True)
    # the server may run as another user than we do
    with contextlib.suppress(OSError):
        out.chmod(0o777)
    known = set(_traces(out))
    until = time.monotonic() + timeout
    request = {
        "output_dir": str(out),
        "num_steps": num_steps,
        "activities": ["CPU", "GPU"],
        "record_shapes": True,
        "with_stack": False,
        # one file for decode alone; without it the first steps are the prefill's
        "profile_by_stage": True,
        # puts the live tokens of each step into its name
        "detailed_annotations": True,
    }
    tick("starting the profiler")
    call(base, "/start_profile", request, timeout=30, api_key=api_key)
    try:
        tick("decoding")
        generate(
            base,
            prompts,
            num_steps + _SPARE_STEPS,
            timeout=max(1.0, until - time.monotonic()),
            api_key=api_key,
        )
        tick("waiting for the trace files")
        return _wait_for_traces(out, known, min(until, time.monotonic() + 30))
    except BaseException:
        # it stops by itself after the steps asked for; when these never came, it must be told
        with contextlib.suppress(ServerFailed):
            call(base, "/stop_profile", {}, timeout=30, api_key=api_key)
        raise


def _traces(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.trace.json.gz"), *folder.glob("*.trace.json")])


def _wait_for_traces(out: Path, known: set[Path], until: float) -> list[Path]:
    """The new decode traces in `out`, once their sizes stay the same for a second."""
    before: dict[Path, int] = {}
    while True:
        sizes = {p: p.stat().st_size for p in _traces(out) if p not in known}
        decode = [p for p in sizes if "-DECODE" in p.name]
        if decode and sizes == before and all(sizes.values()):
            return decode
        if time.monotonic() > until:
            raise ServerFailed(
                f"no decode trace appeared in {out}: if the server runs on another machine or in a "
                "container, the file is there; copy it here and run `sglang-fp8mla trace FILE`"
            )
        before = sizes
        time.sleep(1.0)


def parse_url(text: str) -> str:
    """`http://host:port`, from that or from `host:port`.

    Raises:
        InvalidArgument: it is neither.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise InvalidArgument(f"profile: URL must be http://HOST:PORT, got {text!r}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def run(args: argparse.Namespace) -> int:
    """Record and analyse; exit codes as `trace`."""
    from . import trace

    base = parse_url(args.url)
    for name, value in (("steps", args.steps), ("bs", args.bs), ("length", args.length)):
        if value < 1:
            raise InvalidArgument(f"profile: --{name} must be at least 1, got {value}")
    folder = args.out or tempfile.mkdtemp(prefix="sglang-fp8mla-profile-")
    out = Path(os.path.abspath(folder))
    try:
        with ending_by_signal():
            call(base, "/health", timeout=30, api_key=args.api_key)
            files = record(
                base,
                out,
                num_steps=args.steps,
                prompts=make_prompts(args.bs, args.length),
                timeout=args.timeout,
                api_key=args.api_key,
                tick=lambda what: void(sys.stderr.write(f"{base}: {what}\n")),
            )
    except ServerFailed as error:
        raise IncompatibleEnvironment(f"profile: {error}") from None
    sys.stderr.write(f"traces: {', '.join(map(str, files))}\n")
    args.files = [str(path) for path in files]
    return trace.run(args)


def void(value: object) -> None:
    """Turn a call that returns something into a callback that returns nothing."""


_DESCRIPTION = """\
Ask a running SGLang server for a profiler trace of a few decode steps (start, one batch, stop) and
analyse it as `trace` does. The server writes the trace itself, so it must share this file system;
its decoding pauses for some seconds while it does. A server that is busy with other requests is
recorded with them."""

_EPILOG = """\
examples:
  sglang-fp8mla profile http://127.0.0.1:30000
  sglang-fp8mla profile localhost:30000 --bs 8 --length 4096 --plot step.png

exit codes: 0 no full-pool cast; 3 it is there; 1 the server did not answer or wrote no trace;
2 wrong command line; 130 interrupted."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `profile` to the command line."""
    from .trace import add_output_arguments

    parser = subparsers.add_parser(
        "profile",
        help="record and analyse some decode steps of a running server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="of the server, http://HOST:PORT")
    parser.add_argument("--steps", type=int, default=5, help="decode steps (%(default)s)")
    parser.add_argument("--bs", type=int, default=1, help="requests in the batch (%(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens (%(default)s)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--api-key", default="", metavar="KEY", help="if the server wants one")
    parser.add_argument("--out", metavar="DIR", help="for the traces (default: a new folder)")
    add_output_arguments(parser)
    parser.set_defaults(func=run)
