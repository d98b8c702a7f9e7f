"""Estimate: its arithmetic, against three servers that were really measured, and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fp8mla import cli
from sglang_fp8mla.errors import InvalidArgument
from sglang_fp8mla.estimate import GPUS, Workload, estimate
from sglang_fp8mla.models import BUILT_IN, from_config, load_model

CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


@pytest.mark.parametrize(
    ("model", "pool", "measured_ms"),
    [
        # the report that started this project: GLM-5 on 8 RTX PRO 6000
        ("glm-5", 495_552, 64.6),
        # SGLang issue 35291: DeepSeek-R1 on 8 H200
        ("deepseek-r1", 131_072, 13.77),
        # one H200, 61 layers, one stream of 64 tokens: stock 56.4 ms, gather-cast 4.8 ms
        ("deepseek-v3", 495_552, 56.4 - 4.8),
    ],
)
def test_matches_measured_servers(model, pool, measured_ms):
    """Within 4 %: the estimate is arithmetic, but over rates that were measured."""
    found = estimate(BUILT_IN[model], pool=pool, work=Workload(1, 64))
    assert found.stock_cast_ms == pytest.approx(measured_ms, rel=0.04)


@pytest.mark.parametrize(("live", "measured_us"), [(1024, 3.7), (4096, 4.3), (131_072, 60.0)])
def test_our_cast_matches_the_kernel_on_the_h200(live, measured_us):
    """Within 0.6 us of the plain Triton gather-cast that design.md measured."""
    model = BUILT_IN["deepseek-v3"]
    found = estimate(model, work=Workload(1, live))
    assert found.our_cast_ms * 1e3 / model.layers == pytest.approx(measured_us, abs=0.6)


def test_bytes():
    """576 FP8 bytes read and 1,152 written per slot and layer; FP8 doubles the tokens."""
    found = estimate(BUILT_IN["deepseek-v3"], pool=1000, work=Workload(1, 10))
    assert found.stock_cast_bytes == 61 * 1000 * 576 * 3
    assert found.our_cast_bytes == 61 * 10 * (576 * 3 + 4)
    assert found.kv_bytes_per_token_bf16 == 2 * found.kv_bytes_per_token_fp8 == 61 * 576 * 2
    assert found.pool_tokens_bf16 * 2 == found.pool_tokens_fp8
    assert found.workspace_bytes == 1000 * 576 * 2


def test_memory_gives_the_pool():
    found = estimate(BUILT_IN["deepseek-v3"], kv_memory_gb=35.136, work=Workload(1, 1))
    assert found.pool_tokens_fp8 == 1_000_000
    assert found.pool_bytes == 35_136_000_000


def test_tp_splits_heads_and_no_bytes():
    """Each GPU of a tensor-parallel group holds whole rows."""
    one, eight = (estimate(BUILT_IN["glm-5"], tp=tp) for tp in (1, 8))
    assert (one.heads_per_gpu, eight.heads_per_gpu) == (64, 8)
    assert one.stock_cast_bytes == eight.stock_cast_bytes


def test_shared_prefix_counts_once():
    assert Workload(batch=8, length=101, prefix=100).live_tokens == 108


def test_step_time_gives_a_ratio():
    found = estimate(BUILT_IN["glm-5"], pool=495_552, step_ms=93.0)
    assert found.our_step_ms == pytest.approx(93.0 - found.saved_ms)
    assert found.saved_ms == pytest.approx(found.stock_cast_ms - found.our_cast_ms)


def test_impossible_step_is_said_not_shown():
    """A step shorter than its cast would give a negative time and an absurd ratio."""
    found = estimate(BUILT_IN["glm-5"], pool=495_552, step_ms=10.0)
    assert found.our_step_ms is None
    assert any("more than the step of 10 ms" in note for note in found.notes)


def test_full_pool_saves_little_and_says_so():
    """Where every slot is live, only the kernel's speed is left; where that is equal, nothing."""
    found = estimate(
        BUILT_IN["deepseek-v3"], pool=1000, work=Workload(1, 1000), copy_gb_s=1000, cast_gb_s=1000
    )
    assert found.saved_ms < 0
    assert found.notes == ("the batch fills the pool: there is nothing to save here",)


def test_slow_memory_bounds_the_cast():
    """The cast's measured rate cannot exceed what the memory gives."""
    slow = estimate(BUILT_IN["deepseek-v3"], copy_gb_s=500)
    assert slow.stock_cast_ms == pytest.approx(slow.stock_cast_bytes / 500e6)


