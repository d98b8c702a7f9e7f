"""The demo: exact, honest about bytes, and able to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fp8mla import cli, demo
from sglang_fp8mla.errors import InvalidArgument

torch = pytest.importorskip("torch")

SMALL = demo.Case(pool=512, batch=3, prefix=17, own=5, heads=2, layers=4)


def test_small_case_is_bitwise_equal():
    report = demo.run_case(SMALL)
    assert report.ok
    assert report.bitwise_equal
    assert report.max_abs_difference == 0.0
    assert report.nonfinite_outputs == 0


@pytest.mark.parametrize("kv_dtype", sorted(demo._KV_DTYPES))
@pytest.mark.parametrize(
    ("batch", "prefix", "own"), [(1, 0, 1), (1, 511, 0), (4, 0, 100), (300, 8, 1)], ids=str
)
def test_shapes(kv_dtype, batch, prefix, own):
    """One token, a full pool, no sharing, and more requests than shared tokens."""
    case = demo.Case(pool=512, batch=batch, prefix=prefix, own=own, heads=1, kv_dtype=kv_dtype)
    assert demo.run_case(case).ok


def test_a_missed_row_is_seen(monkeypatch, capsys):
    """The demo can fail: leave one live row out of the cast, and it says so and exits 1."""
    real = demo.cast_live
    monkeypatch.setattr(demo, "cast_live", lambda pool, live, ws: real(pool, live[:-1], ws))
    code = cli.main(["demo", "--pool", "512", "--prefix", "17", "--own", "5", "--batch", "3"])
    assert code == cli.EXIT_NO
    assert "Outputs DIFFER" in capsys.readouterr().out


def test_a_wrong_row_is_seen(monkeypatch):
    """Two live rows swapped are finite and in range: only the comparison sees them."""

    def swapped(pool: torch.Tensor, live: torch.Tensor, workspace: torch.Tensor) -> None:
        rows = pool.view(torch.uint8).index_select(0, live.flip(0)).view(pool.dtype)
        workspace[: live.numel()].copy_(rows)

    monkeypatch.setattr(demo, "cast_live", swapped)
    report = demo.run_case(SMALL)
    assert report.nonfinite_outputs == 0
    assert not report.ok


def test_survives_an_interpreter_that_fails(monkeypatch, capsys):
    """numpy 2.5 breaks Triton's interpreter: the demo says so and goes on with torch."""
    errors = pytest.importorskip("triton.runtime.errors")
    from sglang_fp8mla import workspace

    def fail(*args: object, **kwargs: object) -> None:
        raise errors.InterpreterError("only 0-dimensional arrays can be converted")

    monkeypatch.setattr(workspace, "list_live_slots", fail)
    assert cli.main(["demo", "--pool", "64", "--prefix", "4", "--own", "1"]) == 0
    out = capsys.readouterr().out
    assert "equal to the last bit" in out
    assert "Kernels: not run (Triton's interpreter does not run with this numpy" in out


def test_a_wrong_kernel_is_seen(monkeypatch):
    """The kernels are part of the verdict: one that casts nothing fails the demo."""
    gather_cast = pytest.importorskip("sglang_fp8mla.kernels.gather_cast")
    monkeypatch.setattr(gather_cast, "gather_cast", lambda *operands: None)
    report = demo.run_case(SMALL)
    assert not report.ok
    assert report.nonfinite_outputs > 0


def test_dead_rows_keep_their_poison():
    """As many rows of the workspace as are live are written, and no others."""
    generator = torch.Generator().manual_seed(1)
    slots = demo._make_slots(SMALL, generator)
    live = torch.unique(torch.cat(slots)).long()
    pool = demo._make_pool(SMALL, live, generator)
    workspace = torch.full((SMALL.pool, demo.DIM), float("nan"), dtype=torch.bfloat16)
    demo.cast_live(pool, live, workspace)
    written = ~workspace.isnan().all(dim=1)
    assert written.nonzero().flatten().tolist() == list(range(live.numel()))
    torch.testing.assert_close(
        workspace[: live.numel()], demo.cast_all(pool)[live], rtol=0, atol=0, equal_nan=False
    )


def test_bytes_follow_live_slots_not_the_pool():
    """Cost follows the pool for stock only (case 1 of the public reports)."""
    small, large = demo.Case(pool=131_072), demo.Case(pool=1_048_576)
    assert large.stock_bytes == 8 * small.stock_bytes
    assert large.our_bytes == small.our_bytes
    # 576 FP8 bytes read and 576 bf16 values written per slot
    assert small.stock_bytes == 131_072 * 576 * 3


def test_shared_prefix_is_moved_once():
    """Eight requests over 100 shared tokens reference 808 rows and move 108 (case 3)."""
    case = demo.Case(pool=512, batch=8, prefix=100, own=1)
    assert (case.nnz, case.live_slots) == (808, 108)
    report = demo.run_case(case)
    assert report.ok
    assert report.ours.rows_cast == 108


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pool", "1"], "demo: --pool must be >= 2, got 1"),
        (["--batch", "0"], "demo: --batch must be >= 1, got 0"),
        (["--own", "-1"], "demo: --own must be >= 0, got -1"),
        (["--prefix", "0", "--own", "0"], "demo: --prefix plus --own must be >= 1 token, got 0"),
        (
            ["--pool", "100", "--prefix", "50", "--own", "50", "--batch", "1"],
            "demo: the live tokens must fit in the pool of 100 slots, got 100; "
            "raise --pool or lower --batch, --prefix or --own",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(flags, message, capsys):
    assert cli.main(["demo", *flags]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == f"sglang-fp8mla: error: {message}\n"


def test_pool_larger_than_memory(monkeypatch):
    """Refused with a pool that fits, before anything is allocated."""
    monkeypatch.setattr(os, "sysconf", lambda name: 1024)
    with pytest.raises(InvalidArgument, match=r"--pool must fit in memory, .* try --pool \d+$"):
        demo.run_case(demo.Case())


def test_json(capsys):
    code = cli.main(["demo", "--json", "--pool", "512", "--prefix", "17", "--own", "5"])
    data = json.loads(capsys.readouterr().out)
    assert code == 0
    assert data["ok"] is True
    assert data["max_abs_difference"] == 0
    assert data["case"]["live_slots"] == 17 + 8 * 5


def test_json_of_a_failure_is_json(monkeypatch, capsys):
    """NaN is not JSON: a NaN difference is null."""
    monkeypatch.setattr(demo, "cast_live", lambda pool, live, ws: None)
    code = cli.main(["demo", "--json", "--pool", "64", "--prefix", "4", "--own", "1"])
    text = capsys.readouterr().out
    assert code == 1
    assert "NaN" not in text
    assert json.loads(text)["max_abs_difference"] is None


def test_without_torch():
    """One line that says what to install; exit 1; no traceback."""
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from sglang_fp8mla.cli import main; sys.exit(main(['demo']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "demo: torch must be installed" in done.stderr
    assert "pip install torch" in done.stderr
    assert len(done.stderr.splitlines()) == 1
