"""SGLang's own MLA attention kit on a GPU: whatever stock `flashinfer` passes, every path passes.

Real FlashInfer wrappers, Triton and CUDA graphs, DeepSeek's row of 512 + 64. With `OUT` set each
outcome becomes a line of `$OUT/kit.jsonl` as it happens, of which `kit_table.py` makes the table in
docs/compat.md. Ragged prefill is off, as the kit itself sets it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from contract.cpu_sglang import hopper  # noqa: E402
from gpu.kit_runs import (  # noqa: E402
    KIT,
    MODES,
    RUNS,
    Outcome,
    Run,
    arms_of,
    drive,
    judge,
    kit_module,
    record,
    stock_ends,
)
from gpu.kit_table import table  # noqa: E402

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _arms() -> list[Any]:
    """(run, arm, pool) of ours.

    Runs that lost stock's CUDA context upstream come last; in each, stock is driven after ours.
    """
    return [
        pytest.param(
            run,
            arm,
            pool,
            id=f"{run.id}-{arm}-{pool}",
            marks=[pytest.mark.sm90] if arm == "native" else [],
        )
        for run in sorted(RUNS, key=lambda run: run.risky)
        for arm, pool in arms_of(run)
    ]


_stock: dict[tuple[Run, str], Outcome] = {}


def stock_outcome(run: Run, pool: str) -> Outcome:
    """What stock `flashinfer` made of a run; driven once a session."""
    if (run, pool) not in _stock:
        _stock[run, pool] = drive(run, "stock", pool, "cuda")
        write(record(run, "stock", pool, _stock[run, pool]))
    ends = stock_ends(run)
    if ends:
        # a stock that no longer ends here is news for docs/compat.md, and sets us a new mark
        assert _stock[run, pool].status == "failed"
        assert ends in _stock[run, pool].reason
    return _stock[run, pool]


def write(line: dict[str, Any]) -> None:
    folder = os.environ.get("OUT")
    if folder:
        with (Path(folder) / "kit.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.gpu
@pytest.mark.parametrize(("run", "arm", "pool"), _arms())
def test_what_stock_passes_we_pass(run: Run, arm: str, pool: str) -> None:
    """Within the kit's own tolerance of its own reference, wherever stock is."""
    ours = drive(run, arm, pool, "cuda")
    stock = stock_outcome(run, pool)
    line = record(run, arm, pool, ours)
    try:
        line["bitwise"] = judge(run, arm, pool, ours, stock)
    except AssertionError as error:
        line["verdict"] = str(error)[:400]
        raise
    finally:
        write(line)


# without a GPU ----------------------------------------------------------------------------------


def test_every_mla_function_of_the_kit_is_driven() -> None:
    """A kit that grows a runner mode for MLA must not leave it untried in silence."""
    offered = {
        (module, name)
        for module in {module for module, _ in MODES.values()}
        for name in dir(kit_module(module))
        if name.startswith("run_mla_") and name.endswith("_case")
        if getattr(kit_module(module), name).__module__ == f"{KIT}.{module}"
    }
    assert offered == {(module, name) for module, name in MODES.values() if name}
    assert {run.mode for run in RUNS} == set(MODES)


def test_every_eager_case_of_the_kit_is_driven() -> None:
    cases = {case.name for case in kit_module("attention_methods.mla_attention").make_mla_cases("")}
    assert cases == {run.base for run in RUNS if run.mode == "eager"}


if not torch.cuda.is_available():
    # real SGLang over FlashInfer's own wrapper, whose kernel is torch; with a GPU the same runs are
    # driven above, and a test that skips there would count as failed

    @pytest.mark.parametrize(
        "run",
        [
            pytest.param(run, id=run.id)
            for run in RUNS
            if ("graph" not in run.mode and (stock_ends(run) or run.mode == "draft extend"))
            or run.id in ("eager: decode_page_boundary", "decode replay: decode_page_boundary")
        ],
    )
    def test_the_harness_on_the_cpu(run: Run) -> None:
        """Paths, comparisons and the ways in which stock ends, before a GPU is asked."""
        with hopper():
            stock = drive(run, "stock", "e4m3", "cpu")
            assert (stock.status == "failed") == bool(stock_ends(run))
            assert stock_ends(run) in stock.reason
            for arm, pool in arms_of(run):
                if pool == "e4m3":
                    ours = drive(run, arm, pool, "cpu")
                    assert ours.status == stock.status
                    equal = judge(run, arm, pool, ours, stock)
                    assert equal is (True if arm == "gather_cast" and not stock.error else None)


def outcome(status: str = "passed", value: float = 1.0, path: str = "gather_cast") -> Outcome:
    same = torch.tensor([value])
    return Outcome(status, compared=[(same, torch.zeros(1))], paths={path})


@pytest.mark.parametrize(
    ("arm", "ours", "stock", "message"),
    [
        ("gather_cast", outcome("failed"), outcome(), "stock passed, gather_cast failed"),
        ("native", outcome("skipped"), outcome(), "stock passed, native skipped"),
        ("gather_cast", outcome(value=1.5), outcome(), "differs from stock"),
        ("native", outcome(path="gather_cast"), outcome(), "attended by"),
        ("gather_cast", outcome(path="native"), outcome("failed"), "attended by"),
    ],
)
def test_the_judge_can_fail(arm: str, ours: Outcome, stock: Outcome, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        judge(RUNS[0], arm, "e4m3", ours, stock)


def test_the_judge_asks_no_more_than_stock() -> None:
    run = RUNS[0]
    assert judge(run, "gather_cast", "e4m3", outcome("failed"), outcome("failed")) is None
    assert judge(run, "gather_cast", "e4m3", outcome(), outcome("skipped")) is None
    assert judge(run, "native", "e4m3", outcome(value=2, path="native"), outcome()) is None
    assert judge(run, "gather_cast", "e4m3", outcome(), outcome()) is True
    assert judge(run, "auto", "bf16", outcome(path=""), outcome()) is True


def test_the_table_counts_the_worst_and_names_it() -> None:
    """A run that stock passed in one process and lost in another is a failure of the table."""
    run = RUNS[0]
    lines = [
        record(run, "stock", "e4m3", Outcome("passed")),
        record(run, "stock", "e4m3", Outcome("failed", "RuntimeError: lost")),
        {**record(run, "native", "e4m3", Outcome("passed")), "verdict": "native differs"},
    ]
    text = table(lines)
    assert "| eager |  |  | 0 of 1 |  | 1 of 1 |  |" in text
    assert f"- {run.id} (e4m3 stock): failed, RuntimeError: lost" in text
    assert "- native, e4m3: native differs" in text
