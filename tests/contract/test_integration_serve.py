"""The arms of the recorded server runs (`bench/serve/arms.py`) start with the arguments they mean.

A wrong flag would cost minutes of a borrowed GPU; SGLang's own resolution finds it here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from contract.sglang_wheels import install_plugin
from contract.test_integration import resolve_lines

from bench.serve import arms, make_nextn
from sglang_fp8mla import BACKEND_NAME

pytestmark = pytest.mark.sglang

# the fixed flags of serve_ab.py that matter here
FIXED = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--sampling-backend", "pytorch"),
    *("--cuda-graph-max-bs-decode", "8", "--disable-radix-cache", "--disable-prefill-cuda-graph"),
    *("--flashinfer-mla-disable-ragged", "--mem-fraction-static", "0.8", "--random-seed", "1"),
    *("--max-total-tokens", "131072", "--device", "cuda", "--port", "30000"),
]


def test_every_arm_resolves_as_its_groups_stock(tmp_path: Path) -> None:
    """Same arguments within a group, but for the name; and what each set is for is on."""
    model = tmp_path / "nextn"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(make_nextn.make_config(8)))
    make_nextn.write_relatives(str(model), 8)
    words = arms.expand(list(arms.SETS), str(model))
    names, argvs = [], []
    for arm in words:
        name, _, flags = arm.partition("=")
        own = flags.partition(",")[0][1:] if flags[0] == "@" else str(model)
        # what serve_ab.py and serve_overlap.py take out: environment, model, flags to drop
        cli = [word for word in flags.split(",") if ":=" not in word and word[0] not in "@!"]
        dropped = [f"--{word[1:]}" for word in flags.split(",") if word[0] == "!"]
        fixed = [word for word in FIXED if word not in dropped]
        names.append(name)
        argvs.append(["--model-path", own, *fixed, *cli])
    found = resolve_lines(argvs, install_plugin(tmp_path / "site"), check=True)
    results = dict(zip(names, found, strict=True))
    assert len(results) == len(words), "arm names repeat"
    for name, result in results.items():
        assert "fields" in result, f"{name}: {result.get('at') or result['log']}"
        group = name.partition(".")[0]
        stock = results[f"{group}.stock"]["fields"]
        # one of the three, for an arm of one phase alone; none without MLA
        expected = dict(stock)
        if not name.endswith(".stock") and group != "mha":
            swapped = [
                key
                for key, value in stock.items()
                if key.endswith("attention_backend") and value == "'flashinfer'"
            ]
            assert swapped, name
            expected |= dict.fromkeys(swapped, repr(BACKEND_NAME))
        assert result["fields"] == expected, name

    def asked(name: str, **fields: str) -> None:
        assert {key: results[name]["fields"][key] for key in fields} == fields

    asked("dummy.exact", speculative_num_draft_tokens="4", load_format="'dummy'")
    asked("nextn1.exact", speculative_num_steps="1", load_format="'auto'")
    asked("nextn3.auto", speculative_num_steps="3")
    asked("dp2.exact", attn_dp_size="2")
    asked("dcp2.exact", dcp_size="2")
    asked("compile.gather_cast", enable_torch_compile="True")
    asked("ngram16.exact", page_size="16", speculative_num_draft_tokens="4")
    asked("lora.exact", enable_lora="True")
    asked("mha.exact", attention_backend="'flashinfer'", prefill_attention_backend="'triton'")
    asked("evict.exact", max_total_tokens="16384", disable_radix_cache="False")
    asked("evict.exact", enable_hierarchical_cache="True")
    asked("asleep.exact", enable_memory_saver="True", enable_weights_cpu_backup="True")
    asked("pd.exact", disaggregation_mode="'decode'", disaggregation_transfer_backend="'fake'")
    asked("pdmux.exact", enable_pdmux="True", disable_overlap_schedule="True")
    asked("tbo.exact", enable_two_batch_overlap="True", attn_dp_size="2")
