"""`sglang-fp8mla bench`: kernels side by side on real models' shapes, checked, then timed.

Only the standard library at module level; torch is imported when something runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleEnvironment, InvalidArgument
from ..outputs import require_writable
from .cases import CASES, GROUPS, POOL, SWEEPS, Case, select, sweep

if TYPE_CHECKING:
    from .measure import Row

# the table is built without torch, so the names stand here; a test holds them against BUILDERS
PATHS = ("stock", "gather_cast", "native", "fused", "bf16", "sglang_triton", "flashmla")


def _cases(args: argparse.Namespace) -> list[tuple[Case, str]]:
    """The cases asked for, each with the sweep that it belongs to or nothing."""
    chosen: list[tuple[Case, str]] = []
    if args.shape:
        for text in args.shape:
            chosen.append((_parse_shape(text, args.pool), ""))
    kinds = list(args.sweep)
    if args.plot and not kinds and not args.load:
        kinds = ["length", "batch"]
    for kind in kinds:
        cases = sweep(kind, num_heads=args.heads, bs=args.bs, kv_len=args.length, pool=args.pool)
        chosen += [(case, kind) for case in cases]
    if args.case or not chosen:
        chosen = [(case, "") for case in select(args.case or ["default"])] + chosen
    return chosen


def _parse_shape(text: str, pool: int) -> Case:
    """`HEADSxBATCHxTOKENS`."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        raise InvalidArgument(f"bench: --shape must be HEADSxBATCHxTOKENS, got {text!r}")
    heads, bs, kv_len = map(int, parts)
    return Case(f"shape-{text}", heads, bs, kv_len, pool=pool)


def _paths(text: str | None) -> list[str]:
    names = [name for name in (text or ",".join(PATHS)).split(",") if name]
    unknown = [name for name in names if name not in PATHS]
    if unknown or not names:
        raise InvalidArgument(f"bench: --path must name some of {', '.join(PATHS)}, got {text!r}")
    return list(dict.fromkeys(names))


