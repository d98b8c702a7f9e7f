"""`sglang-fp8mla selftest`: real servers on stock `flashinfer` and on ours, and one verdict.

Every server dies with this process, however it ends; an arm's results are on disk once it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import Fp8MlaError, IncompatibleEnvironment, InvalidArgument
from .machine import output_of
from .outputs import require_writable
from .progress import can_draw
from .serving import (
    DEFAULT_LAUNCHER,
    Deadline,
    DeadlinePassed,
    Server,
    ServerFailed,
    dummy_flags,
    ending_by_signal,
    free_port,
    generate,
    make_prompts,
    mla_config,
    require_gpu,
    require_package,
    write_model,
)

# rounding alone may tell apart two near-equal logits late in a long answer, not in its first tokens
MIN_SAME_TOKENS = 8
# below this a slower step is the noise of two server runs: two stock servers differ by up to 3 %
NOISE = 1.05


@dataclass(frozen=True)
class Workload:
    """`bs` prompts of `length` tokens each, `new_tokens` greedy tokens for each."""

    bs: int
    length: int
    new_tokens: int = 64

    @property
    def name(self) -> str:
        return f"{self.bs}x{self.length}"


DEFAULT_WORKLOADS = (Workload(1, 64), Workload(1, 8192), Workload(8, 8192))


@dataclass(frozen=True)
class Arm:
    """One way to serve: flags and environment added to what all arms share."""

    name: str
    flags: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    about: str = ""

    @property
    def ours(self) -> bool:
        return "flashinfer_mla_fp8" in self.flags

    @property
    def exact(self) -> bool:
        """Whether it computes with the very numbers that stock computes with."""
        return self.ours and "gather_cast" in self.env.values()


def _ours(name: str, decode: str, extend: str, about: str) -> Arm:
    env = {"SGLANG_FP8MLA_DECODE_PATH": decode, "SGLANG_FP8MLA_EXTEND_PATH": extend}
    flags = ("--attention-backend", "flashinfer_mla_fp8", "--kv-cache-dtype", "fp8_e4m3")
    return Arm(name, flags, env, about)


def _stock(name: str, dtype: str, about: str) -> Arm:
    flags = ("--attention-backend", "flashinfer", "--kv-cache-dtype", dtype)
    return Arm(name, flags, about=about)


ARMS = {
    arm.name: arm
    for arm in (
        _stock("stock", "fp8_e4m3", "stock flashinfer, FP8 pool: casts the whole pool per layer"),
        _ours("auto", "auto", "auto", "ours, the path that it chooses itself"),
        _ours("gather_cast", "gather_cast", "gather_cast", "ours, casting live rows only"),
        _ours("native", "native", "native", "ours, FlashInfer's FP8 kernel"),
        _ours("fused", "fused", "auto", "ours, our own FP8 decode kernel"),
        _stock("bf16", "auto", "stock flashinfer, 16-bit pool: twice the memory per token"),
    )
}
DEFAULT_ARMS = "stock,gather_cast,native,fused"
BASELINE = "stock"


def parse_arm(text: str) -> Arm:
    """`NAME=WORD,WORD,...`: server flags; a word `KEY:=VALUE` sets an environment variable."""
    name, separator, words = text.partition("=")
    if not separator or not name or "/" in name:
        raise InvalidArgument(f"selftest: --arm must be NAME=FLAG,VALUE,..., got {text!r}")
    env: dict[str, str] = {}
    flags = []
    for word in filter(None, words.split(",")):
        key, assigns, value = word.partition(":=")
        if assigns:
            env[key] = value
        else:
            flags.append(word)
    return Arm(name, tuple(flags), env)


def parse_workload(text: str) -> Workload:
    """`BATCHxTOKENS`, `8x8192`."""
    bs, separator, length = text.partition("x")
    if not (separator and bs.isdigit() and length.isdigit() and int(bs) and int(length)):
        raise InvalidArgument(f"selftest: --workload must be BATCHxTOKENS, got {text!r}")
    return Workload(int(bs), int(length))


def choose_arms(names: str, extra: Sequence[str]) -> list[Arm]:
    """The arms in `names` (comma-separated) and those spelled out in `extra`, no name twice."""
    chosen = []
    for name in filter(None, names.split(",")):
        if name not in ARMS:
            raise InvalidArgument(
                f"selftest: --arms must name some of {', '.join(ARMS)}, got {name!r}"
            )
        chosen.append(ARMS[name])
    chosen += [parse_arm(text) for text in extra]
    listed = [arm.name for arm in chosen]
    if not listed or len(set(listed)) != len(listed):
        raise InvalidArgument(f"selftest: arms must be distinct and at least one, got {listed}")
    return chosen


@dataclass
class Result:
    """What one arm showed. `status`: ok, refused (says why it cannot run), failed or skipped."""

    arm: str
    status: str
    detail: str = ""
    boot_s: float | None = None
    workloads: dict[str, dict[str, Any]] = field(default_factory=dict)
    traces: list[str] = field(default_factory=list)
    says: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def time_workload(
    base: str, workload: Workload, repeat: int, deadline: Deadline, timeout: float = 300.0
) -> dict[str, Any]:
    """Milliseconds per decode step and the tokens.

    A step is (t(new_tokens) - t(1)) / (new_tokens - 1): both requests hold the same prefill, so it
    drops out. The first of `repeat` + 1 rounds warms up and is not counted; the median is.
    """
    prompts = make_prompts(workload.bs, workload.length)
    steps, answers = [], []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        generate(base, prompts, 1, timeout=deadline.clip(timeout))
        middle = time.perf_counter()
        tokens = generate(base, prompts, workload.new_tokens, timeout=deadline.clip(timeout))
        end = time.perf_counter()
        steps.append(((end - middle) - (middle - begin)) / (workload.new_tokens - 1) * 1e3)
        answers.append(tokens)
    counted = sorted(steps[1:])
    ms = counted[len(counted) // 2]
    return {
        "ms_per_step": round(ms, 3),
        "ms_all": [round(s, 3) for s in steps],
        "tok_s": round(workload.bs * 1e3 / ms, 1) if ms > 0 else None,
        "tokens": answers[-1],
        "repeatable": all(answer == answers[0] for answer in answers),
    }


def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> int | None:
    """Smallest position at which any request's tokens differ, None when all are equal."""
    found = [
        next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), min(len(x), len(y)))
        for x, y in zip(ours, theirs)
        if x != y
    ]
    if len(ours) != len(theirs):
        return 0
    return min(found, default=None)


