"""Our kernels under NVIDIA's compute-sanitizer, over small and nasty shapes.

    python -m bench.sanitize --json FILE [--tool memcheck,racecheck,...] [--group NAME,...]

Each pair of a tool and a group of kernels is a process of its own under `compute-sanitizer`, many
at a time. Before the tools, each group runs once bare: that compiles its kernels for all, and shows
that its cases hold. A process checks every answer against float64 too and ends with the number of
cases that it checked, so that a run that did nothing is no pass. FILE is written anew as each
process ends; the exit status is 0 when every pair is clean.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes each tensor an allocation of its own. With the cache, a
tensor lies in a block of megabytes: an access past its end is inside of the block, so memcheck is
silent, and a block that is handed out again holds what was written before, so initcheck is silent.

Rows that must not be read are NaN codes, 0x7F and 0xFF; for initcheck they, and all padding, are
memory that nothing ever wrote. initcheck sees the writes of instrumented kernels alone, so it runs
over all kernels and only what it finds in ours counts; the other tools instrument ours only.

What the tools do not see: racecheck watches shared memory only; under any tool launches overlap
less than without one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_fp8mla.machine import machine, output_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

if TYPE_CHECKING:
    import torch
    from mla_decode_cases import Case

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
BARE = "none"  # the run without a tool
KERNELS = (
    "mla_decode",
    "mla_decode_plan",
    "mla_decode_merge",
    "_decode_kernel",
    "_merge_kernel",
    "_claim_slots_kernel",
    "_count_slots_kernel",
    "_compact_slots_kernel",
    "_find_rows_kernel",
    "_gather_cast_kernel",
)
# a part of each of the names above, and hardly of others
_NAME_PARTS = (
    "mla_decode",
    "_decode_kernel",
    "_merge_kernel",
    "_slots_kernel",
    "_find_rows",
    "_gather_cast",
)
POISON = (0x7F, 0xFF)
PRINT_LIMIT = 500

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
BF16, FP16, FP32 = "bfloat16", "float16", "float32"

# name: (backend, heads, [(q dtype, pool dtype, kpe columns)]). The CUDA kernel is compiled for
# 8, 16 and 64 heads of a block: 1 head fills one in part, and 128 take two
_USUAL = (BF16, E4M3, 64)
_FP16, _E5M2, _NO_KPE, _ALL = (
    (FP16, E4M3, 64),
    (BF16, E5M2, 64),
    (BF16, E4M3, 0),
    (FP16, E5M2, 0),
)
DECODE: dict[str, tuple[str, tuple[int, ...], tuple[tuple[str, str, int], ...]]] = {
    "cuda-8": ("cuda", (1, 8), (_USUAL,)),
    "cuda-16": ("cuda", (16,), (_USUAL,)),
    "cuda-64": ("cuda", (64, 128), (_USUAL,)),
    "cuda-fp16": ("cuda", (16, 64), (_FP16,)),
    "cuda-e5m2": ("cuda", (16, 64), (_E5M2,)),
    "cuda-no-kpe": ("cuda", (16, 64), (_NO_KPE,)),
    "cuda-fp16-e5m2-no-kpe": ("cuda", (8, 16), (_ALL,)),
    "triton": ("triton", (1, 16, 128), (_USUAL,)),
    "triton-dtypes": ("triton", (16,), (_FP16, _E5M2, _NO_KPE, _ALL)),
}
GROUPS = ("gather", *DECODE)
# one launch shape serves 1 and 2 requests, the other more: name, lengths, padded rows, whether the
# rows are the draft tokens of one request, split length
DECODE_CASES: tuple[tuple[str, list[int], int, bool, int | None], ...] = (
    ("one", [1], 0, False, None),
    ("none", [0], 1, False, None),
    ("two", [4097, 63], 0, False, None),
    ("edges", [0, 1, 63, 64, 65, 4097], 2, False, None),
    ("verify-1", [64], 0, True, None),
    ("verify-4", [65, 66, 67, 68], 0, True, None),
    ("fixed", [4097, 0, 513, 512], 1, False, 512),
)
# left out on the CPU: interpreted, 4097 keys take as long as all other lengths together
_LONG = 1000

# lengths, prefix shared by all requests, columns; 1024 entries are a block of the list kernels
GATHER_CASES: tuple[tuple[list[int], int, int], ...] = (
    ([0], 0, 576),
    ([1], 0, 576),
    ([7, 8, 9], 0, 576),
    ([0, 5, 0, 3], 2, 512),
    ([1023], 0, 64),
    ([1024, 0], 0, 320),
    ([1025, 1100], 900, 576),
    ([4000], 0, 64),
)
# (pool, out)
GATHER_DTYPES = tuple((pool, out) for pool in (E4M3, E5M2) for out in (BF16, FP16, FP32))


@contextlib.contextmanager
def _l2_cache(l2_bytes: int) -> Iterator[None]:
    """The list and the cast as on a device with so large an L2 cache."""
    from sglang_fp8mla.kernels import gather_cast as kernels

    real = kernels._device_facts

    def facts(device: torch.device) -> Any:
        return dataclasses.replace(real(device), l2_bytes=l2_bytes)

    with unittest.mock.patch.object(kernels, "_device_facts", facts):
        yield


def _gather_case(
    lens: list[int], shared: int, dim: int, dtypes: tuple[str, str], device: str, poison: bool
) -> None:
    """List the slots, cast the rows, and compare both with torch; raise where they differ."""
    import torch

    from sglang_fp8mla.kernels import gather_cast as kernels

    pool_dtype, out_dtype = (getattr(torch, name) for name in dtypes)
    generator = torch.Generator().manual_seed(sum(lens))
    num_slots = sum(lens) + 40
    order = (torch.randperm(num_slots - 2, generator=generator) + 2).tolist()
    prefix, order = order[:shared], order[shared:]
    flat: list[int] = []
    for n in lens:
        own = max(0, n - shared)
        flat += prefix[:n] + order[:own]
        order = order[own:]
    live = sorted(set(flat))

    # rows and padding that nobody may read: NaN codes, or never written
    storage = torch.empty((num_slots, 1, dim + 24), dtype=torch.uint8, device=device)
    if poison:
        storage.copy_(torch.tensor(POISON, dtype=torch.uint8).repeat(dim // 2 + 12))
    codes = torch.randint(0, 256, (len(live), 1, dim), generator=generator).to(torch.uint8)
    rows = torch.tensor(live, dtype=torch.int64)
    storage[rows.to(device), :, :dim] = codes.to(device)
    kv_indices = torch.empty(len(flat) + 7, dtype=torch.int32, device=device)
    if poison:
        kv_indices.fill_(1)  # a slot that nobody holds
    kv_indices[: len(flat)] = torch.tensor(flat, dtype=torch.int32).to(device)
    kv_indptr = torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(device)
    scratch = kernels.make_scratch(num_slots, storage.device)
    slots = torch.zeros(num_slots, dtype=torch.int32, device=device)  # as LiveSlots has it
    count = torch.empty(1, dtype=torch.int32, device=device)
    # beside the indices, then in their place; as they come, then a third of the slots last
    for kv_rows, l2_bytes in (
        (torch.empty_like(kv_indices), 1 << 30),
        (kv_indices, len(flat) * 576),
    ):
        with _l2_cache(l2_bytes):
            kernels.list_live_slots(
                kv_indices, kv_indptr, len(lens), scratch, slots, count, kv_rows
            )
        number = int(count.cpu()[0])
        listed = slots[:number].cpu()
        if sorted(listed.tolist()) != live:
            raise AssertionError(f"listed {number} slots, not the {len(live)} live ones once each")
        if listed[kv_rows[: len(flat)].cpu().long()].tolist() != flat:
            raise AssertionError("kv_rows does not lead to the slots of kv_indices")

    pool, tickets = storage[..., :dim].view(pool_dtype), kernels.make_tickets(storage.device)
    want = torch.full((num_slots, 1, dim + 8), -3.0, dtype=out_dtype)
    place = torch.searchsorted(rows, listed.long())  # of a listed slot among the sorted ones
    want[:number, :, :dim] = codes[place].view(pool_dtype).to(out_dtype)
    # blocks shared out, for a small batch and for a large one; drawn for by a fifth of the programs
    for l2_bytes, bound in ((1 << 30, number), (number * dim * 8, number), (0, number // 5)):
        wide = torch.full((num_slots, 1, dim + 8), -3.0, dtype=out_dtype, device=device)
        with _l2_cache(l2_bytes):
            kernels.gather_cast(pool, slots, count, tickets, wide[..., :dim], bound=bound)
        torch.testing.assert_close(wide.cpu(), want, rtol=0, atol=0, equal_nan=True)
    if tickets.cpu().any():
        raise AssertionError("a launch left tickets behind")


def _never_written(tensor: torch.Tensor, parts: Any) -> torch.Tensor:
    """A tensor of the same layout of which only `parts` (an index) was ever written."""
    import torch

    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    twin = torch.empty(size, dtype=tensor.dtype, device=tensor.device).as_strided(
        tensor.shape, tensor.stride()
    )
    raw, old = (x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (twin, tensor))
    raw[parts] = old[parts]
    return twin


def _decode_case(
    lens: list[int], pad_rows: int, draft: bool, device: str, poison: bool, **options: Any
) -> Case:
    """A case of the tests; `draft` makes each request a prefix of the last, as draft tokens are."""
    import torch
    from mla_decode_cases import make_case

    case = make_case(lens, device=device, pad_rows=pad_rows, **options)
    raw = case.pool.view(torch.uint8)
    nnz, starts = sum(lens), case.kv_indptr.tolist()
    if draft:
        last = case.kv_indices[starts[case.bs - 1] : nnz].clone()
        for begin, length in zip(starts, lens[:-1]):
            case.kv_indices[begin : begin + length] = last[:length]
    live = case.kv_indices[:nnz].long()
    dead = torch.ones(raw.shape[0], dtype=torch.bool)
    dead[live.cpu()] = False
    codes = torch.tensor(POISON, dtype=torch.uint8).repeat(raw.shape[-1] // 2)
    raw[dead.to(device)] = codes.to(device)
    if poison:
        return case
    case.pool = _never_written(case.pool, live)
    case.kv_indices = _never_written(case.kv_indices, slice(nnz))
    case.kv_indptr = _never_written(case.kv_indptr, slice(case.bs + 1))
    case.q_nope = _never_written(case.q_nope, slice(case.bs))
    if case.q_pe is not None:
        case.q_pe = _never_written(case.q_pe, slice(case.bs))
    case.out, case.lse = (_never_written(x, slice(0)) for x in (case.out, case.lse))
    return case


def _run_decode_case(case: Case, backend: str, split_len: int | None, name: str) -> None:
    from mla_decode_cases import SM_SCALE, check_case

    from sglang_fp8mla.kernels.mla_decode import MlaDecodePlan

    plan = MlaDecodePlan(
        max_bs=max(3, case.bs),  # a server's plan: both launch shapes
        num_heads=case.q_nope.shape[1],
        device=case.q_nope.device,
        kpe_dim=0 if case.q_pe is None else case.q_pe.shape[-1],
        q_dtype=case.q_nope.dtype,
        pool_dtype=case.pool.dtype,
        split_len=split_len,
        backend=backend,
    )
    plan.plan(case.kv_indptr, case.bs)
    for lse in (None, case.lse):
        plan.run(
            case.q_nope, case.q_pe, case.pool, case.kv_indices, case.kv_indptr, case.out,
            sm_scale=SM_SCALE, lse_log2=lse,
        )  # fmt: skip
    check_case(case, name=name)


def cases(group: str, device: str, *, poison: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """The cases of a group: a name, and what runs and checks it."""
    import torch

    if group == "gather":
        for number, (lens, shared, dim) in enumerate(GATHER_CASES):
            # every dtype where a row has a tail of columns, else one pair in turn
            turn = number % len(GATHER_DTYPES)
            chosen = GATHER_DTYPES if lens == [7, 8, 9] else GATHER_DTYPES[turn : turn + 1]
            for dtypes in chosen:

                def gather(args: Any = (lens, shared, dim, dtypes, device, poison)) -> None:
                    _gather_case(*args)

                yield f"{lens} {dim} {'>'.join(dtypes)}", gather
        return
    backend, all_heads, variants = DECODE[group]
    for heads in all_heads:
        for q_dtype, pool_dtype, kpe_dim in variants:
            for name, lens, pad_rows, draft, split_len in DECODE_CASES:
                # other dtypes need the tails, the long request, and stages used twice
                if _USUAL not in variants and name not in ("two", "edges", "fixed"):
                    continue
                if device == "cpu":
                    lens = [length for length in lens if length <= _LONG]
                label = f"{name} {heads} heads {q_dtype} {pool_dtype} kpe {kpe_dim}"
                options = {
                    "heads": heads,
                    "q_dtype": getattr(torch, q_dtype),
                    "pool_dtype": getattr(torch, pool_dtype),
                    "kpe_dim": kpe_dim,
                    "seed": heads,
                }

                def decode(
                    lens: list[int] = lens,
                    shape: tuple[int, bool] = (pad_rows, draft),
                    options: dict[str, Any] = options,
                    split_len: int | None = split_len,
                    label: str = label,
                ) -> None:
                    case = _decode_case(lens, *shape, device, poison, **options)
                    _run_decode_case(case, backend, split_len, label)

                yield label, decode


def child(group: str, device: str, *, poison: bool) -> None:
    """Run a group's cases; the last line says how many were right."""
    number = 0
    for name, run in cases(group, device, poison=poison):
        print(f"case {name}", flush=True)
        run()
        number += 1
    print(json.dumps({"cases": number}), flush=True)