def require_device(name: str | None) -> Any:
    """The torch device to measure on.

    Raises:
        IncompatibleEnvironment: torch or triton is missing, or there is no such device.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise IncompatibleEnvironment(
            f"this needs torch and triton ({error}): pip install 'sglang-fp8mla[sglang]'"
        ) from None

    if name is None and not torch.cuda.is_available():
        raise IncompatibleEnvironment(
            "no CUDA device here; --device cpu runs small cases through Triton's "
            "interpreter, to see that they are right, and says nothing about speed"
        )
    device = torch.device(name or "cuda")
    if device.type == "cpu":
        import os

        if os.environ.get("TRITON_INTERPRET") != "1":
            raise IncompatibleEnvironment("--device cpu needs TRITON_INTERPRET=1")
    return device


def measure_all(
    cases: Sequence[tuple[Case, str]], paths: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Run everything, writing `--json` after each case; return the results."""
    from ..machine import machine
    from ..progress import Bar, can_draw
    from .report import SCHEMA

    device = require_device(args.device)
    from .measure import run_case
    from .timing import Timer, copy_bandwidth

    timer = Timer(device, repeat=args.repeat)
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine(),
        "device": str(device),
        "bandwidth": copy_bandwidth(timer),
        "cases": {},
        "rows": [],
    }
    with Bar(len(cases)) as bar:
        for case, kind in cases:
            begin = time.monotonic()

            def tick(what: str, name: str = case.name) -> None:
                bar.describe(f"{name} {what}")

            rows: list[Row] = run_case(
                case, paths, timer, check=args.check, bandwidth=data["bandwidth"], tick=tick
            )
            data["cases"][case.name] = {
                **asdict(case),
                "sweep": kind,
                "live": case.live,
                "floor_bytes": case.floor_bytes,
            }
            data["rows"] += [row.to_json() for row in rows]
            bar.advance()
            if args.json and args.json != "-":
                Path(args.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
            if not can_draw():
                found = ", ".join(f"{r.path} {r.us:.1f}" for r in rows if r.us is not None)
                seconds = time.monotonic() - begin
                sys.stderr.write(f"[{seconds:5.1f} s] {case.name}: {found or 'nothing ran'}\n")
    return data


def run(args: argparse.Namespace) -> int:
    """Measure or load, show, compare, plot; 1 when a check failed or something became slower."""
    from . import report

    if args.list:
        _list()
        return 0
    old = report.load(Path(args.compare)) if args.compare else None
    require_writable(args.json, "bench: --json")
    require_writable(args.plot, "bench: --plot")
    if args.repeat < 1:
        raise InvalidArgument(f"bench: --repeat must be at least 1, got {args.repeat}")
    if args.load:
        data = report.load(Path(args.load))
    else:
        cases, paths = _cases(args), _paths(args.path)
        if args.plot:
            from ..trace_plot import require_matplotlib

            require_matplotlib()
        data = measure_all(cases, paths, args)
    report.show(data, old)
    if args.json == "-":
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
    elif args.json:
        Path(args.json).write_text(json.dumps(data, indent=1), encoding="utf-8")
    report.require_results(data)
    if args.plot:
        report.plot(data, Path(args.plot))
        sys.stderr.write(f"plot: {args.plot}\n")
    code = 0
    if any(row["check"] == "FAILED" for row in data["rows"]):
        sys.stderr.write("FAILED: a path gave wrong results; its time is not shown\n")
        code = 1
    if old is not None and args.max_slowdown is not None:
        for case, path, ratio in report.slower(data, old, args.max_slowdown):
            sys.stderr.write(f"slower: {case} {path} takes {ratio:.2f}x as long as before\n")
            code = 1
    return code


def _list() -> None:
    from ..tables import print_table

    rows = [
        [c.name, str(c.num_heads), str(c.bs), str(c.q_len), f"{c.kv_len:,}", f"{c.pool:,}", c.about]
        for c in CASES.values()
    ]
    columns = ["case", "heads", "batch", "q", "tokens", "pool", "what"]
    print_table("cases", columns, rows, right=(1, 2, 3, 4, 5))
    for name, members in GROUPS.items():
        sys.stdout.write(f"group {name}: {len(members)} cases\n")


_DESCRIPTION = """\
Time one layer of attention over an FP8 MLA pool: what stock does (cast the whole pool, then
attend), each of our paths, a 16-bit pool, and other kernels where they are installed. Every path is
first checked against a float64 reference on the very operands that are timed; a wrong one gets no
time. Times are medians of CUDA graph replays with a cold L2."""

_EPILOG = """\
examples:
  sglang-fp8mla bench                                       ten shapes of real models
  sglang-fp8mla bench --case 'deepseek-v3-dp*' --case edges --json new.json
  sglang-fp8mla bench --case default --compare old.json --max-slowdown 5
  sglang-fp8mla bench --sweep length --heads 16 --bs 1 --plot length.png
  sglang-fp8mla bench --load new.json --plot again.png      draw elsewhere than measured
  TRITON_INTERPRET=1 sglang-fp8mla bench --device cpu --shape 2x2x64 --pool 256

columns: us/step is work that comes once per forward, not per layer (listing live slots, dividing
work); TB/s is the KV traffic of that path over its time; roofline is the time that reading each
live FP8 row once takes at the copy bandwidth measured in this run, as a share of the time.

exit codes: 0 done; 1 a path gave wrong results, nothing could run, or slower than --max-slowdown
allows; 2 wrong command line."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="time the kernels on this GPU, on shapes of real models",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="case, group or pattern; may be repeated (default: the group `default`)",
    )
    parser.add_argument("--list", action="store_true", help="list cases and groups, run nothing")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="HxBxT",
        help="a case by heads, batch, tokens",
    )
    parser.add_argument("--path", metavar="NAME,...", help=f"some of {', '.join(PATHS)} (all)")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        choices=SWEEPS,
        help="grow one size by powers of two; may be repeated",
    )
    parser.add_argument("--heads", type=int, default=16, help="of sweeps (%(default)s)")
    parser.add_argument("--bs", type=int, default=1, help="of sweeps (%(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="of sweeps (%(default)s)")
    parser.add_argument(
        "--pool", type=int, default=POOL, help="slots, for sweeps and shapes (%(default)s)"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare each path with the reference before it is timed",
    )
    parser.add_argument("--repeat", type=int, default=20, help="timed replays (%(default)s)")
    parser.add_argument("--device", metavar="DEV", help="cuda, cuda:N, or cpu (interpreted, tiny)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON")
    parser.add_argument("--load", metavar="FILE", help="show, compare or plot results, run nothing")
    parser.add_argument("--compare", metavar="OLD", help="show old results beside the new")
    parser.add_argument(
        "--max-slowdown", type=float, metavar="PCT", help="with --compare: exit 1 beyond that"
    )
    parser.add_argument("--plot", metavar="PNG", help="draw the sweeps (default: length and batch)")
    parser.set_defaults(func=run)