@dataclass
class Verdict:
    """`ok` is the answer to: does ours give stock's tokens, and no slower?"""

    ok: bool
    summary: str
    reasons: list[str]


def judge(results: Sequence[Result], arms: Sequence[Arm]) -> Verdict:
    """Compare every arm of ours with stock. Rules, first broken first named:

    the baseline ran; at least one of ours ran, and each that did not said why (a forced path that
    cannot run here is refused by design, `auto` and `gather_cast` must run); the first
    `MIN_SAME_TOKENS` tokens of each request equal stock's, and with `gather_cast` all of them,
    unless stock does not repeat its own; no workload of `auto` (else of the best of ours) is slower
    than stock beyond noise.
    """
    by_name = {r.arm: r for r in results}
    baseline = by_name.get(BASELINE)
    ours = [(arm, by_name[arm.name]) for arm in arms if arm.ours and arm.name in by_name]
    if not ours:
        return Verdict(False, "nothing of ours was run", [])
    reasons: list[str] = []
    ok = True
    for arm, result in ours:
        if result.status == "refused" and arm.name not in ("auto", "gather_cast"):
            reasons.append(f"{arm.name} cannot run here: {result.detail}")
        elif result.status != "ok":
            ok = False
            reasons.append(f"{arm.name} {result.status}: {result.detail}")
    ran = [(arm, result) for arm, result in ours if result.workloads]
    if baseline is None or not baseline.workloads:
        why = (
            "was not among the arms"
            if baseline is None
            else f"{baseline.status}: {baseline.detail}"
        )
        return Verdict(False, "no stock server to compare with", [f"{BASELINE} {why}", *reasons])
    if not ran:
        return Verdict(False, "no server of ours ran", reasons)

    for arm, result in ran:
        for name, row in result.workloads.items():
            stock = baseline.workloads.get(name)
            if stock is None:
                continue
            at = first_difference(row["tokens"], stock["tokens"])
            if at is None:
                continue
            text = f"{arm.name} {name}: tokens differ from stock's from token {at} on"
            if not stock["repeatable"]:
                reasons.append(f"{text}, but stock did not repeat its own tokens either")
            elif arm.exact or at < MIN_SAME_TOKENS:
                ok = False
                reasons.append(text)
            else:
                reasons.append(f"{text} (rounding; the first {MIN_SAME_TOKENS} agree)")

    def ratios(result: Result) -> dict[str, float]:
        return {
            name: baseline.workloads[name]["ms_per_step"] / row["ms_per_step"]
            for name, row in result.workloads.items()
            if name in baseline.workloads and row["ms_per_step"] > 0
        }

    def worst(pair: tuple[Arm, Result]) -> float:
        return min(ratios(pair[1]).values(), default=0.0)

    chosen = next((pair for pair in ran if pair[0].name == "auto"), max(ran, key=worst))
    gains = ratios(chosen[1])
    for name, gain in gains.items():
        if gain < 1 / NOISE:
            ok = False
            reasons.append(f"{chosen[0].name} {name}: {1 / gain:.2f}x slower than stock")
    if not gains:
        return Verdict(False, "no workload was measured on both stock and ours", reasons)
    steps = ", ".join(
        f"{name} {baseline.workloads[name]['ms_per_step']:.1f} -> "
        f"{chosen[1].workloads[name]['ms_per_step']:.1f} ms ({gain:.1f}x)"
        for name, gain in gains.items()
    )
    summary = f"{chosen[0].name} against stock, ms per step: {steps}"
    return Verdict(ok, summary, reasons)


