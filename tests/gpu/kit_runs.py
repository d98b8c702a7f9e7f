"""SGLang's attention kit, one MLA run at a time: what it offers, and what came of a run.

Nothing of the kit is changed but three things: its pool takes the dtype under test and starts as
NaN, its reference rounds keys as that pool does, and in the `graph` modes its forward is captured
and replayed as a CUDA graph. Importing it needs neither a GPU nor SGLang.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import pytest
import torch
from contract.arms import STOCK, arm
from contract.cpu_sglang import hopper
from contract.scene import single_rank

KIT = "sglang.test.kits.attention_unittest"
MLA = "attention_methods.mla_attention"
DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": torch.bfloat16}
POOLS = {"bf16": None, "e4m3": torch.float8_e4m3fn}

# mode: the kit's module and function
MODES = {
    "eager": (MLA, "run_mla_attention_case"),
    "layout": (MLA, "run_mla_attention_case"),
    "decode replay": ("runner_modes.cuda_graph_decode_runner", "run_mla_cuda_graph_decode_case"),
    "decode graph": ("runner_modes.cuda_graph_decode_runner", "run_mla_cuda_graph_decode_case"),
    "verify": ("runner_modes.speculative_target_verify_runner", "run_mla_eagle_verify_case"),
    "verify replay": (
        "runner_modes.speculative_target_verify_runner",
        "run_mla_eagle_verify_cuda_graph_case",
    ),
    "verify graph": (
        "runner_modes.speculative_target_verify_runner",
        "run_mla_eagle_verify_cuda_graph_case",
    ),
    "draft graph": (
        "runner_modes.speculative_draft_runner",
        "run_mla_eagle_draft_cuda_graph_runner_case",
    ),
    "draft extend": ("runner_modes.speculative_draft_extend_runner", ""),
    "draft extend replay": (
        "runner_modes.speculative_draft_extend_runner",
        "run_mla_draft_extend_v2_cuda_graph_case",
    ),
    "draft extend graph": (
        "runner_modes.speculative_draft_extend_runner",
        "run_mla_eagle_draft_extend_v2_cuda_graph_runner_case",
    ),
    "captured prefill": ("runner_modes.split_op_runner", "run_mla_split_op_extend_case"),
}
# the kit replays in Python what a graph would; here the graph is real
CAPTURED = ("decode graph", "verify graph")


class KitSkip(Exception):
    """The kit skipped a run; the message is its reason."""


class Kit:
    """The kit's `testcase`."""

    def skipTest(self, reason: str) -> NoReturn:
        raise KitSkip(reason)

    def assertTrue(self, value: object, message: str = "") -> None:
        if not value:
            raise AssertionError(message or "assertTrue failed")


@dataclass(frozen=True)
class Run:
    """One thing that the kit can do with an MLA backend.

    Args:
        mode: a key of `MODES`.
        base: the name of the kit's case that is run, or changed by the next two.
        lens: (prefix, new) lengths of each request instead of the case's own.
        page_size: instead of the case's own.
        options: keyword arguments of the kit's function.
    """

    mode: str
    base: str
    lens: tuple[tuple[int, int], ...] = ()
    page_size: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        """The mode, the case and the options, as one line of a table."""
        options = [f"{key} {value}" for key, value in self.options]
        page = [f"page {self.page_size}"] if self.page_size else []
        return ", ".join([f"{self.mode}: {self.base.removeprefix('mla_')}", *page, *options])

    @property
    def decodes(self) -> bool:
        """Whether the decode phase attends; target verify and draft extend count as extend."""
        return self.base.startswith("mla_decode") and not self.mode.startswith(
            ("verify", "draft e")
        )

    @property
    def risky(self) -> bool:
        """Upstream's notes say that stock lost its CUDA context in such a run (SM90, May 2026)."""
        return self.mode == "layout" or dict(self.options).get("spec_kind", "eagle") != "eagle"


