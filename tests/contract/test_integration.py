"""Our name on real launch lines: every gate of SGLang's argument resolution judges it as stock.

Each line is resolved twice by the installed SGLang (and by 0.5.22), with `flashinfer` and with our
name, on a pretended H200 in a process of its own. Either both are refused with the same words, or
all arguments come out equal but for the name itself, which must be ours again, pickled too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from contract.launch_lines import HOPPER, SM120
from contract.sglang_wheels import (
    SGLANG_0522,
    IndexUnreachable,
    fetch_sglang,
    install_plugin,
    make_distribution,
)

from sglang_fp8mla import BACKEND_NAME
from sglang_fp8mla.integration import FIELDS

pytestmark = pytest.mark.sglang

HERE = Path(__file__).parent

COMMON = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_DEEPSEEK = {
    **_LATENT,
    "num_hidden_layers": 2,
    "q_lora_rank": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "mla": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
    },
    # sparse attention, to be run densely by the recipe
    "dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **_DEEPSEEK,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "qk_head_dim": 192,
    },
    # MLA beside linear attention: unified memory takes its speculation only on such a hybrid
    "hybrid": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **_LATENT,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
    },
    "mha": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
    },
}


@dataclass(frozen=True)
class Line:
    """One launch line; NAME stands for the backend, MHA for a draft without MLA.

    Args:
        gate: without our resolution hooks this line comes out otherwise than stock's; a control
            run shows that, or the line would prove nothing.
        ours: the arguments that must hold our name in the end.
        refused: both names are refused, and the message contains this.
    """

    words: str
    model: str = "mla"
    gate: bool = False
    ours: tuple[str, ...] = ("attention_backend",)
    refused: str = ""


_CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
_TREE = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
_RECIPE = '--json-model-override-args {"architectures":["DeepseekV2ForCausalLM"]}'
_BOTH = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_DRAFT = "speculative_draft_attention_backend"

LINES: dict[str, Line] = {
    # each argument alone, and mixed
    "base": Line(""),
    "fp8_e4m3": Line("--kv-cache-dtype fp8_e4m3"),
    "fp8_e5m2": Line("--kv-cache-dtype fp8_e5m2"),
    "fp4": Line("--kv-cache-dtype fp4_mx_block16", gate=True),
    "nvfp4": Line("--kv-cache-dtype nvfp4", gate=True, refused="requires Blackwell"),
    "prefill": Line("--prefill-attention-backend NAME", ours=("prefill_attention_backend",)),
    "decode": Line("--decode-attention-backend NAME", ours=("decode_attention_backend",)),
    "prefill+decode": Line(
        "--prefill-attention-backend NAME --decode-attention-backend NAME", ours=_BOTH
    ),
    "all": Line(
        "--attention-backend NAME --prefill-attention-backend NAME --decode-attention-backend NAME",
        ours=_BOTH,
    ),
    "fa3+ours": Line(
        "--prefill-attention-backend fa3 --decode-attention-backend NAME",
        ours=("decode_attention_backend",),
    ),
    "ours+flashmla": Line(
        "--prefill-attention-backend NAME --decode-attention-backend flashmla",
        ours=("prefill_attention_backend",),
    ),
    "ours+incapable": Line(
        "--prefill-attention-backend NAME --decode-attention-backend trtllm_mla",
        refused="TRTLLM MLA backend is only supported on Blackwell",
    ),
    "stock prefill": Line("--attention-backend NAME --prefill-attention-backend flashinfer"),
    "draft": Line(
        f"--attention-backend triton --speculative-algorithm EAGLE {_CHAIN} "
        "--speculative-draft-attention-backend NAME",
        ours=(_DRAFT,),
    ),
    "draft triton": Line(
        f"--attention-backend NAME --speculative-algorithm EAGLE {_CHAIN} "
        "--speculative-draft-attention-backend triton",
    ),
    "draft stock": Line(
        f"--attention-backend NAME --speculative-algorithm EAGLE {_CHAIN} "
        "--speculative-draft-attention-backend flashinfer",
    ),
    # gates
    "multi-item scoring": Line("--enable-mis", gate=True),
    "unified memory": Line("--enable-unified-memory", gate=True),
    "unified memory, hybrid": Line("--enable-unified-memory", model="hybrid", gate=True),
    "page-major layout": Line(
        "--enable-unified-memory --enable-page-major-kv-layout", model="hybrid", gate=True
    ),
    "page-major alone": Line("--enable-page-major-kv-layout", refused="enable-unified-memory"),
    "DCP": Line("--tp-size 2 --dcp-size 2"),
    "DCP + unified memory": Line(
        "--tp-size 2 --dcp-size 2 --enable-unified-memory", model="hybrid", gate=True
    ),
    "spec-verify audit": Line(
        f"--enable-unified-memory --speculative-algorithm EAGLE3 {_CHAIN} "
        "--speculative-draft-model-path MHA",
        model="hybrid",
        gate=True,
    ),
    "spec-verify audit, DCP": Line(
        "--enable-unified-memory --tp-size 2 --dcp-size 2 --speculative-algorithm DSPARK "
        "--speculative-draft-model-path MHA",
        model="hybrid",
        gate=True,
        refused="flashinfer is excluded under --dcp-size > 1",
    ),
    "spec-verify audit, DFLASH": Line(
        "--enable-unified-memory --speculative-algorithm DFLASH --speculative-draft-model-path MHA",
        model="hybrid",
        gate=True,
        ours=("attention_backend", _DRAFT),
    ),
    "EAGLE tree, page 16": Line(f"--speculative-algorithm EAGLE {_TREE} --page-size 16", gate=True),
    "EAGLE tree, page 1": Line(f"--speculative-algorithm EAGLE {_TREE}"),
    "NEXTN": Line(f"--speculative-algorithm NEXTN {_CHAIN}"),
    "NGRAM": Line("--speculative-algorithm NGRAM"),
    "NGRAM, page 16": Line("--speculative-algorithm NGRAM --page-size 16", gate=True),
    "NGRAM, DP attention": Line(
        "--speculative-algorithm NGRAM --tp-size 2 --dp-size 2 --enable-dp-attention",
        refused="does not support dp attention",
    ),
    "DFLASH": Line(
        "--speculative-algorithm DFLASH --speculative-draft-model-path MHA",
        ours=("attention_backend", _DRAFT),
    ),
    "deterministic": Line(
        "--enable-deterministic-inference",
        gate=True,
        refused="for deterministic inference with absorbed-MLA models",
    ),
    # features without a name test: nothing may differ
    "DP attention": Line("--tp-size 2 --dp-size 2 --enable-dp-attention"),
    "two-batch overlap": Line("--enable-two-batch-overlap --moe-a2a-backend deepep --tp-size 2"),
    "pdmux": Line("--enable-pdmux"),
    "PD prefill": Line("--disaggregation-mode prefill"),
    "PD decode": Line("--disaggregation-mode decode"),
    "HiCache": Line("--enable-hierarchical-cache"),
    "LoRA": Line("--enable-lora --lora-paths a=/nowhere"),
    "torch.compile": Line("--enable-torch-compile"),
    "mixed chunk": Line("--enable-mixed-chunk"),
    "memory saver": Line("--enable-memory-saver"),
    "page 64": Line("--page-size 64"),
    "no prefill graph": Line("--disable-prefill-cuda-graph"),
    "prefill CP": Line("--tp-size 2 --enable-prefill-cp --cp-strategy zigzag"),
    "GLM-5 densely": Line(f"{_RECIPE} --kv-cache-dtype fp8_e4m3", model="dsa"),
    # a model without MLA keeps stock's name, and with it all that stock gets
    "MHA": Line("", model="mha", ours=()),
    "MHA, multi-item scoring": Line("--enable-mis", model="mha", gate=True, ours=()),
    "MHA, deterministic": Line("--enable-deterministic-inference", model="mha", gate=True, ours=()),
}


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH on which the package counts as installed, its entry points with it."""
    return install_plugin(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json each: SGLang's resolution needs no weights."""
    paths = {}
    for name, config in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps({**COMMON, **config}))
        paths[name] = str(folder)
    return paths


