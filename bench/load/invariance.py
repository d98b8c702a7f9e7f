"""Where the batch-invariant server of `bench.load.load --arm exact` loses a bit, if it does.

    python -m bench.load.invariance --model /tmp/nextn8 --json F.json    # 200 s, 15 GiB of one GPU

Three servers at once answer the same prompts, which are in the radix cache, alone and in batches of
2 to 200; answers are compared to the bit.

`overlap`: the arm as load ran it at first.
`no overlap`: with --disable-overlap-schedule. The last token of a cached prompt has two rows of KV:
the radix cache's, from the prefill that filled it, and the request's own, computed alone over its
prefix; FlashInfer's MLA prefill rounds them differently. A request moves to the cached row when
SGLang has processed the result of its prefill. With overlap that is after the launch of a decode
step that follows at once, and before it where another prefill comes between, as under load.
`hooks`: no overlap, no CUDA graphs, and a hash of each row that each module takes and gives. Each
row of a batch must be one that a request alone had; the first module where one is not is named.

If `no overlap` differs nowhere, and the answers that moved with `overlap` are the bits that
`no overlap` gives alone, then no kernel of decode is to blame. Writes what it finds as it comes.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.load import servers
from bench.load.answers import Answer, compare, make_catalogue, parse
from bench.load.load import ARMS, SEED
from sglang_fp8mla.machine import machine
from sglang_fp8mla.serving import Deadline, ServerFailed, call, ending_by_signal

LAYERS, NEW, PORT = 8, 24, 15000
SIZES = (2, 3, 4, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 100, 200)
HOOK_SIZES = (2, 8, 17, 64, 128)
NAMES = (
    *("short-16", "short-64", "short-129", "short-300", "short-640", "grow-70", "long-2048"),
    *("document-0+1", "document-1+31", "document-2+7", "document-3+31", "long-8000"),
)
_PARTS = (
    *("input_layernorm", "self_attn.fused_qkv_a_proj_with_mqa", "self_attn.q_a_layernorm"),
    *("self_attn.kv_a_layernorm", "self_attn.q_b_proj", "self_attn.attn_mqa", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_up_proj", "mlp.act_fn", "mlp.down_proj"),
)
_LAST = "logits_processor"
Pass = dict[str, list[int]]  # of one decode step: hashes of the rows of each tensor, as executed
_pass: dict[str, Any] = {}  # in the hooked server: the forward that runs


def create_hook(config: dict[str, str]) -> Callable[[Any, tuple[Any, ...], Any], None]:
    """For --forward-hooks: adds a decode step's hashes to a file, one line a step.

    Args:
        config: `name` of the module, and `path` of the file.
    """
    import torch

    def hash_rows(x: torch.Tensor) -> list[int]:
        """Of each row a sum of its bits under weights that tell the columns apart, mod 2**64."""
        bits = x.reshape(len(x), -1).contiguous().view(torch.int16).long()
        weights = torch.arange(1, bits.shape[1] + 1, device=x.device) * 2654435761
        return list((bits * weights).sum(1).tolist())

    def hook(_module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Inputs first: a bit that differs there was lost between two modules."""
        logits = getattr(output, "next_token_logits", None)
        outputs = output if isinstance(output, tuple) else (output if logits is None else logits,)
        for kind, values in (("in", inputs), ("out", outputs)):
            for i, x in enumerate(values):
                if hasattr(x, "forward_mode"):
                    _pass["decode"] = x.forward_mode.is_decode()
                elif not isinstance(x, torch.Tensor) or not x.is_floating_point():
                    continue
                elif x.dim() > 1 and len(x) <= max(SIZES):  # not the prefills of whole prompts
                    _pass[f"{config['name']} {kind} {i}"] = hash_rows(x)
        if config["name"] == _LAST:
            if _pass.pop("decode", False):
                with open(config["path"], "a", encoding="utf-8") as file:
                    print(json.dumps(_pass), file=file)
            _pass.clear()

    return hook


def hook_words(path: Path) -> tuple[str, ...]:
    """Server arguments that write each module's hashes into `path`."""
    names = [f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in _PARTS]
    factory = "bench.load.invariance:create_hook"
    specs = [
        {"target_modules": [name], "hook_factory": factory, "config": {"name": name, "path": path}}
        for name in [*names, "model.norm", _LAST]
    ]
    return ("--disable-cuda-graph", "--forward-hooks", json.dumps(specs, default=str))