def _all_runs() -> tuple[Run, ...]:
    decode, single = "mla_decode_page_boundary", "mla_decode_bsz1_nonzero_prefix"
    extend = (
        "mla_extend_page_size_1",
        "mla_extend_zero_prefix_exact_page",
        "mla_extend_zero_prefix_input_page_edges",
        "mla_extend_prefix_exact_page",
        "mla_extend_total_exact_page",
        "mla_extend_cross_page_boundary",
        "mla_extend_ragged_page_boundary",
        "mla_extend_page32_cross_boundary",
    )
    ragged, crossing = extend[6], extend[5]
    runs = [Run("eager", name) for name in (*extend, decode, single)]
    runs += [
        Run(mode, name) for mode in ("decode replay", "decode graph") for name in (decode, single)
    ]
    three = ((14, 3), (15, 3), (16, 3))
    for mode in ("verify", "verify replay", "verify graph"):
        for kind in ("eagle", "frozen_kv_mtp", "dflash", "ngram"):
            options = (("topk", 1), ("spec_kind", kind))
            runs.append(Run(mode, decode, three, 16, options))
        runs.append(Run(mode, decode, three, 16, (("topk", 2), ("spec_kind", "eagle"))))
    runs.append(Run("draft graph", decode, options=(("topk", 1),)))
    runs.append(Run("draft graph", single, options=(("topk", 1),)))
    tree = (("topk", 2), ("speculative_num_draft_tokens", 4))
    runs.append(Run("draft graph", decode, page_size=1, options=tree))
    runs.append(Run("draft extend", decode, three, 16))
    for style in ("small_real", "prod_fill"):
        runs.append(Run("draft extend replay", decode, three, 16, (("pad_style", style),)))
    runs.append(Run("draft extend graph", decode, three, 16))
    for name, padded in ((ragged, 64), (crossing, None)):
        for breakable in (False, True):
            options = (("breakable", breakable), ("static_num_tokens", padded))
            runs.append(Run("captured prefill", name, options=options))
    for name in (extend[3], decode):
        for layout in ("interleaved_pages", "non_monotonic_extend"):
            if name == decode and layout == "non_monotonic_extend":
                continue
            runs.append(Run("layout", name, options=(("loc_layout", layout),)))
    return tuple(runs)


RUNS = _all_runs()

# where stock `flashinfer` itself ends, and how; the same with every pool
STOCK_ENDS = {
    # FlashInfer MLA reads no mask, so a tree's branches see each other
    "topk 2, spec_kind eagle": "Tensor-likes are not close",
    "topk 2, speculative_num_draft_tokens 4": "only supports topk=1",
    "draft extend replay": "Invalid mode",
    "draft extend graph": "Invalid mode",
}


def stock_ends(run: Run) -> str:
    """How stock is known to end a run: a part of its message, "" where it passes."""
    return next((reason for part, reason in STOCK_ENDS.items() if part in run.id), "")


def arms_of(run: Run) -> list[tuple[str, str]]:
    """(arm, pool) of ours: every path that the run's phase knows; `fused` decodes only."""
    paths = ["gather_cast", "native"] + (["fused"] if run.decodes else [])
    return [("auto", "bf16"), *((path, "e4m3") for path in paths)]


@dataclass
class Outcome:
    """What came of one run under one arm.

    `compared` holds what the kit compared, in its order: (what the backend gave, what the kit
    expected).
    """

    status: str  # passed | failed | skipped
    reason: str = ""
    error: BaseException | None = None
    compared: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    seconds: float = 0.0


def kit_module(name: str) -> Any:
    """A module of the kit."""
    return importlib.import_module(f"{KIT}.{name}")


def make_case(run: Run, backend: str) -> Any:
    """The kit's case of a run, for a registered backend name."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    kit = kit_module(MLA)
    case = next(c for c in kit.make_mla_cases(backend) if c.name == run.base)
    changes: dict[str, Any] = {}
    if run.mode.startswith("verify"):
        changes["forward_mode"] = ForwardMode.TARGET_VERIFY
    if run.mode.startswith("draft extend"):
        changes["forward_mode"] = ForwardMode.DRAFT_EXTEND_V2
    if run.lens:
        changes["prefix_lens"] = tuple(prefix for prefix, _ in run.lens)
        changes["extend_lens"] = tuple(new for _, new in run.lens)
    if run.page_size:
        changes["page_size"] = run.page_size
    return replace(case, **changes)


@functools.cache
def _load_plugins() -> None:
    """What SGLang's processes do at their start; the draft factories are hooked there."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_fp8mla import plugin

    plugin.register()
    HookRegistry.apply_hooks()