class Progress:
    """One line per arm on stderr: live on a terminal, a line per change elsewhere."""

    def __init__(self, names: Sequence[str]) -> None:
        self._start = time.monotonic()
        self._last: dict[str, str] = {}
        self._bars: Any = None
        if not can_draw():
            return
        from rich.console import Console
        from rich.progress import Progress as Bars
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.fields[arm]:<14}"),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
        )
        self._tasks = {
            name: self._bars.add_task("waiting", arm=name, start=False, total=None)
            for name in names
        }

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, name: str, what: str, *, done: bool = False) -> None:
        """Show what the arm is doing now."""
        if self._last.get(name) == what:
            return
        self._last[name] = what
        if self._bars is not None:
            task = self._tasks[name]
            self._bars.start_task(task)
            self._bars.update(task, description=what)
            if done:
                self._bars.update(task, total=1, completed=1)
        else:
            seconds = time.monotonic() - self._start
            sys.stderr.write(f"[{seconds:6.1f} s] {name}: {what}\n")
            sys.stderr.flush()


# what a booting server last logged -> what it is doing; later entries come later in a boot
_STAGES = (
    ("Load weight begin", "loading weights"),
    ("Load weight end", "weights loaded"),
    ("KV Cache is allocated", "KV pool allocated"),
    ("Memory pool end", "KV pool allocated"),
    ("Capture", "capturing CUDA graphs"),
    ("Application startup complete", "warming up"),
)


