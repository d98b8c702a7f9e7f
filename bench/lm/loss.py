"""Next-token loss of held-out text through real SGLang servers: what an FP8 pool costs a model.

    python -m bench.lm.loss --tool ~/p/tools/serve_ab.py --models DIR0,DIR1,DIR2 --boot-model DIR \
        --json $OUT/lm.json [--arms 'NAME;NAME=WORDS']

The models are `bench.lm.train`'s, and may still be training: servers boot on any model of the shape
(`--boot-model`, an untrained one) and take each seed's weights by /update_weights_from_disk. Per
arm and seed, on the same windows: `extend`, the loss of a whole window in prefill; `decode`, the
loss of the bytes after a prompt, each forced by `bench.lm.forcing` so that every position is
attended by the decode kernel; `extend_same`, prefill's loss of those very bytes. Beside the
servers stand torch's own losses, with rows rounded to FP8 and not. Rows are written as they come.
Exit 1 when an arm is lost or a gate is red.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from bench.lm.forcing import serialized
from bench.serve_overlap import load_tool, wait_healthy
from sglang_fp8mla.machine import machine, machine_line

_E4M3, _E5M2 = "--kv-cache-dtype,fp8_e4m3", "--kv-cache-dtype,fp8_e5m2"
_OURS = "--attention-backend,flashinfer_mla_fp8"


def _forced(decode: str, extend: str) -> str:
    return f"SGLANG_FP8MLA_DECODE_PATH:={decode},SGLANG_FP8MLA_EXTEND_PATH:={extend}"


ARMS = {
    "stock_bf16": "--attention-backend,flashinfer,--kv-cache-dtype,bfloat16",
    "stock_fp8": f"--attention-backend,flashinfer,{_E4M3}",
    "gather_cast": f"{_OURS},{_E4M3},{_forced('gather_cast', 'gather_cast')}",
    "native": f"{_OURS},{_E4M3},{_forced('native', 'native')}",
    "fused": f"{_OURS},{_E4M3},{_forced('fused', 'gather_cast')}",
    "gather_cast_e5m2": f"{_OURS},{_E5M2},{_forced('gather_cast', 'gather_cast')}",
    # triton's prefill attends new tokens before they are stored: its extend does not see the pool
    "triton_fp8": f"--attention-backend,triton,{_E4M3}",
    "flashmla_fp8": f"--attention-backend,flashmla,--page-size,64,{_E4M3}",
}
BASES = ("stock_bf16", "stock_fp8")
PHASES = ("extend", "extend_same", "decode")
# requests a call: 8 windows of 2048 are one chunk of prefill, and 16 prompts of 512 half of one
EXTEND_BATCH, DECODE_BATCH = 8, 16
# added to serve_ab.py's fixed flags; of a flag given twice the last one counts
FLAGS = (
    "--load-format,auto,--enable-custom-logit-processor,--cuda-graph-max-bs-decode,16,"
    "--max-running-requests,32,--chunked-prefill-size,16384,--mem-fraction-static,0.9"
)
# nats: bf16 servers against torch's bf16, whose products are rounded in another order
GATE = 0.01

Call = Callable[..., bytes]
NOT_MEASURED = (OSError, ValueError, LookupError, TypeError, HTTPException, RuntimeError)


class NoModel(RuntimeError):
    """A checkpoint that is not there, and will not be."""


def update_weights(call: Call, model: str) -> None:
    """Load another seed's weights into the running server.

    Raises:
        RuntimeError: the server says that it did not.
    """
    answer = json.loads(
        call("/update_weights_from_disk", {"model_path": model, "load_format": "auto"}, timeout=120)
    )
    if not answer["success"]:
        raise RuntimeError(f"/update_weights_from_disk: {answer['message']}")


def extend_losses(call: Call, windows: np.ndarray) -> np.ndarray:
    """[n, t - 1] nats of bytes 1 .. t-1 of `windows` [n, t] uint8, as prefill's own logprobs."""
    losses: list[list[float]] = []
    for begin in range(0, len(windows), EXTEND_BATCH):
        rows = windows[begin : begin + EXTEND_BATCH].tolist()
        body = {
            "input_ids": rows,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for row, answer in zip(rows, json.loads(call("/generate", body)), strict=True):
            # the first byte has no logprob
            pairs = [entry[:2] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
            if [token for _, token in pairs] != row[1:]:
                raise RuntimeError("extend: the logprobs are not those of the window's bytes")
            losses.append([-logprob for logprob, _ in pairs])
    return np.array(losses)


def decode_losses(call: Call, windows: np.ndarray, prompt: int, forced: int) -> np.ndarray:
    """[n, forced - 1] nats of bytes prompt+1 .. prompt+forced-1, each from a decode step.

    Byte `prompt` comes out of prefill and is forced, but not counted.

    Raises:
        RuntimeError: a server's output is not the forced bytes, so steps were not what they seemed.
    """
    losses: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="lm-forcing-") as directory:
        for begin in range(0, len(windows), DECODE_BATCH):
            rows = windows[begin : begin + DECODE_BATCH]
            targets = rows[:, prompt : prompt + forced].tolist()
            paths = [os.path.join(directory, f"{begin + i}.json") for i in range(len(rows))]
            body = {
                "input_ids": rows[:, :prompt].tolist(),
                "sampling_params": [
                    {
                        "temperature": 0,
                        "max_new_tokens": forced,
                        "ignore_eos": True,
                        "custom_params": {"targets": target, "path": path},
                    }
                    for target, path in zip(targets, paths, strict=True)
                ],
                "custom_logit_processor": serialized(),
            }
            answers = json.loads(call("/generate", body))
            for target, path, answer in zip(targets, paths, answers, strict=True):
                if answer["output_ids"] != target:
                    raise RuntimeError("decode: the server's output is not the forced bytes")
                found = json.loads(Path(path).read_text())
                if len(found) != forced:
                    raise RuntimeError(f"decode: {len(found)} losses, {forced} steps")
                losses.append(found[1:])
    return np.array(losses)


class Results:
    """Rows of all arms, written to one file after each of them."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.path, self.head = path, head
        self.losses: dict[tuple[str, int], dict[str, np.ndarray]] = {}
        self.notes: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def add(self, arm: str, seed: int, losses: dict[str, np.ndarray], **more: Any) -> None:
        with self.lock:
            self.losses[arm, seed] = losses
            self.notes.append({"arm": arm, "seed": seed, **more})
            self._write()
        means = ", ".join(f"{phase} {found.mean():.5f}" for phase, found in losses.items())
        print(f"{arm} seed {seed}: {means}", flush=True)

    def lose(self, arm: str, error: str) -> None:
        with self.lock:
            self.notes.append({"arm": arm, "error": error})
            self._write()
        print(f"{arm}: {error}", flush=True)

    def table(self) -> list[dict[str, Any]]:
        """A row an arm and phase: mean and spread over seeds, and differences to each base.

        Differences are paired by window. Their standard error is over windows, each window's
        difference averaged over seeds first, since seeds share the windows.
        """
        rows = []
        arms = list(dict.fromkeys(arm for arm, _ in self.losses))
        for arm in arms:
            for phase in PHASES:
                mine = {s: f[phase] for (a, s), f in self.losses.items() if a == arm and phase in f}
                if not mine:
                    continue
                means = np.array([found.mean() for found in mine.values()])
                row: dict[str, Any] = {
                    "arm": arm,
                    "phase": phase,
                    "seeds": sorted(mine),
                    "tokens": int(sum(found.size for found in mine.values())),
                    "mean": float(means.mean()),
                    "by_seed": [float(mine[s].mean()) for s in sorted(mine)],
                    "spread": float(means.max() - means.min()),
                }
                for base in BASES:
                    seeds = [s for s in mine if phase in self.losses.get((base, s), {})]
                    if arm == base or not seeds:
                        continue
                    each = np.stack([mine[s] - self.losses[base, s][phase] for s in seeds])
                    windows = each.mean(axis=(0, 2))
                    row[f"minus_{base}"] = {
                        "mean": float(each.mean()),
                        "se": float(windows.std(ddof=1) / len(windows) ** 0.5),
                        "by_seed": each.mean(axis=(1, 2)).tolist(),
                        # of a single byte, either way: equal bits give 0
                        "mean_abs": float(np.abs(each).mean()),
                        "max_abs": float(np.abs(each).max()),
                    }
                rows.append(row)
        return rows

    def gates(self) -> list[dict[str, Any]]:
        """What must hold before a difference means anything, on the bf16 arm of each seed."""
        gates = []
        for (arm, seed), mine in sorted(self.losses.items()):
            if arm != "stock_bf16":
                continue
            torch_losses = self.losses[("torch_bf16", seed)]
            pairs = [("extend", mine["extend"], "torch", torch_losses["extend"])]
            if "decode" in mine:
                pairs.append(("decode", mine["decode"], "extend_same", mine["extend_same"]))
            for phase, a, against, b in pairs:
                off = float(abs(a.mean() - b.mean()))
                name = f"seed {seed}: {phase} of stock_bf16 as {against}'s"
                gates.append({"gate": name, "nats_off": off, "limit": GATE, "ok": off < GATE})
        return gates

    def _write(self) -> None:
        windows = [
            {"arm": a, "seed": s, **{p: f.mean(axis=1).round(6).tolist() for p, f in found.items()}}
            for (a, s), found in self.losses.items()
        ]
        result = {
            **self.head,
            "table": self.table(),
            "gates": self.gates(),
            "rows": self.notes,
            "windows": windows,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(result, indent=1))
        part.rename(self.path)


class Models:
    """The checkpoints in order, each known once its training has ended."""

    def __init__(self, directories: list[str], results: Results, prompt: int, forced: int) -> None:
        self.directories, self.results = directories, results
        self.prompt, self.forced = prompt, forced
        self.lock = threading.Lock()
        self.read: dict[str, tuple[int, np.ndarray]] = {}

    def same(self, losses: np.ndarray) -> np.ndarray:
        """Of losses of bytes 1 .. t-1, those of the bytes that decode is measured on."""
        return losses[:, self.prompt : self.prompt + self.forced - 1]

    def wait(self, directory: str, until: float) -> tuple[int, np.ndarray]:
        """The seed and the windows; torch's losses go to the results the first time.

        Raises:
            NoModel: its training failed (a file `failed`), or there is no meta.json in time.
        """
        meta_path = Path(directory) / "meta.json"
        while not meta_path.exists():
            if (Path(directory) / "failed").exists():
                raise NoModel(f"{directory}: the training failed")
            if time.monotonic() > until:
                raise NoModel(f"{meta_path} is still missing")
            time.sleep(0.5)
        with self.lock:
            if directory not in self.read:
                meta = json.loads(meta_path.read_text())
                held = dict(np.load(Path(directory) / "held_out.npz"))
                windows = held.pop("windows")
                self.read[directory] = meta["seed"], windows
                self.results.head.setdefault("models", []).append(meta)
                for name, losses in held.items():
                    found = {"extend": losses, "extend_same": self.same(losses)}
                    self.results.add(f"torch_{name}", meta["seed"], found)
            return self.read[directory]


def measure_seed(call: Call, arm: str, directory: str, models: Models, until: float) -> None:
    seed, windows = models.wait(directory, until)
    begin = time.monotonic()
    extend = extend_losses(call, windows)
    losses = {"extend": extend, "extend_same": models.same(extend)}
    try:
        losses["decode"] = decode_losses(call, windows, models.prompt, models.forced)
    finally:
        # what was measured before is kept
        models.results.add(arm, seed, losses, seconds=round(time.monotonic() - begin, 1))


def call_of(tool: Any) -> Call:
    """serve_ab.py's requests, with less patience: nothing here takes a minute."""

    def call(path: str, body: Any = None, timeout: float = 120) -> bytes:
        return tool.call(path, body, timeout)  # type: ignore[no-any-return]

    return call


_running: set[int] = set()


def kill(pid: int) -> None:
    """End a server and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _running.discard(pid)


def tail(name: str) -> str:
    log = Path(os.environ.get("OUT", tempfile.gettempdir())) / f"{name}.log"
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


@contextlib.contextmanager
def server(tool: Any, name: str, words: list[str], model: str, options: Any) -> Any:
    """A healthy server of `model`; killed at the end, and when it is not healthy in time.

    Raises:
        RuntimeError: it exited, or took too long; with the end of its log.
    """
    args = argparse.Namespace(model=model, pool=options.pool, without="")
    begin = time.monotonic()
    process = tool.boot(name, words, args)
    _running.add(process.pid)
    try:
        left = min(options.boot, options.until - begin)
        if ended := wait_healthy(tool, process, left):
            raise RuntimeError(f"{ended}: {tail(name)}")
        print(f"{name}: up after {time.monotonic() - begin:.0f} s", flush=True)
        yield
    finally:
        kill(process.pid)
        process.wait()


def run_arm(tool: Any, arm: str, words: list[str], models: Models, options: Any) -> None:
    """All seeds through one server; without weight updates, the first seed through another."""
    first, results, call = models.directories[0], models.results, call_of(tool)
    try:
        with server(tool, arm, words, options.boot_model or first, options):
            for directory in models.directories:
                try:
                    models.wait(directory, options.until)
                except NoModel as problem:
                    results.lose(arm, str(problem))
                    continue
                if time.monotonic() > options.until:
                    results.lose(arm, f"no time left for {directory}")
                    break
                if directory != first or options.boot_model:
                    update_weights(call, directory)
                measure_seed(call, arm, directory, models, options.until)
        return
    except NOT_MEASURED as problem:
        results.lose(arm, f"{type(problem).__name__}: {str(problem)[:2000]}")
    if any(a == arm for a, _ in results.losses) or not options.boot_model:
        return
    try:
        models.wait(first, options.until)
        with server(tool, f"{arm}-again", words, first, options):
            measure_seed(call, arm, first, models, options.until)
    except NOT_MEASURED as problem:
        results.lose(arm, f"second boot, {type(problem).__name__}: {str(problem)[:2000]}")


def print_table(results: Results) -> None:
    print(f"{'arm':<17}{'phase':<12}{'nats/byte':>10}{'spread':>9}   minus bf16 (+-)", end="")
    print("          minus FP8 (+-)        bytes")
    for row in results.table():
        cells = []
        for base in BASES:
            d = row.get(f"minus_{base}")
            cells.append(f"{d['mean']:+.5f} ({d['se']:.5f})" if d else "-")
        print(
            f"{row['arm']:<17}{row['phase']:<12}{row['mean']:>10.5f}{row['spread']:>9.5f}   "
            f"{cells[0]:<24}{cells[1]:<22}{row['tokens']}"
        )
    for gate in results.gates():
        verdict = "ok" if gate["ok"] else "RED: the rows above are not to be trusted"
        print(f"gate: {gate['gate']}, {gate['nats_off']:.5f} nats off, {verdict}")


def parse_arms(words: str) -> dict[str, list[str]]:
    """`NAME;NAME=WORDS` to words a name; all of ARMS when empty."""
    arms: dict[str, list[str]] = {}
    for word in words.split(";") if words else ARMS:
        name, sep, own = word.partition("=")
        if not sep and name not in ARMS:
            raise SystemExit(f"--arms: NAME must be one of {', '.join(ARMS)}, got {name}")
        arms[name] = f"{own if sep else ARMS[name]},{FLAGS}".split(",")
    return arms


def main() -> None:
    """Boot all arms at once, measure each as it is ready, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", required=True, help="path of serve_ab.py")
    parser.add_argument("--models", required=True, metavar="DIR,DIR")
    parser.add_argument(
        "--boot-model", default="", help="checkpoint to boot on; the first of MODELS"
    )
    parser.add_argument("--arms", default="", help="NAME;NAME=WORDS, all when left out")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pool", type=int, default=65536, help="slots")
    parser.add_argument("--port", type=int, default=14000, help="of the first arm; 400 an arm")
    parser.add_argument("--boot", type=float, default=240, help="seconds a server may take")
    parser.add_argument("--limit", type=float, default=400, help="seconds, for all of it")
    parser.add_argument("--prompt", type=int, default=512, help="bytes before the forced ones")
    parser.add_argument("--forced", type=int, default=1024, help="bytes, a request")
    options = parser.parse_args()
    options.until = time.monotonic() + options.limit
    head = {
        "machine": machine(),
        "unit": "nats per byte",
        "prompt": options.prompt,
        "forced": options.forced,
        "pool": options.pool,
    }
    print(machine_line(head["machine"]), flush=True)
    results = Results(options.json, head)
    models = Models(options.models.split(","), results, options.prompt, options.forced)
    arms = parse_arms(options.arms)
    head["arms"] = {name: ",".join(words) for name, words in arms.items()}
    # what `timeout` sends; the servers have sessions of their own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threads = []
    for number, (name, words) in enumerate(arms.items()):
        tool = load_tool(os.path.expanduser(options.tool), options.port + 400 * number)
        threads.append(
            threading.Thread(target=run_arm, args=(tool, name, words, models, options), daemon=True)
        )
        threads[-1].start()
    try:
        for thread in threads:
            thread.join()
    finally:
        for pid in list(_running):
            kill(pid)
        print_table(results)
    pairs = [(arm, seed) for arm in arms for seed, _ in models.read.values()]
    whole = all("decode" in results.losses.get(pair, {}) for pair in pairs)
    seeds = len(models.read) == len(models.directories)
    gates = results.gates()
    print(f"{len(results.losses)} rows; every arm and seed: {whole and seeds}", flush=True)
    sys.exit(0 if whole and seeds and gates and all(gate["ok"] for gate in gates) else 1)


if __name__ == "__main__":
    main()