def take_passes(path: Path) -> list[Pass]:
    """The decode steps since the last call; the server is at rest."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.unlink(missing_ok=True)
    return [json.loads(line) for line in text.splitlines()]


def first_foreign(alone: dict[str, set[int]], passes: list[Pass]) -> str:
    """The first place, in order of execution, with rows that no request alone had; "" if none."""
    for number, found in enumerate(passes):
        for name, rows in found.items():
            if foreign := [i for i, row in enumerate(rows) if row not in alone.get(name, ())]:
                return f"step {number}, {name}: {len(foreign)} rows of {len(rows)}: {foreign[:8]}"
    return ""


def ask(base: str, names: list[str]) -> list[Answer]:
    """One batch of /generate, in order, with the likeliest tokens."""
    asks = {ask.name: list(ask.input_ids) for ask in make_catalogue(SEED)}
    body = {
        "input_ids": [asks[name] for name in names],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True},
        **{"return_logprob": True, "top_logprobs_num": 5},
    }
    return [parse(answer) for answer in json.loads(call(base, "/generate", body, timeout=100))]


class Asker:
    """Asks one server; `say` takes what is found, and `explain` needs `alone` and `moved`."""

    def __init__(self, say: Callable[[str, object], None]) -> None:
        self.alone: dict[str, Answer] = {}
        self.moved: list[tuple[str, Answer]] = []
        self._say = say

    def run(self, server: servers.Launched, hashes: Path | None) -> None:
        """Wait for it, ask it, end it; what fails is reported."""
        try:
            self._say("boot_s", round(server.wait_healthy(servers.BOOT, Deadline()), 1))
            self._ask(server.base, hashes)
        except (ServerFailed, OSError, ValueError, LookupError) as error:
            self._say("FAILED", f"{type(error).__name__} {error}"[:600])
        finally:
            server.stop()

    def _ask(self, base: str, hashes: Path | None) -> None:
        # first to fill the radix cache, then the reference, then the noise
        _, self.alone, again = ({name: ask(base, [name])[0] for name in NAMES} for _ in range(3))
        noise = [name for name in NAMES if self.alone[name].bits != again[name].bits]
        rows: dict[str, set[int]] = {}
        for found in take_passes(hashes) if hashes else []:
            for place, values in found.items():
                rows.setdefault(place, set()).update(values)
        self._say("differ alone twice", noise)
        self._say("places hashed", len(rows))
        for size in HOOK_SIZES if hashes else SIZES:
            found_here = self._compare(base, size)
            if hashes:
                found_here["first_foreign"] = first_foreign(rows, take_passes(hashes))
            self._say(f"batch of {size}", found_here)

    def _compare(self, base: str, size: int) -> dict[str, Any]:
        names = [NAMES[i % len(NAMES)] for i in range(size)]
        by_request: Counter[str] = Counter()
        first_moved: Counter[int] = Counter()
        largest, other_prefix = 0.0, 0
        for name, answer in zip(names, ask(base, names)):
            alone = self.alone[name]
            other_prefix += answer.cached_tokens != alone.cached_tokens
            if answer.bits != alone.bits:
                shifts = compare(alone, answer).shifts
                first_moved[next((i for i, s in enumerate(shifts) if s), len(shifts))] += 1
                by_request[name] += 1
                largest = max(largest, *shifts, 0.0)
                self.moved.append((name, answer))
        counts = {"differ": by_request.total(), "other_prefix": other_prefix}
        moved = {"first_moved": dict(first_moved), "by_request": dict(by_request)}
        return {**counts, **moved, "largest_shift": largest}


def explain(overlap: Asker, plain: Asker) -> str:
    """How many of the answers that moved with overlap are those alone without it."""
    alone = {name: answer.bits for name, answer in plain.alone.items()}
    same = sum(alone.get(name) == answer.bits for name, answer in overlap.moved)
    return f"{same} of the {len(overlap.moved)} answers that moved are the bits of no overlap alone"


def main() -> None:
    """Parse arguments, run all, write the report as it comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="/tmp/nextn8")
    parser.add_argument("--json", type=Path, default=Path("invariance.json"))
    options = parser.parse_args()
    hashes = options.json.with_suffix(".hashes").absolute()
    arm, lock = ARMS["exact"], threading.Lock()
    no_overlap = "--disable-overlap-schedule"
    alike = tuple(word for word in arm.command_line(options.model) if word != no_overlap)
    report: dict[str, Any] = {"machine": machine(), "words": alike}

    def say(name: str, what: str, found: object) -> None:
        with lock:
            report.setdefault(name, {})[what] = found
            print(f"{name}: {what}: {found}", flush=True)
            servers.write_json(options.json, report)

    ways: dict[str, tuple[str, ...]] = {
        "overlap": (),
        "no overlap": (no_overlap,),
        "hooks": (no_overlap, *hook_words(hashes)),
    }
    askers = {name: Asker(partial(say, name)) for name in ways}
    started: list[servers.Launched] = []
    runs: list[Future[None]] = []
    with ending_by_signal(), ThreadPoolExecutor() as pool:
        try:
            for number, (name, more) in enumerate(ways.items()):
                log_path = options.json.with_suffix(f".{name.replace(' ', '-')}.log")
                server = servers.launch(
                    log_path, PORT + 300 * number, *alike, *more,
                    module=arm.module, **arm.environment,
                )  # fmt: skip
                started.append(server)
                path = hashes if name == "hooks" else None
                runs.append(pool.submit(askers[name].run, server, path))
            for run in runs:
                run.result()
        finally:
            for server in started:
                server.stop()
    say("overlap", "explained", explain(askers["overlap"], askers["no overlap"]))


if __name__ == "__main__":
    main()