def drive(run: Run, arm_name: str, pool: str, device: str) -> Outcome:
    """Let the kit judge one run of one arm over one pool.

    Args:
        run: what to run.
        arm_name: `stock`, or a path of ours.
        pool: a key of `POOLS`.
        device: "cuda", or "cpu" under the fakes of `contract.cpu_sglang`.
    """
    single_rank()
    _load_plugins()
    outcome = Outcome("passed")
    begin = time.monotonic()
    with arm(arm_name) as backend, pytest.MonkeyPatch.context() as patch:
        try:
            kit = kit_module(MLA)
            module, name = MODES[run.mode]
            _use_pool(kit, patch, POOLS[pool])
            _record_comparisons(patch, outcome)
            if backend != STOCK:
                _record_paths(patch, outcome)
            function = getattr(kit_module(module), name) if name else _run_draft_extend
            captured = None
            if run.mode in CAPTURED:
                captured = _capture(patch, kit, kit_module(module))
            function(Kit(), make_case(run, backend), **DIMS, device=device, **dict(run.options))
            if device == "cuda":
                # an asynchronous error belongs to this run
                torch.cuda.synchronize()
            assert captured is None or captured.replays == 1, "no graph was replayed"
        except KitSkip as skip:
            outcome.status, outcome.reason = "skipped", str(skip)
        # SGLang raises a bare Exception when a capture fails
        except Exception as error:
            lines = " ".join(str(error).split())
            outcome.status, outcome.error = "failed", error
            outcome.reason = f"{type(error).__name__}: {lines}"[:300]
    outcome.seconds = time.monotonic() - begin
    return outcome


def judge(run: Run, arm_name: str, pool: str, ours: Outcome, stock: Outcome) -> bool | None:
    """Raise unless ours is as good as stock; whether they were equal to the last bit, if compared.

    Ours is stock's computation to the last bit under `gather_cast`, and for a 16-bit pool. A draft
    over FP8 is not compared: our steps attend to their own tokens, which stock's leave out.
    """
    if pool == "e4m3" and arm_name != "auto" and ours.status == "passed":
        # equality with stock would also hold if stock had attended
        assert ours.paths == {arm_name}, f"{run.id}: attended by {sorted(ours.paths)}"
    if stock.status != "passed":
        return None
    if ours.status != "passed":
        message = f"{run.id}, {pool}: stock passed, {arm_name} {ours.status}: {ours.reason}"
        raise AssertionError(message) from ours.error
    if arm_name in ("native", "fused") or (run.mode == "draft graph" and pool == "e4m3"):
        return None
    mine, theirs = ([actual for actual, _ in o.compared] for o in (ours, stock))
    assert len(mine) == len(theirs) > 0
    equal = all(torch.equal(a, b) for a, b in zip(mine, theirs))
    assert equal, f"{run.id}, {pool}: {arm_name} differs from stock"
    return equal


def record(run: Run, arm_name: str, pool: str, outcome: Outcome) -> dict[str, Any]:
    """One line of the results file."""
    return {
        "run": run.id,
        "mode": run.mode,
        "pool": pool,
        "arm": arm_name,
        "status": outcome.status,
        "reason": outcome.reason,
        "paths": sorted(outcome.paths),
        "seconds": round(outcome.seconds, 3),
    }


# what is changed in the kit -----------------------------------------------------------------------