@pytest.fixture(scope="session", params=["installed", SGLANG_0522])
def sglang_path(request: pytest.FixtureRequest) -> str:
    """What goes before PYTHONPATH to run with one or the other SGLang."""
    if request.param == "installed":
        return ""
    try:
        return f"{fetch_sglang(request.param).parent}{os.pathsep}"
    except IndexUnreachable as error:
        pytest.skip(f"sglang {request.param} cannot be downloaded: {error}")


def make_argv(line: Line, name: str, models: dict[str, str]) -> list[str]:
    words = [
        models["mha"] if word == "MHA" else name if word == "NAME" else word
        for word in line.words.split()
    ]
    fixed = ["--device", "cuda", "--load-format", "dummy", "--mem-fraction-static", "0.8"]
    fixed += ["--random-seed", "1", "--port", "30000", "--model-path", models[line.model]]
    if "-attention-backend" not in line.words:
        fixed += ["--attention-backend", name]
    return [*fixed, *words]


def resolve_lines(
    argvs: list[list[str]],
    pythonpath: str,
    *,
    platform: dict[str, Any] = HOPPER,
    without_hooks: bool = False,
    check: bool = False,
    env: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run launch_lines.py; a result a line."""
    request = {
        **{"platform": platform, "lines": argvs, "without_hooks": without_hooks},
        "check": check,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_lines.py")],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": pythonpath,
            "PYTHONWARNINGS": "ignore",
            **(env or {}),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("[{") :])
    return results


@dataclass(frozen=True)
class Outcomes:
    stock: dict[str, dict[str, Any]]
    ours: dict[str, dict[str, Any]]
    control: dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def outcomes(sglang_path: str, plugin_path: str, model_path: dict[str, str]) -> Outcomes:
    """All lines, both names, and the gates once more without our hooks: two processes."""
    path = sglang_path + plugin_path
    names = list(LINES)
    gates = [name for name in names if LINES[name].gate]

    def argv(name: str, backend: str) -> list[str]:
        return make_argv(LINES[name], backend, model_path)

    both = resolve_lines(
        [argv(name, backend) for backend in ("flashinfer", BACKEND_NAME) for name in names], path
    )
    control = resolve_lines([argv(name, BACKEND_NAME) for name in gates], path, without_hooks=True)
    half = len(names)
    return Outcomes(
        stock=dict(zip(names, both[:half], strict=True)),
        ours=dict(zip(names, both[half:], strict=True)),
        control=dict(zip(gates, control, strict=True)),
    )


@pytest.mark.parametrize("name", LINES)
def test_resolves_as_stock_but_for_the_name(outcomes: Outcomes, name: str) -> None:
    """The same refusal, or every argument equal and our name where it was asked for."""
    line, stock, ours = LINES[name], outcomes.stock[name], outcomes.ours[name]
    if line.refused:
        assert line.refused in stock["error"]
        assert (ours["type"], ours["error"]) == (stock["type"], stock["error"])
        return
    assert "fields" in stock, stock.get("at") or stock["log"]
    assert "fields" in ours, ours.get("at") or ours["log"]
    differing = {key for key in stock["fields"] if ours["fields"][key] != stock["fields"][key]}
    assert differing == set(line.ours)
    for key in differing:
        assert (stock["fields"][key], ours["fields"][key]) == ("'flashinfer'", repr(BACKEND_NAME))
    assert ours["pickled"] == ours["fields"]


@pytest.mark.parametrize("name", [name for name in LINES if LINES[name].gate])
def test_gate_would_judge_the_bare_name_otherwise(outcomes: Outcomes, name: str) -> None:
    """Without our hooks the line fails or differs: the gate exists, and the test can fail."""
    stock, control = outcomes.stock[name], outcomes.control[name]
    assert control["error"] != stock.get("error")
    assert (
        BACKEND_NAME in control["error"]
        or "only supported for the 'flashinfer'" in control["error"]
    )


def test_every_argument_alone_reads_back_our_name() -> None:
    """The table above covers each argument by itself."""
    alone = {line.ours for line in LINES.values() if len(line.ours) == 1}
    assert alone == {(name,) for name in FIELDS}


def test_resolves_on_sm120(plugin_path: str, model_path: dict[str, str]) -> None:
    """The GPU of the original report, where other defaults hold: decode alone leaves prefill."""
    lines = [
        Line(""),
        Line("--decode-attention-backend NAME"),
        Line(f"{_RECIPE} --kv-cache-dtype fp8_e4m3", model="dsa"),
    ]
    argvs = [
        make_argv(line, backend, model_path)
        for line in lines
        for backend in ("flashinfer", BACKEND_NAME)
    ]
    results = resolve_lines(argvs, plugin_path, platform=SM120)
    for line, stock, ours in zip(lines, results[::2], results[1::2], strict=True):
        assert "fields" in ours, ours.get("at") or ours["log"]
        changed = "decode_attention_backend" if "decode" in line.words else "attention_backend"
        expected = {**stock["fields"], changed: repr(BACKEND_NAME)}
        assert ours["fields"] == expected


def test_a_path_without_a_model_leaves_the_name_alone(plugin_path: str) -> None:
    """For `none` and `dummy` SGLang leaves the resolution before our last step."""
    argv = ["--model-path", "dummy", "--device", "cuda", "--attention-backend", BACKEND_NAME]
    (result,) = resolve_lines([argv], plugin_path)
    assert result["fields"]["attention_backend"] == repr(BACKEND_NAME)


def test_plugin_left_out_is_an_invalid_choice(plugin_path: str, model_path: dict[str, str]) -> None:
    """SGLANG_PLUGINS without us: SGLang knows no such name, and argparse lists those it knows."""
    argv = make_argv(Line(""), BACKEND_NAME, model_path)
    (result,) = resolve_lines([argv], plugin_path, env={"SGLANG_PLUGINS": "other"})
    assert result["exit"] == 2
    assert f"invalid choice: '{BACKEND_NAME}'" in result["log"]


OLD_FLASHINFER = {
    "common": (Line(""), True),
    "decode": (Line("--decode-attention-backend NAME --prefill-attention-backend fa3"), True),
    "draft only": (
        Line("--attention-backend triton --speculative-draft-attention-backend NAME"),
        False,
    ),
}


def test_old_flashinfer_is_refused_at_launch(
    plugin_path: str, model_path: dict[str, str], tmp_path: Path
) -> None:
    """SGLang's own version check, which its launcher makes for `flashinfer` alone."""
    make_distribution(tmp_path, "flashinfer_python", "0.6.12")
    path = f"{tmp_path}{os.pathsep}{plugin_path}"
    argvs = [make_argv(line, BACKEND_NAME, model_path) for line, _ in OLD_FLASHINFER.values()]
    results = resolve_lines(argvs, path)
    skipped = resolve_lines(argvs, path, env={"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"})
    assert all("fields" in result for result in skipped)
    for (_, checked), result in zip(OLD_FLASHINFER.values(), results, strict=True):
        if not checked:
            assert "fields" in result
            continue
        assert "flashinfer_python is installed with version 0.6.12" in result["error"]
        assert "minimum required version 0.7.2" in result["error"]
        assert "pip install 'flashinfer_python[cu13]==0.7.2'" in result["error"]
