"""`sglang-fp8mla calibrate`: measures our paths on this GPU and writes the table that `auto` reads.

The table is what SGLANG_FP8MLA_PROFILE names; `policy.py` has its schema.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench.cases import PAGE, POOL, Case
from .errors import IncompatibleEnvironment, InvalidArgument
from .outputs import require_writable

DECODE_PATHS = ("gather_cast", "native", "fused")
EXTEND_PATHS = ("gather_cast", "native")
# what is done once per forward is shared by the layers of the models that this is for
_LAYERS = 61
# a path has to be this much faster before the table switches to it at some batch size
_WORTH_IT = 0.97
# beyond the largest batch measured the last rule goes on
_NO_BOUND = 1 << 30


@dataclass(frozen=True)
class Grid:
    """What to measure. Every length class counts the same: nobody knows what a user will send."""

    heads: tuple[int, ...] = (8, 16, 32, 64, 128)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    lengths: tuple[int, ...] = (1024, 8192, 32_768)
    pool: int = POOL

    def cases(self, phase: str) -> list[Case]:
        """The shapes of a phase that fit the pool; extend: 4 queries (verify) or 512."""
        found = []
        for heads in self.heads:
            for bs in self.batches:
                for length in self.lengths:
                    if bs * length + PAGE > self.pool:
                        continue
                    name = f"{phase}-{heads}x{bs}x{length}"
                    if phase == "decode":
                        found.append(Case(name, heads, bs, length, self.pool))
                        continue
                    for q_len in (4, 512):
                        if q_len < length and bs * q_len <= 8192:
                            found.append(
                                Case(f"{name}q{q_len}", heads, bs, length, self.pool, q_len)
                            )
        return found


# microseconds per layer of (path) on one case, per-step work included
Measured = Mapping[str, float]


def choose_rules(cases: Sequence[tuple[Case, Measured]]) -> list[dict[str, Any]]:
    """Rules (max_heads, max_batch, path) from measurements, by heads and batch.

    Per (heads, batch): the path whose time, relative to the best of each case, has the smallest
    geometric mean; the fallback keeps its place unless another is `_WORTH_IT`. Neighbouring batches
    with one path become one rule, and the last rule of each head class has no bound.
    """
    table: defaultdict[int, defaultdict[int, list[Measured]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for case, times in cases:
        if times:
            table[case.num_heads][case.bs].append(times)
    rules: list[dict[str, Any]] = []
    for heads in sorted(table):
        mine: list[dict[str, Any]] = []
        for bs in sorted(table[heads]):
            path = _best(table[heads][bs])
            if mine and mine[-1]["path"] == path:
                mine[-1]["max_batch"] = bs
            else:
                mine.append({"max_heads": heads, "max_batch": bs, "path": path})
        mine[-1]["max_batch"] = _NO_BOUND
        rules += mine
    return rules


def _best(rows: Sequence[Measured]) -> str:
    """The path with the smallest mean slowdown among those that ran on every row."""
    common = set.intersection(*(set(times) for times in rows))
    if not common:
        return "gather_cast"

    def cost(path: str) -> float:
        return math.fsum(math.log(times[path] / min(times.values())) for times in rows) / len(rows)

    best = min(sorted(common), key=cost)
    fallback = "gather_cast"
    if fallback in common and cost(best) - cost(fallback) > math.log(_WORTH_IT):
        return fallback
    return best


def table_of(
    generation: str, source: str, decode: list[dict[str, Any]], extend: list[dict[str, Any]]
) -> dict[str, Any]:
    """The profile, in the schema that `policy.load_profile` reads."""
    from .policy import SCHEMA

    entry = {"source": source, "decode": decode, "extend": extend}
    return {"schema": SCHEMA, "generations": {generation: entry}}


def measure(
    grid: Grid, phase: str, paths: Sequence[str], timer: Any, tick: Callable[[str], None]
) -> list[tuple[Case, dict[str, float]]]:
    """Time `paths` on every case of a phase; a path that fails its check there is left out."""
    from .bench.measure import run_case

    found = []
    for case in grid.cases(phase):
        tick(case.name)
        rows = run_case(case, paths, timer, check=True, bandwidth=1.0)
        times = {
            row.path: row.us + (row.step_us or 0.0) / _LAYERS for row in rows if row.us is not None
        }
        for row in rows:
            if row.check == "FAILED":
                sys.stderr.write(f"{case.name} {row.path}: {row.detail}\n")
        found.append((case, times))
    return found


def show(phase: str, measured: Sequence[tuple[Case, Measured]]) -> None:
    """What was measured, on stderr."""
    from .tables import print_table

    names = DECODE_PATHS if phase == "decode" else EXTEND_PATHS
    rows = []
    for case, times in measured:
        best = min(times, key=lambda path: times[path]) if times else "none"
        cells = [f"{times[name]:.1f}" if name in times else "-" for name in names]
        sizes = [str(case.num_heads), str(case.bs), str(case.q_len), f"{case.kv_len:,}"]
        rows.append([*sizes, *cells, best])
    columns = ["heads", "batch", "q", "tokens", *names, "fastest"]
    title = f"{phase}: microseconds per layer, per-step work shared by {_LAYERS} layers"
    print_table(title, columns, rows, right=range(len(columns) - 1), file=sys.stderr)


def _numbers(text: str, name: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidArgument(f"calibrate: --{name} must be numbers like 1,8,64, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def run(args: argparse.Namespace) -> int:
    """Measure and write the table; 1 when nothing could be measured."""
    grid = Grid(
        _numbers(args.heads, "heads"),
        _numbers(args.batches, "batches"),
        _numbers(args.lengths, "lengths"),
        args.pool,
    )
    if any(length % PAGE for length in grid.lengths) or grid.pool % PAGE:
        raise InvalidArgument(
            f"calibrate: --lengths and --pool must be multiples of {PAGE}, got {args.lengths} and "
            f"{args.pool}"
        )
    require_writable(args.out, "calibrate: --out")
    from .bench import require_device
    from .machine import machine, machine_line
    from .progress import Bar

    device = require_device(args.device)
    from .bench.timing import Timer

    found = machine()
    sys.stderr.write(machine_line(found) + "\n")
    timer = Timer(device, repeat=args.repeat)
    rules: dict[str, list[dict[str, Any]]] = {}
    phases = (("decode", DECODE_PATHS), ("extend", EXTEND_PATHS))
    total = sum(len(grid.cases(phase)) for phase, _ in phases)
    with Bar(total) as bar:

        def tick(name: str) -> None:
            bar.describe(name)
            bar.advance()

        for phase, paths in phases:
            measured = measure(grid, phase, paths, timer, tick)
            show(phase, measured)
            rules[phase] = choose_rules(measured)
    if not all(rules.values()):
        raise IncompatibleEnvironment("calibrate: no path could be measured; see `bench`")
    generation = _generation(device)
    source = f"calibrate on {found['gpu']}, {time.strftime('%Y-%m-%d')}, pool {grid.pool:,}"
    text = json.dumps(table_of(generation, source, rules["decode"], rules["extend"]), indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
        sys.stderr.write(f"use it with SGLANG_FP8MLA_PROFILE={Path(args.out).resolve()}\n")
    else:
        sys.stdout.write(text + "\n")
    return 0


def _generation(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return "CPU"
    major, minor = torch.cuda.get_device_capability(device)
    return f"SM{major}{minor}"


_DESCRIPTION = """\
Time our paths on this GPU for decode and extend, over heads, batch sizes and lengths, and write
the table from which `auto` chooses. The package ships tables for the GPUs it was measured on; this
makes one for yours. Minutes; stop the server first, or the times are those of two programs."""

_EPILOG = """\
examples:
  sglang-fp8mla calibrate --out my-gpu.json
  sglang-fp8mla calibrate --heads 16 --batches 1,8,32 --lengths 1024,16384 --out v3-tp8.json
  SGLANG_FP8MLA_PROFILE=my-gpu.json sglang serve --attention-backend flashinfer_mla_fp8 ...

exit codes: 0 the table was written; 1 nothing could be measured here; 2 wrong command line."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `calibrate` to the command line."""
    grid = Grid()
    parser = subparsers.add_parser(
        "calibrate",
        help="measure which path is fastest on this GPU, for `auto`",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, values, what in (
        ("heads", grid.heads, "query heads on one GPU"),
        ("batches", grid.batches, "requests in a batch"),
        ("lengths", grid.lengths, "tokens per request"),
    ):
        default = ",".join(map(str, values))
        parser.add_argument(
            f"--{name}", default=default, metavar="N,...", help=f"{what} ({default})"
        )
    parser.add_argument("--pool", type=int, default=POOL, help="KV slots (%(default)s)")
    parser.add_argument("--repeat", type=int, default=10, help="timed replays (%(default)s)")
    parser.add_argument("--device", metavar="DEV", help="cuda, cuda:N, or cpu (interpreted, tiny)")
    parser.add_argument("--out", metavar="FILE", help="where to write the table (stdout)")
    parser.set_defaults(func=run)