def number_of_cases(group: str, device: str) -> int:
    return sum(1 for _ in cases(group, device, poison=True))


_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?", re.MULTILINE)
_RACES = re.compile(
    r"^=+ RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)",
    re.MULTILINE,
)
# `at kernel(int)+0x70 in file`, `at kernel():0x70 in file`; of older versions `at 0x70 in kernel`
_WHERE = (re.compile(r"\bat (.+?)[+:]0x[0-9a-f]+"), re.compile(r"\bat 0x[0-9a-f]+ in (.+)$"))
# lines that open no finding
_TALK = re.compile(
    r"COMPUTE-SANITIZER|SUMMARY|Target application returned|process didn't terminate"
)


def kernel_of(line: str) -> str | None:
    """The name of the kernel that a line of a finding points to, without its arguments."""
    for pattern in _WHERE:
        found = pattern.search(line)
        if found:
            # a C++ kernel reads `void ns::name<...>(...)`; ours are C names
            return found[1].split("(")[0].split(":")[-1].strip() or found[1]
    return None


def parse(tool: str, output: str) -> dict[str, Any]:
    """What a tool found: `errors` of its summary (None without one), `ours`, `others`, `first`.

    A finding is a line `========= TEXT` and the indented lines below it. `ours` and `others` count
    those printed by the kernel that they name, `unnamed` those of no kernel: `notices` holds some.
    """
    blocks: list[list[str]] = []
    for line in output.splitlines():
        found = re.match(r"=========(.*)$", line)
        if not found:
            continue
        text = found[1]
        if re.match(r" (?! )\S", text) and not text.startswith(" and "):
            blocks.append([text.strip()])
        elif blocks and text.strip():
            blocks[-1].append(text.strip())
    ours: list[list[str]] = []
    others: list[list[str]] = []
    notices: list[str] = []
    for block in blocks:
        if _TALK.search(block[0]):
            continue
        names = [name for name in map(kernel_of, block) if name]
        if not names:
            notices.append(block[0])
        else:
            (ours if set(names) & set(KERNELS) else others).append(block)
    # where not all were printed, a second line counts the rest
    if tool == "racecheck":
        counts = [int(found[2]) + int(found[3]) for found in _RACES.finditer(output)]
    else:
        counts = [int(found[1]) for found in _SUMMARY.finditer(output)]
    errors = max(counts, default=None)
    return {
        "errors": errors,
        "ours": len(ours),
        "others": len(others),
        "unnamed": len(notices),
        "first": " | ".join(ours[0][:6])[:600] if ours else "",
        "notices": list(dict.fromkeys(notices))[:5],
    }