def stage(server: Server) -> str:
    """What a booting server is doing, from its log."""
    text = "\n".join(server.tail(200))
    found = "starting"
    for mark, words in _STAGES:
        if mark in text:
            found = words
    return found


# the package's own start-up lines in a server log
_OWN_LINES = re.compile(r"(?:decode|extend) path: .*|sglang_fp8mla\.\w+.*")


@dataclass
class Plan:
    """Everything that one selftest run needs to know."""

    arms: list[Arm]
    workloads: list[Workload]
    launcher: list[str]
    shared_flags: list[str]
    out: Path
    repeat: int = 1
    boot_timeout: float = 600.0
    deadline: Deadline = field(default_factory=Deadline)
    # arms that boot at the same time; 0: as many as fit `memory_each` into the GPU's free memory
    overlap: int = 1
    memory_each: dict[str, int] = field(default_factory=dict)
    stagger: float = 0.0
    first_alone: bool = False
    profile_steps: int = 0


def memory_of(arm: Arm, num_layers: int, num_heads: int, pool: int) -> int:
    """Bytes that a server over the built-in model takes, some too many."""
    config = mla_config(num_layers, num_heads)
    hidden, rank = int(config["hidden_size"]), int(config["q_lora_rank"])
    # the projections of serving.mla_config's dimensions, and the dense feed-forward
    layer = hidden * (rank + 576) + num_heads * (rank * 192 + 512 * 256 + 128 * hidden)
    layer += 3 * hidden * int(config["intermediate_size"])
    weights = 2 * (num_layers * layer + 2 * int(config["vocab_size"]) * hidden)
    item = 1 if "fp8_e4m3" in arm.flags else 2
    # one layer of the pool in 16 bits, and 4 GiB for the context, the graphs and prefill
    return weights + pool * 576 * (item * num_layers + 2) + (4 << 30)