def _use_pool(kit: Any, patch: pytest.MonkeyPatch, dtype: torch.dtype | None) -> None:
    """Give the kit's runner a pool of `dtype` full of NaN, and its reference the same rounding."""
    runner_class, reference_class = kit.MockMLAModelRunner, kit.ReferenceDeepseekMLAAttention

    class Runner(runner_class):  # type: ignore[misc, valid-type]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs | {"fp8_kv_cache": dtype is not None})
            # 0xFF is NaN in e4m3 and bf16
            self.token_to_kv_pool.kv_buffer[0].view(torch.uint8).fill_(0xFF)

    class Reference(reference_class):  # type: ignore[misc, valid-type]
        def project_latent_qk(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, q_rope, k_rope = super().project_latent_qk(hidden_states)
            if dtype is not None:
                k, k_rope = k.to(dtype).to(k.dtype), k_rope.to(dtype).to(k_rope.dtype)
            return q, k, q_rope, k_rope

    patch.setattr(kit, "MockMLAModelRunner", Runner)
    patch.setattr(kit, "ReferenceDeepseekMLAAttention", Reference)


def _record_comparisons(patch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    compare = torch.testing.assert_close

    @functools.wraps(compare)
    def recording(actual: Any, expected: Any, **kwargs: Any) -> None:
        outcome.compared.append((actual.clone(), expected.clone()))
        compare(actual, expected, **kwargs)

    patch.setattr(torch.testing, "assert_close", recording)


def _record_paths(patch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    from sglang_fp8mla.backend import FlashInferMLAFp8Backend

    attend = FlashInferMLAFp8Backend._attend

    def recording(self: Any, wrapper: Any, planned: Any, *args: Any, **kwargs: Any) -> Any:
        outcome.paths.add(planned.path)
        return attend(self, wrapper, planned, *args, **kwargs)

    patch.setattr(FlashInferMLAFp8Backend, "_attend", recording)


def _run_draft_extend(testcase: Any, case: Any, *, device: str, **dims: Any) -> None:
    """Draft extend without a graph; the kit has its parts and no function for it."""
    kit = kit_module(MLA)
    mode = kit_module(MODES["draft extend"][0])
    fixture = kit.build_mla_attention_fixture(testcase, case, device=device, **dims)
    mode._prepare_eagle_draft_extend_v2_batch(case, fixture.forward_batch, device=device)
    actual = kit.run_mla_fixture_eager(fixture)
    expected = kit.expected_mla_fixture_output(fixture)
    torch.testing.assert_close(actual, expected, atol=kit.MLA_ATOL, rtol=kit.MLA_RTOL)


@dataclass
class _CapturedForward:
    """The kit's forward: eager until its capture, which records a graph that its replay replays."""

    forward: Callable[..., torch.Tensor]
    phase: str = "eager"
    graph: Any = None
    hidden: torch.Tensor | None = None
    out_cache_loc: torch.Tensor | None = None
    output: torch.Tensor | None = None
    replays: int = 0

    def __call__(self, fixture: Any, batch: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if self.phase == "eager":
            return self.forward(fixture, batch, inputs)
        if self.phase == "capture":
            self.hidden, self.out_cache_loc = inputs["input_hidden"].clone(), batch.out_cache_loc
            static = {**inputs, "input_hidden": self.hidden}
            # kernels compile and libraries set up outside of the capture
            self.forward(fixture, batch, static)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.output = self.forward(fixture, batch, static)
            return self.output
        assert self.hidden is not None
        assert self.out_cache_loc is not None
        assert self.output is not None
        self.hidden.copy_(inputs["input_hidden"])
        self.out_cache_loc.copy_(batch.out_cache_loc)
        self.graph.replay()
        self.replays += 1
        return self.output.clone()


def _capture(patch: pytest.MonkeyPatch, kit: Any, module: Any) -> _CapturedForward:
    """Replace the forward of a runner mode by one that is captured and replayed."""
    captured = _CapturedForward(kit.run_mla_forward)
    patch.setattr(module, "run_mla_forward", captured)
    for user in ("cuda_graph_decode_runner", "speculative_cuda_graph_runner"):
        runner = kit_module(f"runner_modes.{user}")
        for phase in ("capture", "replay"):
            name = f"_init_cuda_graph_{phase}_metadata"
            patch.setattr(runner, name, _enter(captured, phase, getattr(runner, name)))
    return captured


def _enter(captured: _CapturedForward, phase: str, prepare: Callable[..., None]) -> Any:
    def entering(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        captured.phase = phase

    return entering


def main() -> None:
    """Print the results of every run that needs no graph, on the CPU, one JSON line each.

    `TRITON_INTERPRET=1 PYTHONPATH=tests python -m gpu.kit_runs > kit.jsonl` (some four minutes).
    """
    with hopper():
        for run in (run for run in RUNS if "graph" not in run.mode):
            stock = {pool: drive(run, "stock", pool, "cpu") for pool in POOLS}
            lines = [record(run, "stock", pool, outcome) for pool, outcome in stock.items()]
            for name, pool in arms_of(run):
                ours = drive(run, name, pool, "cpu")
                equal = judge(run, name, pool, ours, stock[pool])
                lines.append({**record(run, name, pool, ours), "bitwise": equal})
            sys.stdout.writelines(json.dumps(line) + "\n" for line in lines)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