def checked_cases(output: str) -> int | None:
    """The number on the child's last line of its own, or None."""
    found = re.findall(r'^\{"cases": (\d+)\}$', output, re.MULTILINE)
    return int(found[-1]) if found else None


def judge(tool: str, output: str, returncode: int | None, expected: int) -> dict[str, Any]:
    """A row's `status` and its reasons. `clean` needs all cases right, a summary, no finding.

    Args:
        returncode: None when the process was stopped at its limit.
    """
    done = checked_cases(output)
    row: dict[str, Any] = {"cases": done, "expected": expected}
    words = [line.strip() for line in output.splitlines() if line.strip()]
    said = [w for w in words if not w.startswith("case ") and "COMPUTE-SANITIZER" not in w]
    said.sort(key=lambda w: not w.startswith("==="))  # what the tool said goes first
    if tool != BARE:
        row |= parse(tool, output)
    ours, errors = row.get("ours", 0), row.get("errors", 0)
    at = next((w for w in reversed(words) if w.startswith("case ")), "before the first case")
    if ours:
        row["status"] = "findings"
    elif returncode is None:
        row |= {"status": "timeout", "why": at}
    elif done is None and (errors is None or at == "before the first case"):
        row |= {"status": "cannot run", "why": said[0][:300] if said else "no output"}
    elif returncode or done != expected:
        row |= {"status": "failed", "why": f"{at}: {words[-1][:300] if words else ''}"}
    elif errors is None:
        row |= {"status": "cannot run", "why": "no summary: " + (said[0][:300] if said else "")}
    elif errors and (tool != "initcheck" or errors > row["others"] + row["unnamed"]):
        # in a kernel that is not ours, or not printed, so in an unknown one
        row |= {"status": "findings", "first": row["first"] or "; ".join(row["notices"])[:600]}
    else:
        row["status"] = "clean"
    return row