def free_memory() -> int | None:
    """Free bytes of the first GPU, None where nvidia-smi does not say."""
    text = output_of("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
    first = text.splitlines()[0].strip() if text else ""
    return int(first) << 20 if first.isdigit() else None


def batches(
    arms: Sequence[Arm], overlap: int, memory_each: dict[str, int], free_bytes: int | None
) -> list[list[Arm]]:
    """The arms in batches that boot together: `overlap` at a time, or with 0 what fits the GPU."""
    # SGLang keeps (1 - mem-fraction-static) of what it found free out of its pool
    room = None if free_bytes is None else 0.8 * free_bytes
    result: list[list[Arm]] = []
    used = 0
    for arm in arms:
        need = memory_each.get(arm.name, 0)
        full = len(result[-1]) >= overlap if overlap and result else False
        if not overlap and room is not None:
            full = used + need > room
        if not result or full:
            result.append([])
            used = 0
        result[-1].append(arm)
        used += need
    return result


class Runner:
    """Runs the arms of a plan and keeps `results`, whatever happens."""

    def __init__(self, plan: Plan, progress: Progress, save: Callable[[], None]) -> None:
        self.plan, self.progress, self.save = plan, progress, save
        self.results: list[Result] = []
        self.servers: list[Server] = []

    def _server(self, arm: Arm) -> Server:
        port = free_port()
        command = [*self.plan.launcher, *self.plan.shared_flags, *arm.flags]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        return Server(arm.name, command, port, self.plan.out / f"{arm.name}.log", arm.env)

    def _record(self, result: Result) -> None:
        self.results.append(result)
        shown = {"ok": "done"}.get(result.status, f"{result.status}: {result.detail}")
        self.progress.say(result.arm, shown[:200], done=True)
        self.save()

    def _failure(self, server: Server, error: Fp8MlaError, result: Result | None = None) -> Result:
        """The result of an arm that ended early, with what it measured before."""
        result = result or Result(server.name, "failed")
        if self.plan.deadline.passed:
            error = DeadlinePassed(f"{error} ({self.plan.deadline})")
        elif server.exit_within(3.0) is not None and server.name not in str(error):
            error = ServerFailed(f"{error}; the server died: {server.cause()}")
        refused = "IncompatibleEnvironment" in server.cause() or any(
            "sglang_fp8mla.errors" in line for line in server.tail(400)
        )
        result.status = "refused" if refused and not result.workloads else "failed"
        detail = server.cause() if result.status == "refused" else str(error)
        result.detail = detail.removeprefix(f"{server.name}: ")
        return result

    def _boot(self, batch: list[Arm]) -> list[tuple[Arm, Server, float]]:
        """Start a batch of servers; return those that answer, record those that do not."""
        waiting: list[tuple[Arm, Server]] = []
        ready: list[tuple[Arm, Server, float]] = []

        def poll() -> None:
            for arm, server in list(waiting):
                try:
                    server.require_running()
                    if server.healthy():
                        seconds = time.monotonic() - server.started
                        ready.append((arm, server, seconds))
                        waiting.remove((arm, server))
                        self.progress.say(arm.name, f"ready after {seconds:.0f} s")
                        continue
                    if time.monotonic() - server.started > self.plan.boot_timeout:
                        raise ServerFailed(
                            f"{arm.name}: no /health within {self.plan.boot_timeout:g} s while "
                            f"{stage(server)} (log: {server.log_path})"
                        )
                    self.progress.say(arm.name, stage(server))
                except ServerFailed as error:
                    waiting.remove((arm, server))
                    server.stop()
                    self._record(self._failure(server, error))
            self.plan.deadline.remaining()

        for i, arm in enumerate(batch):
            server = self._server(arm)
            self.servers.append(server)
            server.start()
            waiting.append((arm, server))
            self.progress.say(arm.name, "starting")
            # the next one finds the first one's compiled kernels, or at least not all at once
            until = time.monotonic() + (self.plan.stagger if i + 1 < len(batch) else 0.0)
            alone = self.plan.first_alone and i == 0
            while waiting and (alone or time.monotonic() < until):
                poll()
                time.sleep(0.2)
        while waiting:
            poll()
            time.sleep(0.2)
        return ready

    def _measure(self, arm: Arm, server: Server, boot_s: float) -> None:
        result = Result(arm.name, "ok", boot_s=round(boot_s, 1))
        try:
            for workload in self.plan.workloads:
                self.progress.say(arm.name, f"measuring {workload.name}")
                result.workloads[workload.name] = time_workload(
                    server.base, workload, self.plan.repeat, self.plan.deadline
                )
            if self.plan.profile_steps:
                from .profile import record

                workload = self.plan.workloads[0]
                self.progress.say(arm.name, f"recording {self.plan.profile_steps} steps")
                traces = record(
                    server.base,
                    self.plan.out / "traces" / arm.name,
                    num_steps=self.plan.profile_steps,
                    prompts=make_prompts(workload.bs, workload.length),
                    timeout=self.plan.deadline.clip(180),
                )
                result.traces = [str(path) for path in traces]
        except ServerFailed as error:
            self._failure(server, error, result)
        except DeadlinePassed as error:
            result.status, result.detail = "failed", str(error)
        except KeyboardInterrupt:
            result.status, result.detail = "failed", "interrupted"
            raise
        finally:
            found = map(_OWN_LINES.search, server.read_log().splitlines())
            result.says = list(dict.fromkeys(match[0][:400] for match in found if match))[:12]
            self._record(result)
            server.stop()
            self.servers.remove(server)

    def run(self) -> None:
        """Run every arm. Servers that still live at the end, for whatever reason, are stopped."""
        try:
            arms = self.plan.arms
            for batch in batches(arms, self.plan.overlap, self.plan.memory_each, free_memory()):
                ready = self._boot(batch)
                # an arm is timed only while no other boots: booting takes CPU and GPU time
                for arm, server, boot_s in sorted(ready, key=lambda item: arms.index(item[0])):
                    self.plan.deadline.remaining()
                    self._measure(arm, server, boot_s)
        except DeadlinePassed as error:
            done = {r.arm for r in self.results}
            for arm in self.plan.arms:
                if arm.name not in done:
                    self._record(Result(arm.name, "skipped", str(error)))
        finally:
            for server in self.servers:
                server.stop()


def to_json(
    plan: Plan, results: Sequence[Result], verdict: Verdict | None, machine: dict[str, str]
) -> dict[str, Any]:
    """The JSON form of a run; `verdict` is None while arms are still to come."""
    return {
        "machine": machine,
        "config": {
            "command": [*plan.launcher, *plan.shared_flags],
            "arms": {a.name: {"flags": list(a.flags), "env": a.env} for a in plan.arms},
            "repeat": plan.repeat,
            "overlap": plan.overlap,
        },
        "arms": [r.to_json() for r in results],
        "verdict": None if verdict is None else vars(verdict),
    }


def cast_shares(result: Result) -> list[str]:
    """What the recorded traces say of the pool cast, a line per file."""
    from . import trace, trace_file

    lines = []
    for path in map(Path, result.traces):
        try:
            reports = trace.analyse(trace_file.read_trace(path))
        except trace_file.InvalidTrace as error:
            lines.append(str(error))
            continue
        for stage in (stage for report in reports for stage in report.stages.values()):
            found = "no pool cast"
            if stage.cast:
                found = f"pool cast {stage.cast.ms_per_step:.2f} ms ({stage.cast.share:.1%})"
            busy = f"GPU busy {stage.busy_ms:.2f} ms a step"
            lines.append(f"{result.arm} trace, {stage.mode}: {found}, {busy}")
    return lines


def show(plan: Plan, results: Sequence[Result], verdict: Verdict) -> None:
    """The table and the verdict, on stderr."""
    from .tables import print_table

    by_name = {r.arm: r for r in results}
    baseline = by_name.get(BASELINE)
    names = [w.name for w in plan.workloads]
    rows, styles = [], []
    for arm in plan.arms:
        result = by_name.get(arm.name)
        if result is None:
            continue
        cells = [arm.name]
        differences = []
        for name in names:
            row = result.workloads.get(name)
            stock = baseline.workloads.get(name) if baseline else None
            if row is None:
                cells.append("-")
                continue
            cell = f"{row['ms_per_step']:.2f} ms"
            if stock and result is not baseline and row["ms_per_step"] > 0:
                cell += f" ({stock['ms_per_step'] / row['ms_per_step']:.1f}x)"
                at = first_difference(row["tokens"], stock["tokens"])
                if at is not None:
                    differences.append(f"{name} from {at}")
            cells.append(cell)
        if result is baseline:
            tokens = "(baseline)"
        elif not result.workloads or not baseline or not baseline.workloads:
            tokens = "-"
        else:
            tokens = "same" if not differences else "differ: " + ", ".join(differences)
        boot = "-" if result.boot_s is None else f"{result.boot_s:.0f} s"
        rows.append([*cells, tokens, boot, result.status])
        styles.append({"ok": "", "refused": "yellow"}.get(result.status, "red"))
    columns = ["arm", *names, "tokens", "boot", "status"]
    print_table(
        "ms per decode step (ratio to stock)",
        columns,
        rows,
        right=range(1, len(names) + 1),
        styles=styles,
        file=sys.stderr,
    )
    for result in results:
        for line in cast_shares(result):
            sys.stderr.write(f"  {line}\n")
        if result.arm == "auto":
            for line in result.says:
                sys.stderr.write(f"  auto: {line}\n")
    for reason in verdict.reasons:
        sys.stderr.write(f"  - {reason}\n")
    word = "PASS" if verdict.ok else "FAIL (reasons above)" if verdict.reasons else "FAIL"
    sys.stderr.write(f"{word}: {verdict.summary}\n")
    sys.stderr.write(f"logs and results: {plan.out}\n")


def make_plan(args: argparse.Namespace) -> Plan:
    """Check the command line and turn it into a plan; creates the output folder."""
    arms = choose_arms(args.arms, args.arm)
    workloads = [parse_workload(text) for text in args.workload] or list(DEFAULT_WORKLOADS)
    for name, value in (("repeat", args.repeat), ("layers", args.layers), ("pool", args.pool)):
        if value < 1:
            raise InvalidArgument(f"selftest: --{name} must be at least 1, got {value}")
    folder = args.out or os.environ.get("OUT") or tempfile.mkdtemp(prefix="sglang-fp8mla-selftest-")
    out = Path(folder).resolve()
    out.mkdir(parents=True, exist_ok=True)
    flags = list(args.server_flags)
    if args.model is None:
        model = write_model(out / "model", args.layers, args.heads)
        without = list(args.without)
        if args.default_flags:
            without += ["disable-prefill-cuda-graph", "disable-radix-cache"]
        shared = ["--model-path", str(model), "--max-total-tokens", str(args.pool)]
        shared += [*dummy_flags(without), *flags]
    else:
        shared = ["--model-path", args.model, *flags]
        if args.without or args.default_flags:
            raise InvalidArgument(
                "selftest: --without and --default-flags change the built-in model's flags; "
                "with --model, give the server's own flags after --"
            )
    if args.overlap == 0 and args.model is not None:
        raise InvalidArgument(
            "selftest: --overlap needs a number with --model: how many fit at once"
        )
    each = {arm.name: memory_of(arm, args.layers, args.heads, args.pool) for arm in arms}
    return Plan(
        arms=arms,
        workloads=workloads,
        launcher=shlex.split(args.launcher),
        shared_flags=shared,
        out=out,
        repeat=args.repeat,
        boot_timeout=args.boot_timeout,
        deadline=Deadline(args.deadline),
        overlap=1 if args.overlap is None else args.overlap,
        memory_each=each,
        stagger=args.stagger,
        first_alone=args.first_alone,
        profile_steps=args.profile,
    )


def require_machine(args: argparse.Namespace) -> None:
    """Raises: IncompatibleEnvironment, when no server can start here; a foreign launcher may."""
    if args.launcher != DEFAULT_LAUNCHER:
        return
    require_package("sglang", "pip install 'sglang-fp8mla[sglang]'")
    require_package("flashinfer", "pip install 'sglang-fp8mla[sglang]'")
    require_gpu()
    from importlib.metadata import entry_points

    if not any(
        point.value.startswith("sglang_fp8mla")
        for point in entry_points(group="sglang.srt.plugins")
    ):
        raise IncompatibleEnvironment(
            "selftest: SGLang would not find this package, since it is not installed (no entry "
            "point in sglang.srt.plugins): pip install --no-deps ."
        )


def run(args: argparse.Namespace) -> int:
    """Run the selftest; 0 when ours gives stock's tokens no slower, 1 when not."""
    require_writable(args.json, "selftest: --json")
    require_machine(args)
    plan = make_plan(args)
    from .machine import machine, machine_line

    found = machine()
    sys.stderr.write(machine_line(found) + "\n")
    results_path = plan.out / "selftest.json"

    def write(verdict: Verdict | None) -> None:
        data = to_json(plan, runner.results, verdict, found)
        partial = results_path.with_suffix(".json.partial")
        partial.write_text(json.dumps(data, indent=1), encoding="utf-8")
        partial.replace(results_path)

    with Progress([arm.name for arm in plan.arms]) as progress, ending_by_signal():
        runner = Runner(plan, progress, lambda: write(None))
        try:
            runner.run()
        except KeyboardInterrupt:
            write(None)
            raise
    verdict = judge(runner.results, plan.arms)
    write(verdict)
    show(plan, runner.results, verdict)
    text = results_path.read_text(encoding="utf-8")
    if args.json == "-":
        sys.stdout.write(text + "\n")
    elif args.json:
        Path(args.json).write_text(text, encoding="utf-8")
    return 0 if verdict.ok else 1


_DESCRIPTION = """\
Start real SGLang servers on this machine, on stock flashinfer and on ours, send both the same
requests, compare the greedy tokens and the time of one decode step, stop everything, and say
whether the switch gains anything and loses nothing.

Without --model: a small DeepSeek-V3 shaped model with dummy weights. The pool size matters, the
model's size does not: stock casts every slot of the pool on every layer of every step."""

_EPILOG = """\
examples:
  sglang-fp8mla selftest                                  8 layers, each path; minutes
  sglang-fp8mla selftest --layers 61 --overlap            the numbers of the documentation
  sglang-fp8mla selftest --arms stock,auto --json         quickest answer, for machines
  sglang-fp8mla selftest --model /models/V3 -- --tp-size 8 --trust-remote-code
  sglang-fp8mla selftest --arm 'tri=--attention-backend,triton,--kv-cache-dtype,fp8_e4m3'

arms: {arms}

exit codes: 0 same tokens and not slower; 1 not so, or no server could start; 2 wrong command
line; 130 interrupted. Logs, traces and selftest.json lie in --out, written as each arm ends."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `selftest` to the command line."""
    arms = "\n".join(f"  {arm.name:<12} {arm.about}" for arm in ARMS.values())
    parser = subparsers.add_parser(
        "selftest",
        help="stock and ours side by side on this GPU: same tokens? how much faster?",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("{arms}", "\n" + arms),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--arms",
        default=DEFAULT_ARMS,
        metavar="NAME,...",
        help="which to run (default: %(default)s)",
    )
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=FLAG,...",
        help="one more arm, by its server flags; a word KEY:=VALUE sets an environment variable",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="PATH", help="your model; its flags come after --")
    model.add_argument("--layers", type=int, default=8, help="of the built-in model (%(default)s)")
    model.add_argument("--heads", type=int, default=16, help="of the built-in model (%(default)s)")
    model.add_argument(
        "--pool", type=int, default=495_552, help="KV slots, built-in model (%(default)s)"
    )
    model.add_argument(
        "--default-flags",
        action="store_true",
        help="leave SGLang's prefill graph and radix cache on, as a user's server has them",
    )
    model.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FLAG",
        help="drop one more of the built-in model's server flags",
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="BATCHxTOKENS",
        help="may be repeated (default: 1x64, 1x8192, 8x8192)",
    )
    measuring.add_argument(
        "--repeat", type=int, default=1, help="counted rounds per workload (%(default)s)"
    )
    measuring.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=6,
        default=0,
        metavar="STEPS",
        help="also record a profiler trace of that many decode steps per arm (6)",
    )
    running = parser.add_argument_group("running")
    running.add_argument(
        "--overlap",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="boot N arms (as many as fit) at once, then measure one at a time",
    )
    running.add_argument(
        "--stagger", type=float, default=0.0, metavar="S", help="seconds between two boots"
    )
    running.add_argument(
        "--first-alone", action="store_true", help="boot the others when the first one answers"
    )
    running.add_argument(
        "--boot-timeout", type=float, default=600.0, metavar="S", help="per server (%(default)s)"
    )
    running.add_argument(
        "--deadline", type=float, metavar="S", help="stop everything then, and report what exists"
    )
    running.add_argument(
        "--launcher",
        default=DEFAULT_LAUNCHER,
        metavar="CMD",
        help="command that starts a server (default: python -m sglang.launch_server)",
    )
    parser.add_argument("--out", metavar="DIR", help="for logs and results ($OUT, or a new folder)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the result as JSON (stdout)"
    )
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="added to every server")
    parser.set_defaults(func=run)