def test_built_in_models_have_sources():
    """Dimensions without a source cannot be checked."""
    assert len(BUILT_IN) == 7
    for model in BUILT_IN.values():
        assert model.source.startswith("https://huggingface.co/")
        assert model.dim == 576


def test_built_in_models_match_transformers():
    """The dimensions against the defaults that transformers ships for the same architectures."""
    configuration = pytest.importorskip("transformers").AutoConfig
    for name, model_type in (
        ("deepseek-v3", "deepseek_v3"),
        ("deepseek-v3.2", "deepseek_v32"),
        ("glm-5", "glm_moe_dsa"),
        ("glm-4.7-flash", "glm4_moe_lite"),
    ):
        try:
            config = configuration.for_model(model_type)
        except ValueError:
            pytest.skip(f"this transformers does not know {model_type}")
        found = from_config(config.to_dict(), "transformers")
        want = BUILT_IN[name]
        assert (found.layers, found.heads, found.ckv_dim, found.kpe_dim, found.index_topk) == (
            want.layers,
            want.heads,
            want.ckv_dim,
            want.kpe_dim,
            want.index_topk,
        ), name


def test_reads_folder_file_and_wrapped_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    wrapped = tmp_path / "vl.json"
    wrapped.write_text(json.dumps({"model_type": "kimi_vl", "text_config": CONFIG}))
    for path in (tmp_path, tmp_path / "config.json", wrapped):
        model = load_model(str(path))
        assert (model.layers, model.heads, model.dim) == (61, 16, 576)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a JSON config, got"),
        ("{", "must be a JSON config, got"),
        ("[]", "must hold a JSON object, got a list"),
        ("{}", "must have an integer num_hidden_layers >= 1, got None"),
        (json.dumps({**CONFIG, "kv_lora_rank": None}), "integer kv_lora_rank >= 1, got None"),
        (json.dumps({**CONFIG, "kv_lora_rank": "512"}), "integer kv_lora_rank >= 1, got '512'"),
        (json.dumps({**CONFIG, "num_attention_heads": True}), "num_attention_heads >= 1, got True"),
        ("\x00\xff", "must be a JSON config, got"),
    ],
)
def test_bad_configs(tmp_path, capsys, text, message):
    """One line and exit 2, whatever the file holds."""
    path = tmp_path / "config.json"
    path.write_text(text)
    assert cli.main(["estimate", str(path)]) == cli.EXIT_USAGE
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["no-such-model"],
            "model must be a config.json, a folder with one, or one of deepseek-v3",
        ),
        (["glm-5", "--tp", "7"], "--tp must divide the 64 heads of glm-5, got 7"),
        (["glm-5", "--tp", "0"], "--tp must divide the 64 heads of glm-5, got 0"),
        (["glm-5", "--pool", "0"], "--pool must be > 0, got 0"),
        (["glm-5", "--kv-memory", "-1"], "--kv-memory must be > 0, got -1"),
        (["glm-5", "--step-ms", "0"], "--step-ms must be > 0, got 0"),
        (["glm-5", "--batch", "0"], "--batch must be >= 1, got 0"),
        (["glm-5", "--prefix", "5000"], "--prefix must be <= --length, got 5000 and 4096"),
        (["glm-5", "--bandwidth", "0"], "--bandwidth and --cast-rate must be > 0 GB/s"),
        (["glm-5", "--pool", "4095"], "the batch's 4,096 tokens must fit in the pool of 4,095"),
    ],
)
def test_bad_arguments(words, message, capsys):
    assert cli.main(["estimate", *words]) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_pool_and_memory_exclude_each_other():
    with pytest.raises(InvalidArgument, match="must not both be given"):
        estimate(BUILT_IN["glm-5"], pool=1, kv_memory_gb=1.0)


def test_json_and_table(capsys):
    assert cli.main(["estimate", "kimi-k2", "--tp", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["heads_per_gpu"] == 8
    assert cli.main(["estimate", "glm-5", "--tp", "8", "--gpu", "rtx-pro-6000"]) == 0
    out = capsys.readouterr().out
    assert "64.8 ms" in out
    assert "sparse-attention model" in out
    assert "89 % of the 1,792 on paper" in out


def test_measured_and_paper_bandwidths_are_told_apart():
    assert GPUS["h200"].source == "measured"
    assert all("on paper" in gpu.source for name, gpu in GPUS.items() if name != "h200")


def test_needs_no_torch():
    code = (
        "import sys; from sglang_fp8mla.cli import main; code = main(['estimate', 'glm-5']);"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