def find_sanitizer() -> str | None:
    places = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
    return next((found for found in map(shutil.which, places) if found), None)


def make_command(
    tool: str, group: str, sanitizer: str, port: int, *, known: str = "", device: str = "cuda"
) -> list[str]:
    """The words of one process.

    Args:
        port: where the tool talks to its process; pairs run side by side, each with its own.
        known: text of `compute-sanitizer --help`; an option that it lacks is left out.
    """
    work = [sys.executable, "-m", "bench.sanitize", "--child", group, "--device", device]
    if tool == BARE:
        return work
    if tool == "initcheck":
        work.append("--no-poison")
    options = [
        ("--target-processes", "application-only"),  # not ptxas
        ("--launch-timeout", "120"),  # importing torch beside 15 others takes longer than 10 s
        ("--port", str(port)),
        ("--print-limit", str(PRINT_LIMIT)),
        ("--show-backtrace", "no"),
        ("--demangle", "simple"),
    ]
    if tool == "memcheck":
        # torch probes for symbols that a driver may lack; our own calls raise by themselves
        options += [("--report-api-errors", "no"), ("--padding", "4096")]
    if tool != "initcheck":
        options += [("--kernel-name", f"kernel_substring={part}") for part in _NAME_PARTS]
    chosen = [w for pair in options if not known or pair[0][2:] in known for w in pair]
    return [sanitizer, "--tool", tool, *chosen, *work]


_running: set[subprocess.Popen[str]] = set()
_lock = threading.Lock()


def run_pair(
    tool: str, group: str, command: list[str], limit: float, *, expected: int
) -> dict[str, Any]:
    """One process to its end or its limit, its output kept in $OUT."""
    row: dict[str, Any] = {"tool": tool, "group": group}
    begin = time.perf_counter()
    log = Path(os.environ.get("OUT", ".")) / f"{tool}-{group}.log"
    code: int | None = None
    with log.open("w") as file:
        environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environ, text=True,
            start_new_session=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        with _lock:
            _running.add(process)
        try:
            code = process.wait(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            stop(process)
        with _lock:
            _running.discard(process)
    row |= judge(tool, log.read_text(errors="replace"), code, expected)
    return row | {"seconds": round(time.perf_counter() - begin, 1), "returncode": code}


def stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop_all(signum: int, _frame: object) -> None:
    """The processes have sessions of their own, which `timeout` does not reach."""
    for process in list(_running):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    os._exit(128 + signum)


def line_of(row: dict[str, Any]) -> str:
    text = f"{row['tool']:<10} {row['group']:<22} {row['status']:<11} {row['seconds']:>6} s  "
    text += f"{row['cases'] or 0}/{row['expected']} cases"
    if row["tool"] != BARE:
        text += f", {row['errors']} errors, {row['ours']} in ours"
    return text + (f": {(row.get('why') or row.get('first') or '')[:160]}").rstrip(": ")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", default=",".join(TOOLS), help="names, separated by commas")
    parser.add_argument("--group", default=",".join(GROUPS), help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=70, help="seconds of one process")
    parser.add_argument("--deadline", type=float, default=180, help="seconds of all processes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--no-poison", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(options.child, options.device, poison=not options.no_poison)
        return 0
    tools, groups = options.tool.split(","), options.group.split(",")
    for kind, given, names in (("tool", tools, TOOLS), ("group", groups, GROUPS)):
        if wrong := set(given) - set(names):
            parser.error(f"--{kind} must be of {', '.join(names)}, got {', '.join(sorted(wrong))}")
    signal.signal(signal.SIGTERM, stop_all)
    begin = time.perf_counter()
    sanitizer = find_sanitizer()
    version = output_of(sanitizer, "--version") if sanitizer else "not found"
    known = output_of(sanitizer, "--help") if sanitizer else ""
    result: dict[str, Any] = {"machine": machine(), "sanitizer": version[-200:], "rows": []}

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print(line_of(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))

    def together(pairs: list[tuple[str, str]]) -> None:
        def one(number: int, tool: str, group: str) -> dict[str, Any]:
            left = options.deadline - (time.perf_counter() - begin)
            port = 21000 + 20 * number
            words = make_command(
                tool, group, sanitizer or "", port, known=known, device=options.device
            )
            return run_pair(
                tool, group, words, min(options.limit, left),
                expected=number_of_cases(group, options.device),
            )  # fmt: skip

        with ThreadPoolExecutor(options.jobs) as pool:
            waiting = [pool.submit(one, i, *pair) for i, pair in enumerate(pairs)]
            for done in as_completed(waiting):
                keep(done.result())

    together([(BARE, group) for group in groups])
    if sanitizer:
        together([(tool, group) for tool in tools for group in groups])
    else:
        for tool in tools:
            missing = "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"
            keep(
                {"tool": tool, "group": "all", "status": "cannot run", "why": missing, "cases": 0}
                | {"expected": 0, "errors": None, "ours": 0, "seconds": 0.0}
            )
    return 0 if all(row["status"] == "clean" for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
